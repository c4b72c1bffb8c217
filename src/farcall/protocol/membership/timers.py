"""What is due when: a heap of entries, and no clock.

An entry cannot be taken back. Whoever set it looks, when it comes, whether it still matters; that is cheaper
than to search the heap, because almost every timer of a failure detector is overtaken by good news.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

Action: TypeAlias = Callable[[float, float], None]
"""Called with the time it was due and the time it is."""


class Timers:
    """Actions and when they are due."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def set(self, when: float, action: Action) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), action))

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_due(self, now: float) -> None:
        """Run what is due at ``now``, one after the other: an action may clear the rest."""
        while self._heap and self._heap[0][0] <= now:
            when, _, action = heapq.heappop(self._heap)
            action(when, now)

    def clear(self) -> None:
        self._heap.clear()
