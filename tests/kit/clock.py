"""A clock that the test turns."""

from __future__ import annotations

from farcall.runtime.io.timers import Timers


class Clock(Timers):
    """The timers of a loop that no thread runs."""

    __slots__ = ("wakes",)

    def __init__(self) -> None:
        super().__init__(self._count_wake)
        self.wakes = 0

    def _count_wake(self) -> None:
        self.wakes += 1

    @property
    def due(self) -> float:
        """When the next timer is due."""
        self.run_due(float("-inf"))
        return self.next_due

    def turn_to(self, now: float) -> None:
        """It is ``now``: call all that is due."""
        while self.due <= now:
            self.run_due(now)
