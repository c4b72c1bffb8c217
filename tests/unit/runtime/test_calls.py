"""The pending table: each call ends once, by its answer, its deadline, or the end of its peer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from farcall.errors import Cancelled, Delivery, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import REQUEST, Frame
from farcall.runtime.calls.pending import CallTable, PendingCall, name_of
from farcall.runtime.io.loop import NEVER
from farcall.runtime.peers.peer import Peer
from farcall.serialize.context import IfUnsent


class FakeLoop:
    def __init__(self) -> None:
        self.times: list[float] = []

    def attend_by(self, when: float) -> None:
        self.times.append(when)


class FakePeer(Peer):
    def __init__(self, name: str) -> None:
        super().__init__(WorkerInfo(name, 0), "1f", True)


class Call(PendingCall):
    def __init__(self, deadline: float = NEVER, peer: Peer | None = None) -> None:
        self.deadline = deadline
        self.timeout_s = 1.5
        self.what = len
        self.peer = peer or FakePeer("w1")
        self.arrived = False
        self.failures: list[RpcError] = []

    def on_failure(self, error: RpcError) -> None:
        self.failures.append(error)


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def table(loop: FakeLoop) -> CallTable:
    unused: Any = None
    fake: Any = loop
    return CallTable(fake, unused)


def test_a_call_is_claimed_once(table: CallTable) -> None:
    call = Call()
    number = table.register(call)
    assert table.claim(number) is call
    assert table.claim(number) is None
    assert len(table) == 0


def test_deadlines_in_order_of_time(table: CallTable, loop: FakeLoop) -> None:
    far, near, none = Call(20.0), Call(10.0), Call()
    for call in (far, near, none):
        table.register(call)
        table.watch_deadline(call)
    assert loop.times == [20.0, 10.0]
    assert table.tick(9.9) == 10.0
    assert not near.failures
    assert table.tick(10.0) == 20.0
    assert isinstance(near.failures[0], RpcTimeout)
    assert "1500 ms" in str(near.failures[0])
    assert "w1 has not answered len()" in str(near.failures[0])
    assert table.tick(1e9) == NEVER
    assert len(far.failures) == 1
    assert not none.failures


def test_an_equal_timeout_wakes_nobody(table: CallTable, loop: FakeLoop) -> None:
    for deadline in (5.0, 5.1, 5.2):
        call = Call(deadline)
        table.register(call)
        table.watch_deadline(call)
    assert loop.times == [5.0]
    assert table.tick(5.05) == 5.1


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
    """One that takes no bytes until the deadline of the call; the ticker is a moment faster."""

    def __init__(self, table: CallTable) -> None:
        super().__init__("stuck")
        self.table = table

    def send(self, frame: Frame, *_: Any) -> None:
        frame.handed_over = True
        self.table._next_deadline = 0.0
        self.table.tick(1e9)
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
