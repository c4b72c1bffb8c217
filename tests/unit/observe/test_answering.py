"""A node's questions: each is answered once, in time, whatever happens to the peer or the node."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.kit.clock import Clock

from farcall.ids import WorkerInfo
from farcall.observe.answering import CALL_STATE, SILENT_S, Answering, CallState, explaining_s, explanation
from farcall.observe.snapshot import (
    LATER,
    QUEUED,
    RUNNING,
    OutgoingCall,
    PoolView,
    ServedCall,
    StackLine,
    outgoing_call,
)
from farcall.protocol.observing import Ask, Told
from farcall.runtime.calls.pending import SyncCall
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.peers.peer import RemotePeer

POOL = PoolView(size=16, threads=16, busy=16, parked=0, queued=3)


class FakeLink:
    broken: str | None = None


class FakePeer(RemotePeer):
    __slots__ = ("__dict__",)

    def __init__(self) -> None:
        unused: Any = None
        super().__init__(WorkerInfo("w1", 1), 0x1F, 1, unused, unused, lambda peer: None)
        self.link: Any = FakeLink()
        self.linked = True
        self.sent: list[Any] = []

    def control(self, message: Any, more: bool = False) -> None:
        self.sent.append(message)


class FakeNode:
    """As much of a node as questions need."""

    def __init__(self) -> None:
        self.info = WorkerInfo("w0", 0)
        self.running = True
        self.why_unreached = ""
        self.links = SimpleNamespace(peers=SimpleNamespace(why_unreached=lambda peer: self.why_unreached))
        self.hooks = Hooks()
        self.clock = Clock()
        self.timer = self.clock.timer

    def use_questions(self, questions: Answering) -> None:
        pass

    def something_ended(self) -> None:
        pass

    def on_io_thread(self) -> bool:
        return True

    def end(self) -> None:
        self.running = False
        for hook in self.hooks.ended:
            hook()


@pytest.fixture
def node() -> Any:
    return FakeNode()


@pytest.fixture
def answering(node: Any) -> Answering:
    return Answering(node)


def ask(answering: Answering, peer: RemotePeer) -> list[bytes]:
    heard: list[bytes] = []
    answering.ask(peer, CALL_STATE, b"", 0.3, heard.append)
    return heard


def test_an_answer_comes_back(node: Any, answering: Answering) -> None:
    peer = FakePeer()
    heard = ask(answering, peer)
    (question,) = peer.sent
    assert (question.subject, question.everyone) == (CALL_STATE, False)
    assert node.hooks.unsettled[0]() == 1  # a graceful shutdown waits for it
    node.hooks.controls[Told](peer, Told(question.number, "w1", b"so"))
    node.hooks.controls[Told](peer, Told(question.number, "w1", b"twice"))
    assert heard == [b"so"]
    assert node.hooks.unsettled[0]() == 0


def test_a_peer_that_is_silent_is_not_asked_again_for_a_while(
    node: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("farcall.observe.answering.monotonic", lambda: now[0])
    peer = FakePeer()
    heard = ask(answering, peer)
    node.clock.turn_to(100.2)
    assert node.clock.due == pytest.approx(100.3)
    assert heard == []
    node.clock.turn_to(100.4)
    assert heard == [b""]
    assert ask(answering, peer) == [b""]
    assert len(peer.sent) == 1
    now[0] += SILENT_S + 1
    assert ask(answering, peer) == []
    assert len(peer.sent) == 2


def test_a_peer_that_is_gone_is_not_asked(answering: Answering) -> None:
    peer = FakePeer()
    peer.link.broken = "gone"
    assert ask(answering, peer) == [b""]
    assert peer.sent == []


def test_the_end_of_the_node_leaves_nobody_waiting(node: Any, answering: Answering) -> None:
    peer = FakePeer()
    heard = ask(answering, peer)
    node.end()
    assert heard == [b""]
    assert ask(answering, peer) == [b""]


def test_a_member_is_answered_and_unknown_subjects_get_nothing(node: Any, answering: Answering) -> None:
    peer = FakePeer()
    answering.subjects["color"] = lambda asker, argument: b"blue" + argument
    node.hooks.controls[Ask](peer, Ask(1, "color", b"ish"))
    node.hooks.controls[Ask](peer, Ask(2, "nonsense"))
    assert peer.sent == [Told(1, "w0", b"blueish"), Told(2, "w0", b"")]


def test_a_subject_that_fails_says_nothing_and_is_logged(
    node: Any, answering: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(asker: object, argument: bytes) -> bytes:
        raise ValueError("on purpose")

    answering.subjects["color"] = fail
    heard: list[bytes] = []
    answering.answer(None, "color", b"", heard.append)
    assert heard == [b""]
    assert "on purpose" in caplog.text


# ---------------------------------------------------------------------- how it reads


def said(served: ServedCall | None, **more: Any) -> str:
    return explanation("w1", msgspec.msgpack.encode(CallState(served, POOL, **more)), 0.3)


def test_each_state_in_words() -> None:
    assert "never arrived there, or its answer is on the way" in said(None)
    assert "w1 for a thread for 2.00 s (num_worker_threads). Functions on the 16 threads there: 16" in said(
        ServedCall(1, "w0", "f", QUEUED, 2.0, 0)
    )
    holder = ServedCall(2, "w2", "g", RUNNING, 3.0, 5)
    behind = ServedCall(1, "w0", "f", QUEUED, 2.0, 0, holder, waiting=1)
    assert said(behind) == (
        "it has waited on w1 for its turn for 2.00 s, as its object is serial: g() for w2 has run for 3.00 s"
    )
    assert said(msgspec.structs.replace(behind, behind=ServedCall(2, "w2", "g", QUEUED, 3.0, 0))).endswith(
        ": g() for w2 has waited for a thread for 3.00 s"
    )
    assert "waiting there for 2.00 s: w1 is still starting" in said(
        ServedCall(1, "w0", "f", QUEUED, 2.0, 0), worker_state="starting"
    )
    free = msgspec.structs.replace(POOL, busy=3, parked=2)
    queued = CallState(ServedCall(1, "w0", "f", QUEUED, 2.0, 0), free, worker_state="expelled")
    assert explanation("w1", msgspec.msgpack.encode(queued), 0.3) == (
        "it has been waiting on w1 for 2.00 s, though 15 threads are free there: w1 is expelled"
    )
    assert "returned a future or coroutine" in said(ServedCall(1, "w0", "f", LATER, 2.0, 0))
    nested = OutgoingCall(7, "w2", "g", 1.5, 60.0, 5)
    text = said(ServedCall(1, "w0", "f", RUNNING, 2.0, 5), thread="T", at=StackLine("a.py", 3, "f"), waits_for=nested)
    assert "running it for 2.00 s, on thread T, now at a.py:3 in f, where it has waited 1.50 s for w2" in text
    assert "did not say within 0.3 s" in explanation("w1", b"", 0.3)
    assert explanation("w1", b"nonsense", 0.3) == ""


@pytest.mark.parametrize(("what", "title"), [(torch.add, "torch.add"), (len, "len"), (functools.partial(len), "len")])
def test_a_call_has_the_name_that_its_user_knows(what: Any, title: str) -> None:
    peer: Any = SimpleNamespace(info=WorkerInfo("w1", 1))
    assert outgoing_call(SyncCall(peer, what, 1.0)).function == title


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(60.0, 0.3), (0.4, 0.1), (0.001, 0.02)])
def test_who_has_little_patience_is_not_held_up_for_long(timeout_s: float, bound_s: float) -> None:
    assert explaining_s(timeout_s) == pytest.approx(bound_s)


def test_a_call_to_a_member_that_is_not_connected_says_so(node: Any, answering: Answering) -> None:
    node.why_unreached = "w0 has no connection to w1 (no route)"
    peer, texts = FakePeer(), list[str]()
    answering.explain(overdue(peer, 1), texts.append)
    node.clock.turn_to(node.clock.due)
    assert texts == ["w0 has no connection to w1 (no route)"]


def overdue(peer: RemotePeer, call_id: int) -> SyncCall:
    call = SyncCall(peer, len, 10.0)
    call.call_id = call_id
    return call


@pytest.mark.parametrize("answers", [True, False])
def test_a_peer_has_one_question_about_overdue_calls_at_a_time(
    node: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr("farcall.observe.answering.monotonic", lambda: now[0])
    peer, texts = FakePeer(), list[str]()
    for call_id in range(1, 301):
        answering.explain(overdue(peer, call_id), texts.append)
    assert [msgspec.msgpack.decode(ask.argument) for ask in peer.sent] == [[1]]
    if not answers:
        node.clock.turn_to(100.4)
        assert len(peer.sent) == 1
        assert len(texts) == 300
        assert all("did not say within 0.3 s" in text for text in texts)
        return
    asked = 0
    state = CallState(None, POOL)
    while node.hooks.unsettled[0]():
        question = peer.sent[-1]
        numbers = msgspec.msgpack.decode(question.argument)
        asked += len(numbers)
        data = msgspec.msgpack.encode([state] * len(numbers))
        node.hooks.controls[Told](peer, Told(question.number, "w1", data))
    assert asked == len(texts) == 300
    assert len(peer.sent) == 1 + 5
    assert all("never arrived" in text for text in texts)


@pytest.mark.parametrize("data", [b"nonsense", msgspec.msgpack.encode([]), msgspec.msgpack.encode([1, 2, 3])])
def test_an_answer_of_no_sense_explains_nothing(node: Any, answering: Answering, data: bytes) -> None:
    peer, texts = FakePeer(), list[str]()
    answering.explain(overdue(peer, 1), texts.append)
    node.hooks.controls[Told](peer, Told(peer.sent[0].number, "w1", data))
    assert texts == [""]
    assert node.hooks.unsettled[0]() == 0


def test_calls_that_wait_for_the_next_question_hear_of_the_end_of_the_node(node: Any, answering: Answering) -> None:
    peer, texts = FakePeer(), list[str]()
    for call_id in (1, 2):
        answering.explain(overdue(peer, call_id), texts.append)
    node.end()
    assert len(texts) == 2
