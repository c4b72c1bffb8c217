"""The pending table: each call ends once, by its answer, its deadline, or the end of its peer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.clock import Clock
from tests.kit.waiting import PATIENCE_S, wait_until

from farcall.errors import Cancelled, Delivery, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import REQUEST, Frame
from farcall.runtime.calls.admission import Fullness
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import FEWEST_DEADLINES, CallTable, PendingCall, name_of
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import Peer
from farcall.serialize.context import IfUnsent

LOOP: Any = SimpleNamespace(on_thread=lambda: False)


class FakeCore:
    """Sends nothing anywhere."""

    def post(self, *frame: Any, **options: Any) -> int:
        return 0


def make(clock: Clock, **options: Any) -> CallTable:
    core: Any = FakeCore()
    return CallTable(core, clock.timer, Executor("test", 1, core), **options)


class FakePeer(Peer):
    def __init__(self, name: str) -> None:
        unused: Any = None
        super().__init__(WorkerInfo(name, 0), 0x1F, 0, unused, LOOP)
        self.way = 1

    def encode(self, frame: Frame, deadline: float) -> Any:
        return b"", ()

    def cancel(self, call_id: int) -> None: ...


class Call(PendingCall):
    def __init__(self, deadline: float = NEVER, peer: Peer | None = None) -> None:
        self.deadline = deadline
        self.timeout_s = 1.5
        self.started_at = 0.0
        self.what = len
        self.peer = peer or FakePeer("w1")
        self.arrived = False
        self.call_id = 0
        self.failures: list[RpcError] = []

    def on_failure(self, error: RpcError) -> None:
        self.failures.append(error)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> CallTable:
    return make(clock)


def send(table: CallTable, *calls: Call) -> None:
    for call in calls:
        table.send(call, Frame(REQUEST, function=b"f"))


def test_a_call_is_claimed_once(table: CallTable) -> None:
    call = Call()
    number = table.register(call)
    assert table.claim(number) is call
    assert table.claim(number) is None
    assert len(table) == 0


def test_deadlines_in_order_of_time(table: CallTable, clock: Clock) -> None:
    far, near, none = Call(20.0), Call(10.0), Call()
    send(table, far, near, none)
    assert clock.due == 10.0
    clock.turn_to(9.9)
    assert not near.failures
    clock.turn_to(10.0)
    assert isinstance(near.failures[0], RpcTimeout)
    assert "1500 ms" in str(near.failures[0])
    assert "w1 has not answered len()" in str(near.failures[0])
    clock.turn_to(19.9)
    assert not far.failures
    clock.turn_to(20.0)
    assert len(far.failures) == 1
    assert clock.due == NEVER
    assert not none.failures


def test_an_equal_timeout_names_no_time(table: CallTable, clock: Clock) -> None:
    send(table, Call(5.0), Call(5.1), Call(5.2))
    assert [when for when, _ in clock.named] == [5.0]
    clock.turn_to(5.05)
    assert clock.due == 5.1


def test_whoever_waits_for_the_last_call_hears_that_it_was_given_up(clock: Clock) -> None:
    told: list[int] = []
    table = make(clock, on_given_up=lambda: told.append(len(table)))
    send(table, Call(5.0), Call(5.0), Call(6.0))
    clock.turn_to(5.0)
    assert told == [1]
    clock.turn_to(6.0)
    assert told == [1, 0]


def test_the_end_of_one_peer_fails_its_calls_only(table: CallTable) -> None:
    dead, alive = FakePeer("dead"), FakePeer("alive")
    calls = [Call(peer=peer) for peer in (dead, alive, dead)]
    for call in calls:
        table.register(call)
    assert table.fail_all(lambda call: Cancelled(call.peer.info.name), dead) == 2
    assert [len(call.failures) for call in calls] == [1, 0, 1]
    assert table.fail_all(lambda call: Cancelled("all")) == 1
    assert len(table) == 0


class StuckPeer(FakePeer):
    """One that takes no bytes until the deadline of the call; the I/O thread is a moment faster."""

    def __init__(self, table: CallTable) -> None:
        super().__init__("stuck")
        self.table = table

    def encode(self, frame: Frame, deadline: float) -> Any:
        frame.handed_over = True
        self.table.fail_overdue(1e9)
        raise RpcTimeout("took no bytes", Delivery.NOT_SENT)


def test_what_goes_with_a_call_is_withdrawn_also_where_another_thread_fails_it(table: CallTable) -> None:
    withdrawn: list[str] = []
    undo = [IfUnsent(lambda: withdrawn.append("lent")), lambda: withdrawn.append("fork")]
    call = Call(1.0, StuckPeer(table))
    table.send(call, Frame(REQUEST, function=b"f", undo=undo))
    assert len(call.failures) == 1
    assert withdrawn == ["lent", "fork"]


@pytest.mark.parametrize(
    ("what", "name"), [(torch.add, "torch.add"), (pow, "pow"), (threading.Lock().acquire, "lock.acquire"), (7, "int")]
)
def test_functions_are_called_as_users_know_them(what: Any, name: str) -> None:
    assert name_of(what) == name


class CancelledParent:
    """A request whose function makes a call; its caller gives up while that call waits."""

    function_name = "outer"
    cancelled = False


def test_a_cancellation_reaches_a_call_that_waits_for_room(clock: Clock) -> None:
    table = make(clock)
    peer = FakePeer("full")
    peer.full = Fullness(4, 4)
    call, parent = Call(peer=peer), CancelledParent()
    call.parent = parent  # type: ignore[assignment]
    outcomes: list[BaseException] = []

    def call_it() -> None:
        try:
            send(table, call)
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=call_it, daemon=True)
    thread.start()
    wait_until(lambda: peer.full is not None and peer.full._gates)
    parent.cancelled = True
    table.cancel(call)
    thread.join(PATIENCE_S)
    assert isinstance(outcomes[0], Cancelled)
    assert outcomes[0].delivery is Delivery.NOT_SENT
    assert len(table) == 0


def test_each_caller_gets_an_error_of_its_own_when_the_node_ends(table: CallTable) -> None:
    calls = [Call(), Call()]
    for call in calls:
        table.register(call)
    why = Cancelled("w0 shut down", Delivery.NOT_SENT)
    table.end(why)
    failures = [call.failures[0] for call in calls]
    assert failures[0] is not failures[1]
    assert {(type(error), str(error), error.delivery) for error in failures} == {  # type: ignore[attr-defined]
        (Cancelled, "w0 shut down", Delivery.NOT_SENT)
    }


class Unscanned(dict[int, PendingCall]):
    """A table that nobody may go through."""

    def values(self) -> Any:
        raise AssertionError("all calls were looked at")


def test_a_deadline_looks_at_no_call_but_the_overdue_ones(table: CallTable, clock: Clock) -> None:
    table.pending = Unscanned()
    calls = [Call(1.0 + number) for number in range(100)]
    send(table, *calls, Call())
    for number, call in enumerate(calls):
        clock.turn_to(1.0 + number)
        assert len(call.failures) == 1
        assert len(table) == 100 - number
    assert clock.due == NEVER


def test_deadlines_of_calls_that_have_ended_do_not_pile_up(table: CallTable, clock: Clock) -> None:
    waiting = [Call(50.0), Call(70.0)]
    send(table, *waiting)
    for _ in range(5 * FEWEST_DEADLINES):
        call = Call(60.0)
        send(table, call)
        table.claim(call.call_id)
        if clock.due <= 0.0:
            clock.turn_to(0.0)
    assert len(table._due) <= FEWEST_DEADLINES + 5
    assert clock.due == 50.0
    clock.turn_to(70.0)
    assert [len(call.failures) for call in waiting] == [1, 1]
