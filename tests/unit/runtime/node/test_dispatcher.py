"""Messages that cannot be handled, or not yet."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock

from farcall.ids import ForkId, RefId, WorkerInfo
from farcall.protocol.frames import REQUEST, Frame
from farcall.protocol.membership.messages import Gossip
from farcall.protocol.notes import Notes, encode_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import NoReferences, Server
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.peers.peer import Peer


class FakePeer(Peer):
    def __init__(self, name: str, number: int) -> None:
        unused: Any = None
        super().__init__(WorkerInfo(name, number), number, number, unused, unused)
        self.sent: list[Frame] = []

    def send(self, frame: Frame, *_: Any, **__: Any) -> None:
        self.sent.append(frame)


class Deferring(NoReferences):
    """References that keep the messages with forks until a test delivers them."""

    def __init__(self) -> None:
        self.kept: list[Frame] = []
        self.keeps = True

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        if self.keeps:
            self.kept.append(frame)
        return not self.keeps


class Callee:
    """A dispatcher over a real server and a real table of calls; nobody runs the requests."""

    def __init__(self) -> None:
        clock = Clock()
        unused: Any = None
        core: Any = SimpleNamespace(settle=lambda *_: None, cancel=lambda number: None)
        executor = Executor("w0", 1, core)
        self.calls = CallTable(core, clock.timer, executor)
        self.references = Deferring()
        self.server = Server(WorkerInfo("w0", 0), executor, log=EventLog(), nested=self.calls)
        self.server.references = self.references
        self.dispatcher = Dispatcher(
            "w0",
            Hooks(),
            loop=unused,
            admission=SimpleNamespace(limit=NEVER, queued=0),  # type: ignore[arg-type]
            calls=self.calls,
            server=self.server,
            leaving=SimpleNamespace(entered=False),  # type: ignore[arg-type]
            watch=unused,
            core=core,
        )


@pytest.fixture
def callee() -> Callee:
    return Callee()


CALLER, OTHER = FakePeer("w1", 1), FakePeer("w2", 2)


def request_of_a_strangers_value(time_left_s: float = 0.0) -> Frame:
    fork = Fork(RefId(9, 1), ForkId(9, 2), 9, 0, 1)
    return Frame(REQUEST, 0, 7, b"f", encode_notes(Notes([fork], time_left_s=time_left_s)))


def test_a_message_of_this_node_to_itself_does_not_hold_up_those_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Dispatcher):
        def __init__(self) -> None:
            self._name = "w0"

        def on_message(self, peer: Any, frame: Frame) -> None:
            raise RuntimeError("a fault")

    myself: Any = SimpleNamespace(info=SimpleNamespace(name="w0"))
    Failing().redeliver(myself, Frame(REQUEST, 0, 1))
    assert "cannot handle a message from w0" in caplog.text
    assert "a fault" in caplog.text


def test_the_time_of_a_call_runs_while_the_call_is_deferred(callee: Callee) -> None:
    callee.dispatcher.on_message(CALLER, request_of_a_strangers_value(60.0))
    [frame] = callee.references.kept
    deadline, _ = frame.scope
    assert deadline <= monotonic() + 60.0
    callee.references.keeps = False
    callee.dispatcher.redeliver(CALLER, frame)
    [request] = callee.server.active
    assert request.deadline == deadline


def test_a_cancellation_reaches_a_call_that_is_deferred(callee: Callee) -> None:
    told: list[tuple[Peer, int | None]] = []
    callee.references.cancel_deferred = lambda peer, call_id=None: told.append((peer, call_id))  # type: ignore[method-assign]
    callee.server.cancel(CALLER, 7)
    callee.server.cancel_all(OTHER)
    assert told == [(CALLER, 7), (OTHER, None)]


@pytest.mark.parametrize("notes", [b"\xc1", b"\x07", b"\x93\x90\xc0\xa1\xff", b"\x91", b"\xdd\xff\xff\xff\xff"])
def test_malformed_notes_are_one_line_of_the_log_and_no_traceback(
    callee: Callee, caplog: pytest.LogCaptureFixture, notes: bytes
) -> None:
    callee.dispatcher.redeliver(CALLER, Frame(REQUEST, 0, 7, b"f", notes))
    [record] = caplog.records
    assert record.exc_info is None
    assert "cannot read a message from w1: " in record.getMessage()


@pytest.mark.parametrize(
    ("is_known", "is_member", "is_heard"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_news_in_the_name_of_a_member_that_has_another_connection_are_not_believed(
    callee: Callee, is_known: bool, is_member: bool, is_heard: bool
) -> None:
    """Where members may be hostile: whoever knows the secret can connect in the name of any of them."""
    heard: list[object] = []
    callee.dispatcher._watch = lambda: SimpleNamespace(  # type: ignore[assignment, return-value]
        is_guarded=True,
        is_member=lambda incarnation: is_member,
        on_message=lambda sender, message: heard.append(message),
    )
    peer: Any = SimpleNamespace(known=is_known, incarnation=1)
    callee.dispatcher._on_news(peer, Gossip(()))
    assert bool(heard) is is_heard
