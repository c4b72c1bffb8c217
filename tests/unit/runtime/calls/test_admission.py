"""A full queue: who is refused, who is told, and who waits for how long."""

from __future__ import annotations

import threading
from time import monotonic

from tests.kit.clock import Clock

from farcall.runtime.calls.admission import LOOK_S, Admission, Fullness
from farcall.runtime.io.timers import NEVER

PATIENCE_S = 60.0


class Caller:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int] | str] = []

    def tell_full(self, queued: int, limit: int) -> None:
        self.heard.append((queued, limit))

    def tell_room(self) -> None:
        self.heard.append("room")


class Queue:
    def __init__(self, limit: int) -> None:
        self.length = 0
        self.clock = Clock()
        self.admission = Admission(limit, lambda: self.length, self.clock.timer)


def test_below_the_limit_all_are_taken_in_and_nobody_is_told() -> None:
    queue, caller = Queue(4), Caller()
    queue.length = 3
    assert not queue.admission.refuses(caller, True)
    assert not queue.admission.refuses(caller, False)
    assert (caller.heard, queue.clock.due, queue.admission.look_for_room(1.0)) == ([], NEVER, NEVER)


def test_at_the_limit_some_are_refused_and_the_others_told_once() -> None:
    queue, first, second = Queue(4), Caller(), Caller()
    queue.length = 4
    assert queue.admission.refuses(first, True)
    assert first.heard == []
    assert not queue.admission.refuses(first, False)
    queue.length = 5
    assert not queue.admission.refuses(first, False)
    assert not queue.admission.refuses(second, False)
    assert (first.heard, second.heard) == ([(4, 4)], [(5, 4)])
    assert queue.clock.due <= monotonic() + LOOK_S


def test_there_is_room_when_half_is_free_and_all_who_were_told_hear_of_it() -> None:
    queue, first, second, gone = Queue(4), Caller(), Caller(), Caller()
    queue.length = 4
    for caller in (first, second, gone):
        queue.admission.refuses(caller, False)
    queue.admission.forget(gone)
    queue.length = 3
    assert queue.admission.look_for_room(7.0) == 7.0 + LOOK_S
    assert first.heard == [(4, 4)]
    queue.length = 2
    assert queue.admission.look_for_room(8.0) == NEVER
    assert (first.heard, second.heard, gone.heard) == ([(4, 4), "room"], [(4, 4), "room"], [(4, 4)])
    queue.length = 4
    queue.admission.refuses(first, False)
    assert first.heard == [(4, 4), "room", (4, 4)]


def test_with_a_limit_of_one_an_empty_queue_is_room() -> None:
    queue, caller = Queue(1), Caller()
    queue.length = 1
    queue.admission.refuses(caller, False)
    assert queue.admission.look_for_room(0.0) == LOOK_S
    queue.length = 0
    queue.admission.look_for_room(0.0)
    assert caller.heard == [(1, 1), "room"]


def test_who_waits_goes_on_at_its_end_or_gives_up_at_its_deadline() -> None:
    full = Fullness(4, 4)
    assert not full.wait(monotonic() - 1.0)
    assert not full._gates
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda: outcomes.append(full.wait(NEVER))) for _ in range(5)]
    for thread in threads:
        thread.start()
    full.end()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outcomes == [True] * 5
    assert not full._gates
    assert full.wait(monotonic() - 1.0)  # over is over
