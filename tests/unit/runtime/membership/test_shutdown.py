"""The driver of the departure machine: what it tells the machine, and that the loop wakes when the machine wants it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.waiting import PATIENCE_S

from farcall.ids import WorkerInfo
from farcall.protocol.departure.events import DepartureMessage
from farcall.protocol.departure.machine import STATUS_INTERVAL_S
from farcall.protocol.messages import DepartureProbe, DepartureReleased, DepartureReport
from farcall.runtime.io.timers import NEVER
from farcall.runtime.membership.shutdown import Leaving
from farcall.runtime.peers.peer import Peer

NONE: Any = None
OTHER = Peer(WorkerInfo("w1", 1), 5, 1, NONE, NONE)
RETURN_S = 60.0


class StillLoop:
    """A loop that is run by hand."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], object]] = deque()
        self.asked = threading.Event()
        self.clock = Clock()
        self.timer = self.clock.timer

    def call_soon(self, function: Callable[[], object]) -> None:
        self.soon.append(function)
        self.asked.set()

    def run(self) -> None:
        assert self.asked.wait(PATIENCE_S)
        while self.soon:
            self.soon.popleft()()


class Leaver:
    """Rank 0 of two, with its thread in ``enter``."""

    def __init__(self, timeout_s: float = 0.0, in_flight: int = 0) -> None:
        self.loop = StillLoop()
        self.in_flight = in_flight
        self.activity = 7
        self.oldest = "a call for w1"
        self.other = OTHER
        self.sent: list[tuple[int, DepartureMessage]] = []
        self.silent: set[int] = set()
        self.leaving = Leaving(
            0,
            {0: "w0", 1: "w1"},
            self.loop,  # type: ignore[arg-type]
            lambda: (self.in_flight, self.activity),
            lambda: (self.oldest, time.monotonic() - 3.0),
            send=lambda rank, message: self.sent.append((rank, message)),
            neighbours=lambda: [1],
            fell_silent=self.silent.__contains__,
            return_s=RETURN_S,
        )
        self.result: list[tuple[str, ...]] = []
        self.thread = threading.Thread(target=lambda: self.result.append(self.leaving.enter(timeout_s)), daemon=True)
        self.thread.start()
        self.loop.run()

    def other_is_ready(self, round_number: int) -> None:
        self.says_ready(self.other, round_number)

    def says_ready(self, peer: Peer, round_number: int, sequence: int = 0) -> None:
        report = DepartureReport(sequence or round_number + 1, round_number, [1], True, 3, [], 0, False)
        self.leaving.on_message(peer, report)

    def finished(self) -> tuple[str, ...]:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.result[0]


def probes(leaver: Leaver) -> list[int]:
    return [message.round for _, message in leaver.sent if isinstance(message, DepartureProbe)]


def test_idle_members_agree_and_leave() -> None:
    leaver = Leaver()
    leaver.other_is_ready(0)
    assert probes(leaver) == [1]
    leaver.other_is_ready(1)
    assert any(isinstance(message, DepartureReleased) for _, message in leaver.sent)
    leaver.leaving.on_peer_gone(OTHER)  # it was told and left: as good as an acknowledgement
    assert leaver.finished() == ()


def test_one_that_came_for_a_dead_one_is_waited_for_and_the_end_of_the_dead_one_is_not_its_end() -> None:
    leaver = Leaver()
    leaver.other_is_ready(0)
    leaver.other = Peer(WorkerInfo("w1", 1), 6, 6, NONE, NONE)
    leaver.leaving.on_peer_came(leaver.other)
    leaver.leaving.on_peer_gone(OTHER)  # late
    assert probes(leaver) == [1], "what the dead one said does not count"
    leaver.says_ready(OTHER, 1, sequence=99)  # read before its link ended, and handled now
    assert probes(leaver) == [1], "nor what it says now"
    leaver.other_is_ready(0)
    assert probes(leaver) == [1, 2]
    leaver.other_is_ready(2)
    assert any(isinstance(message, DepartureReleased) for _, message in leaver.sent)


def test_busy_member_waits_until_poked() -> None:
    leaver = Leaver(in_flight=1)
    leaver.other_is_ready(0)
    assert probes(leaver) == []
    leaver.in_flight = 0
    leaver.leaving.poke()
    now = time.monotonic() + 0.1
    assert leaver.loop.clock.due < now  # soon
    leaver.loop.clock.turn_to(now)
    assert probes(leaver) == [1]


def test_poke_costs_nothing_while_nobody_leaves() -> None:
    loop = StillLoop()
    leaving = Leaving(
        0,
        {0: "w0"},
        loop,  # type: ignore[arg-type]
        lambda: (0, 0),
        lambda: ("", 0.0),
        send=lambda rank, message: None,
        neighbours=list,
        fell_silent=lambda incarnation: False,
        return_s=RETURN_S,
    )
    leaving.poke()
    assert loop.clock.due == NEVER


def test_loop_is_asked_to_wake_at_the_deadline() -> None:
    leaver = Leaver(timeout_s=4.0)
    first = leaver.leaving._machine.next_deadline()
    assert first is not None
    assert leaver.loop.clock.due == first


def test_timeout_says_who_is_late_and_why() -> None:
    leaver = Leaver(timeout_s=4.0)
    while leaver.loop.clock.due != NEVER:
        leaver.loop.clock.turn_to(leaver.loop.clock.due)
    assert leaver.finished() == ("w1 has not called shutdown",)
    assert leaver.leaving.late_names == ("w1",)


def test_one_that_may_be_cut_off_waits_for_a_way_back_and_then_says_whom_it_missed() -> None:
    leaver = Leaver()
    leaver.silent.add(OTHER.incarnation)
    leaver.leaving.on_peer_gone(OTHER)
    while leaver.loop.clock.due != NEVER:
        leaver.loop.clock.turn_to(leaver.loop.clock.due)
    assert leaver.finished() == ("w1 does not answer, nor does its host",)
    assert leaver.leaving.late_names == ("w1",)


def test_a_long_wait_is_told_ever_less_often_with_the_oldest_call(caplog: pytest.LogCaptureFixture) -> None:
    leaver = Leaver(in_flight=2)
    leaver.other_is_ready(0)
    began = leaver.loop.clock.due - STATUS_INTERVAL_S
    leaver.oldest = "step() for w1"  # its function had not begun at the last look
    for _ in range(16):
        leaver.loop.clock.turn_to(leaver.loop.clock.due)
    told = "w0: shutdown waits: w0 still has 2 calls or callbacks under way (the oldest: step() for w1, for "
    assert [text.startswith(told) for text in caplog.messages] == [True] * 5  # of 16
    assert caplog.messages[0].endswith("for 8 s); `farcall stacks` shows where")
    assert leaver.loop.clock.due - began == pytest.approx(17 * STATUS_INTERVAL_S, abs=1.0)
    leaver.leaving.abort()
    leaver.finished()


def test_new_work_between_the_looks_starts_another_round() -> None:
    leaver = Leaver()
    leaver.other_is_ready(0)
    leaver.activity += 1
    leaver.other_is_ready(1)
    assert probes(leaver) == [1, 2]
    leaver.leaving.on_peer_gone(OTHER)
    assert leaver.finished() == ()
