"""References without sockets: values and those who wait for them, destructors, and what happens between two events."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.values import encode

from farcall.errors import (
    Delivery,
    NotInitialized,
    PeerDead,
    ReferenceLost,
    RpcError,
    RpcTimeout,
    SerializationError,
)
from farcall.ids import ForkId, RefId, WorkerInfo
from farcall.protocol.frames import FAILURE, REQUEST, RESPONSE, Frame
from farcall.protocol.notes import KEEP, Notes, encode_notes
from farcall.protocol.references.messages import Confirm, Fork, Register, Release, Withdraw
from farcall.rpc import owned_values
from farcall.rpc.call import call_sync
from farcall.rpc.future import call_async
from farcall.rpc.method_calls import Proxy
from farcall.rpc.owned_values import KeptRequest, Owned
from farcall.rpc.references import LINGER_S, RETRY_S, UNKNOWN_OWNER_S, NodeReferences, call_remote
from farcall.rpc.rref import RRef
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.calls.results import StoredFailure
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node.hooks import Hooks
from farcall.serialize import encode_failure

ME, OWNER, OTHER = (WorkerInfo(name, rank) for rank, name in enumerate(("me", "owner", "other")))


class FakePeer:
    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.number = info.id
        self.sent: list[Any] = []
        self.refuses: Exception | None = None

    def control(self, message: Any) -> None:
        self.sent.append(message)


class FakeCalls:
    """A table of calls whose requests go nowhere."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingCall] = {}
        self.refuses: Exception | None = None

    def send(self, call: PendingCall, *message: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        call.call_id = len(self.pending) + 1
        self.pending[call.call_id] = call

    exchange = send

    def claim(self, call_id: int) -> PendingCall | None:
        return self.pending.pop(call_id, None)

    def waiting(self) -> Any:
        return nullcontext()


class FakeNode:
    """What the references of a node ask of it, in one thread and without time."""

    running = True
    is_static = True
    why_ended: RpcError | None = None

    def __init__(self) -> None:
        self.recalled: list[int] = []
        self.device_list: list[object] = []
        self.info = ME
        self.me = SimpleNamespace(number=ME.id)
        self.timeout_s = 60.0
        self.membership = SimpleNamespace(
            members=[SimpleNamespace(name=name, rank=rank) for name, rank in (ME, OWNER, OTHER)]
        )
        self.server = SimpleNamespace(worker=ME)
        self.resources = SimpleNamespace(core=SimpleNamespace(recall=self.recalled.append))
        self.calls = FakeCalls()
        self.peers = {info.id: FakePeer(info) for info in (OWNER, OTHER)}
        self.tasks: list[Any] = []
        self.executor = SimpleNamespace(submit=self.tasks.append)
        self.clock = Clock()
        self.timer = self.clock.timer
        self.hooks = Hooks()

    def peer(self, rank: int) -> FakePeer:
        return self.peers[rank]

    def numbered(self, member: int) -> FakePeer | None:
        return self.peers.get(member)

    other = numbered

    def is_peer(self, peer: FakePeer) -> bool:
        return self.peers.get(peer.info.id) is peer

    def turn_clock(self, now: float) -> None:
        while self.clock.due <= now:
            self.clock.turn_to(now)


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def references(node: FakeNode) -> NodeReferences:
    return NodeReferences(node)  # type: ignore[arg-type]


def local(references: NodeReferences, value: Any) -> RRef[Any]:
    rref: RRef[Any] = RRef.__new__(RRef)
    references.own(rref, value)
    return rref


def create(references: NodeReferences, node: FakeNode, timeout_s: float = 60.0) -> RRef[Any]:
    return references.create(node.peer(OWNER.id), print, Frame(REQUEST, function=b"f"), timeout_s)  # type: ignore[arg-type]


def answer(node: FakeNode) -> None:
    for call_id, call in list(node.calls.pending.items()):
        node.calls.claim(call_id)
        call.on_answer(Frame(RESPONSE, 0, call_id))


# ---------------------------------------------------------------------- values


def test_whoever_waits_for_a_value_is_woken_once() -> None:
    owned = Owned()
    woken: list[str] = []
    owned.when_ready(lambda: woken.append("before"))
    assert not owned.wait(0.0)
    owned.resolve("value")
    owned.when_ready(lambda: woken.append("after"))
    assert woken == ["before", "after"]
    assert owned.wait(0.0)
    assert owned.get() == owned.get(to_send=True) == "value"


def test_a_failed_value_raises_a_new_error_each_time() -> None:
    owned = Owned()
    try:
        raise KeyError("why")
    except KeyError as error:
        owned.fail(encode_failure(error, "there"))
    raised = []
    for _ in range(2):
        with pytest.raises(KeyError, match="why") as caught:
            owned.get()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    with pytest.raises(StoredFailure):
        owned.get(to_send=True)


# ---------------------------------------------------------------------- destructors


def test_a_destructor_never_waits_for_the_lock(references: NodeReferences, node: FakeNode) -> None:
    rref = local(references, "value")
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with references._lock:
            holding.set()
            done.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(10.0)
    del rref  # would hang here
    assert len(references.released) == 1
    assert node.clock.due < NEVER, "nobody was asked to collect it"
    done.set()
    thread.join()
    references.drop_all(0.0)
    assert not references.snapshot()[0].owned


def test_a_reference_that_was_never_made_dies_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    RRef.__new__(RRef)
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_value_that_may_run_code_dies_on_a_worker(references: NodeReferences, node: FakeNode) -> None:
    for value in (1, object()):
        rref = local(references, value)
        del rref
        references.drop_all(0.0)
    assert len(node.tasks) == 1, "the integer needs no worker, the object does"


# ---------------------------------------------------------------------- creations


def test_a_creation_is_confirmed_by_its_answer_and_released_afterwards(
    references: NodeReferences, node: FakeNode
) -> None:
    rref = create(references, node)
    assert not rref.confirmed_by_owner()
    assert references.counts().pending_users == 1
    answer(node)
    assert rref.confirmed_by_owner()
    fork = rref._fork
    del rref
    references.drop_all(0.0)
    assert node.peer(OWNER.id).sent == [Release([(fork.ref, fork.fork_id)])]


def test_a_creation_dropped_before_its_answer_is_released_after_it(references: NodeReferences, node: FakeNode) -> None:
    create(references, node)
    references.drop_all(0.0)
    assert node.peer(OWNER.id).sent == []
    answer(node)
    node.turn_clock(monotonic() + LINGER_S)
    assert [type(message) for message in node.peer(OWNER.id).sent] == [Release]


@pytest.mark.parametrize(
    ("error", "raised"), [(RpcTimeout("late"), RpcTimeout), (ReferenceLost("gone"), ReferenceLost)]
)
def test_a_creation_that_was_not_sent_surfaces_at_use(
    references: NodeReferences, node: FakeNode, error: RpcError, raised: type[RpcError]
) -> None:
    node.calls.refuses = error
    rref = create(references, node)
    other: Any = node.peer(OTHER.id)
    for use in (rref.to_here, rref.rpc_sync().anything, lambda: references.fork(rref, other)):
        with pytest.raises(raised, match="RRef creation"):
            use()


def test_a_call_about_to_be_sent_when_its_creation_fails_is_failed_too(
    references: NodeReferences, node: FakeNode
) -> None:
    rref = create(references, node)
    creation = rref._creation
    assert creation is not None
    failed: list[RpcError] = []
    waiting: Any = SimpleNamespace(call_id=0, on_failure=failed.append)
    creation.attach(waiting, Frame(REQUEST))
    node.calls.claim(creation.call_id)
    creation.on_failure(RpcTimeout("late"))
    assert failed == []
    node.calls.send(waiting)  # it gets its number only now
    node.turn_clock(monotonic() + RETRY_S)
    assert node.clock.due == NEVER
    assert [type(error) for error in failed] == [RpcTimeout]


# ---------------------------------------------------------------------- messages with notes


def take_forks(references: NodeReferences, sender: Any, kind: int, *forks: Fork) -> Frame:
    notes = Notes(list(forks))
    frame = Frame(kind, 0, 1, b"f", encode_notes(notes))
    assert references.take_forks(sender, frame, notes)
    return frame


def test_forks_of_a_message_that_nobody_reads_are_released(references: NodeReferences, node: FakeNode) -> None:
    fork = Fork(RefId(OWNER.id, 1), ForkId(OWNER.id, 2), owner=OWNER.id, holder=ME.id, number=1)
    noted = take_forks(references, node.peer(OWNER.id), RESPONSE, fork)
    assert len(noted.forks) == 1
    assert references.counts().users == 1
    del noted
    references.drop_all(0.0)
    assert node.peer(OWNER.id).sent == [Release([(fork.ref, fork.fork_id)])]


def test_a_registration_waits_for_a_link_that_does_not_stand_yet(references: NodeReferences, node: FakeNode) -> None:
    owner = node.peers.pop(OWNER.id)
    fork = Fork(RefId(OTHER.id, 1), ForkId(OTHER.id, 2), owner=OWNER.id, holder=ME.id, number=1)
    noted = take_forks(references, node.peer(OTHER.id), REQUEST, fork)
    now = monotonic() + RETRY_S
    node.turn_clock(now)
    assert node.clock.due <= now + 2 * RETRY_S
    assert owner.sent == []
    node.peers[OWNER.id] = owner
    node.turn_clock(now + 1.0)
    assert owner.sent == [Register([fork])]
    node.hooks.controls[Confirm](owner, Confirm([(fork.ref, fork.fork_id)]))
    assert noted.forks[0].confirmed_by_owner()


def creation_came(references: NodeReferences, sender: Any, number: int) -> Frame:
    fork = Fork(RefId(OTHER.id, number), ForkId(OTHER.id, number + 1), owner=ME.id, holder=OTHER.id, number=number)
    notes = Notes([], created=fork)
    frame = Frame(REQUEST, KEEP, 1, b"f", encode_notes(notes))
    assert references.take_forks(sender, frame, notes)
    return frame


def test_a_question_that_overtook_the_creation_waits_for_it(references: NodeReferences, node: FakeNode) -> None:
    early = references.find(RefId(OTHER.id, 1), OWNER.id)
    assert not early.ready
    noted = creation_came(references, node.peer(OTHER.id), 1)
    assert noted.forks[0] is early
    # One that is older than what came is gone, and a dead member creates nothing more.
    with pytest.raises(ReferenceLost, match="has no value"):
        references.find(RefId(OTHER.id, 0), OWNER.id)
    node.hooks.peer_gone[0](node.peer(OTHER.id))
    with pytest.raises(ReferenceLost, match="has no value"):
        references.find(RefId(OTHER.id, 9), OWNER.id)


def test_a_question_that_comes_after_the_creation_was_withdrawn_does_not_wait(
    references: NodeReferences, node: FakeNode
) -> None:
    fork = Fork(RefId(OTHER.id, 1), ForkId(OTHER.id, 2), owner=ME.id, holder=OTHER.id, number=1)
    other = node.peer(OTHER.id)
    node.hooks.controls[Withdraw](other, Withdraw((fork,)))
    assert references.find(fork.ref, OWNER.id).failure is not None
    node.hooks.controls[Release](other, Release(((fork.ref, fork.fork_id),)))
    assert references.pending_values() == 0
    with pytest.raises(ReferenceLost, match="has no value"):
        references.find(fork.ref, OWNER.id)


@pytest.mark.parametrize("way", ["sync", "async", "remote", "method", "method async", "method remote"])
def test_a_wrong_timeout_leaves_no_fork_behind(references: NodeReferences, node: FakeNode, way: str) -> None:
    node.part = lambda kind: references  # type: ignore[attr-defined]
    mine = local(references, "value")
    theirs = create(references, node)
    answer(node)
    ways: dict[str, Callable[[RRef[Any]], Any]] = {
        "sync": lambda one: call_sync(node, OWNER.id, print, (one,), None, -2.0),  # type: ignore[arg-type]
        "async": lambda one: call_async(node, OWNER.id, print, (one,), None, -2.0),  # type: ignore[arg-type]
        "remote": lambda one: call_remote(node, OWNER.id, print, (one,), None, -2.0),  # type: ignore[arg-type]
        "method": lambda one: theirs.rpc_sync(timeout=-2.0).method(one),
        "method async": lambda one: theirs.rpc_async(timeout=-2.0).method(one),
        "method remote": lambda one: theirs.remote(timeout=-2.0).method(one),
    }
    with pytest.raises(ValueError, match="timeout"):
        ways[way](mine)
    del mine
    gc.collect()  # the error's traceback
    node.turn_clock(monotonic() + 1.0)  # finds the fork, which lingers for company
    node.turn_clock(monotonic() + 2.0)
    assert references.snapshot()[1] == {}


def test_a_use_after_the_end_says_that_it_is_the_end_and_not_that_the_owner_is_gone(
    references: NodeReferences, node: FakeNode
) -> None:
    rref = create(references, node)
    answer(node)
    node.why_ended = NotInitialized("the node is ended")
    node.calls.refuses = PeerDead("this node closed the link", Delivery.NOT_SENT)
    for use in (rref.to_here, rref.rpc_sync().anything):
        with pytest.raises(NotInitialized):
            use()


def test_a_fork_that_comes_from_the_dead_leaves_no_place_behind(references: NodeReferences, node: FakeNode) -> None:
    """Frames that had arrived before the death are still delivered; the value they speak of was freed with it."""
    node.hooks.peer_gone[0](node.peer(OTHER.id))
    fork = Fork(RefId(OTHER.id, 1), ForkId(OTHER.id, 2), owner=ME.id, holder=ME.id, number=1)
    noted = take_forks(references, node.peer(OTHER.id), REQUEST, fork)
    with pytest.raises(ReferenceLost):
        noted.forks[0].local_value()
    assert references.pending_values() == 0
    assert references.places == {}


def test_pickling_outside_a_call_is_refused(references: NodeReferences) -> None:
    with pytest.raises(SerializationError, match="can only be sent as part of a call"):
        encode([local(references, 1)])
    assert references.counts().forks == 0


def test_a_use_of_a_dead_owners_reference_says_so(references: NodeReferences, node: FakeNode) -> None:
    rref = create(references, node)
    answer(node)
    node.hooks.peer_gone[0](node.peer(OWNER.id))
    again = r"was on owner, which is gone: create it again \(docs/restart.md\)"
    for use in (rref.to_here, rref.rpc_sync().anything, rref.remote().anything):
        with pytest.raises(ReferenceLost, match=f"^the value {again}"):
            use()
    rref._type = dict
    with pytest.raises(ReferenceLost, match=f"^the value, of type dict, {again}"):
        rref.to_here()
    assert references.counts().users == 0


# ---------------------------------------------------------------------- looks


def test_a_proxy_takes_any_name_and_has_none_of_its_own() -> None:
    called: list[Any] = []
    proxy = Proxy(lambda *args, **kwargs: called.append((args, kwargs)), "rref", 3.0)  # type: ignore[arg-type]
    proxy.call(1, name=2)
    proxy.__next__()
    assert called == [(("rref", "call", 3.0, 1), {"name": 2}), (("rref", "__next__", 3.0), {})]


def test_the_origin_is_recorded_only_when_asked(references: NodeReferences, node: FakeNode) -> None:
    assert create(references, node).origin == ""
    references.traced = True
    assert __file__ in create(references, node).origin
    assert __file__ in local(references, 1).origin


# ---------------------------------------------------------------------- where members come and go


class GrowingNode(FakeNode):
    is_static = False

    def call_soon(self, function: Callable[[], object]) -> None:
        function()


def bringing(owner: Any, serial: RefId | None = None) -> Notes:
    return Notes([Fork(RefId(owner.id, 1), ForkId(owner.id, 2), owner.id, ME.id, 1)], serial=serial)


class Waiting:
    """The messages of OTHER that a node, which has not heard of OWNER, has deferred."""

    def __init__(self) -> None:
        self.node = GrowingNode()
        self.references = NodeReferences(self.node)  # type: ignore[arg-type]
        self.sender: Any = self.node.peer(OTHER.id)
        self.sender.back = 7
        self.node.hooks.peer_joined[0](self.sender)
        self.numbers: list[int] = []

    def comes(self, number: int, notes: Notes) -> bool:
        """May it be placed?"""
        return not self.references.defers(self.sender, number, notes, lambda: self.numbers.append(number))

    def announce(self) -> None:
        self.node.hooks.peer_joined[0](self.node.peer(OWNER.id))


def test_a_message_waits_for_word_of_the_owner_of_what_it_brings() -> None:
    waiting = Waiting()
    assert waiting.comes(1, bringing(OTHER))
    assert not waiting.comes(2, bringing(OWNER))
    assert waiting.numbers == [2]
    assert waiting.node.recalled == []
    waiting.announce()
    assert waiting.node.recalled == [7]
    assert waiting.comes(2, bringing(OWNER))


def test_a_message_does_not_wait_for_ever_for_an_owner_that_nobody_knows() -> None:
    waiting = Waiting()
    assert not waiting.comes(1, bringing(OWNER))
    due = waiting.node.clock.due
    waiting.node.turn_clock(due - 0.1)
    assert waiting.node.recalled == []
    waiting.node.turn_clock(due)
    assert waiting.node.recalled == [7]
    notes = bringing(OWNER)
    assert waiting.comes(1, notes)
    assert waiting.references.is_lost(notes.forks[0])
    assert waiting.node.clock.due == NEVER


def test_calls_of_one_object_keep_their_order_behind_one_that_waits() -> None:
    waiting = Waiting()
    actor = local(waiting.references, object())._fork.ref
    plain = Notes([], serial=actor)
    assert waiting.comes(1, plain)
    assert not waiting.comes(2, bringing(OWNER, actor))
    assert not waiting.comes(3, plain)
    assert waiting.comes(4, Notes([], serial=RefId(ME.id, 99))), "of another object"
    waiting.announce()
    assert not waiting.comes(5, plain), "it was on its way when the others were recalled"
    waiting.node.recalled.clear()
    for number in (2, 3):
        assert waiting.comes(number, bringing(OWNER, actor) if number == 2 else plain)
        assert waiting.node.recalled == [7], "those behind it may be deferred again by now"
        waiting.node.recalled.clear()
    assert waiting.comes(5, plain)
    assert waiting.node.recalled == []
    assert waiting.comes(6, plain)


def test_an_owner_of_whom_word_comes_late_is_not_lost() -> None:
    waiting = Waiting()
    waiting.comes(1, bringing(OWNER))
    waiting.node.turn_clock(monotonic() + UNKNOWN_OWNER_S)
    waiting.announce()
    rref = create(waiting.references, waiting.node)
    answer(waiting.node)
    assert waiting.references.peer(rref) is waiting.node.peer(OWNER.id)


def test_a_value_that_cannot_be_looked_into_fails_its_creation_and_hangs_nobody(
    node: FakeNode, references: NodeReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a node with devices, each value is searched for tensors on them, which runs code of the value's class."""

    def stamp(*_: Any) -> None:
        raise RecursionError("a value that holds itself")

    monkeypatch.setattr(owned_values, "stamp", stamp)
    sent: list[Frame] = []
    peer: Any = SimpleNamespace(info=OTHER, number=OTHER.id, send=lambda frame, **_: sent.append(frame), served={})
    answered: list[Any] = []
    server: Any = SimpleNamespace(
        worker=ME, devices=["cuda:0"], inline=SimpleNamespace(expected_s={}), answered=answered.append
    )
    owned = Owned()
    request = KeptRequest(server, peer, Frame(REQUEST, KEEP, 1, b"f"), owned, lambda peer: None)
    request.answer([object()])
    assert [frame.kind for frame in sent] == [FAILURE]
    assert answered == [request]
    with pytest.raises(RecursionError):
        owned.get()


def test_one_member_asks_for_so_many_values_before_they_are_created(
    references: NodeReferences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall.rpc.owned_values.MOST_AWAITED", 2)
    first, second, third = (RefId(OTHER.id, number) for number in range(1, 4))
    hostile, other = 7, 8
    assert references.find(first, hostile) is references.find(first, hostile)
    references.find(second, hostile)
    for made_up in (third, RefId(OWNER.id, 1), RefId(99, 1)):
        with pytest.raises(ReferenceLost, match="nobody has created"):
            references.find(made_up, hostile)
    assert references.find(third, other) is not None
    references._values.note_creation(first)
    assert references.find(RefId(OTHER.id, 4), hostile) is not None


def test_a_value_that_never_came_leaves_no_place_when_it_is_given_back(
    references: NodeReferences, node: FakeNode
) -> None:
    """Else a member could have as many places kept as it liked, and list a few at a time."""
    other = node.peer(OTHER.id)
    for number in (1, 2):
        fork = Fork(RefId(OTHER.id, number), ForkId(OTHER.id, 10 + number), ME.id, ME.id, number)
        frame = take_forks(references, other, REQUEST, fork)
        if number == 2:
            references.find(fork.ref, OWNER.id)  # who waits for it still hears of its creation
        frame.forks = []
        gc.collect()
        node.turn_clock(monotonic() + LINGER_S)
        assert list(references.places) == [fork.ref] * (number - 1)


def test_nobody_creates_a_value_in_the_name_of_another(references: NodeReferences, node: FakeNode) -> None:
    """Else the other's own call with that number would count as a duplicate, and never run."""
    with pytest.raises(ValueError, match="in the name of another"):
        creation_came(references, node.peer(OWNER.id), 1)
    assert creation_came(references, node.peer(OTHER.id), 1).forks
