"""A full queue: who is told, and who waits for how long. The core's kit says when it is full (tests/core)."""

from __future__ import annotations

import threading
from time import monotonic

from farcall.runtime.calls.admission import Admission, Fullness
from farcall.runtime.io.timers import NEVER

PATIENCE_S = 60.0


class Caller:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int] | str] = []

    def tell_full(self, queued: int, limit: int) -> None:
        self.heard.append((queued, limit))

    def tell_room(self) -> None:
        self.heard.append("room")


def test_all_who_were_told_hear_of_room_once() -> None:
    admission, first, second, gone, other = Admission(4), Caller(), Caller(), Caller(), Caller()
    for queued, caller in ((4, first), (5, second), (6, gone)):
        admission.tell_full(caller, queued)
    admission.forget(gone)
    admission.forget(other)
    admission.tell_room()
    admission.tell_room()
    assert (first.heard, second.heard, gone.heard) == ([(4, 4), "room"], [(5, 4), "room"], [(6, 4)])
    admission.tell_full(first, 4)
    admission.tell_room()
    assert first.heard == [(4, 4), "room"] * 2
    assert other.heard == []


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
