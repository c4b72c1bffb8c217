"""`Backoff`: growing pauses between attempts. Knows no clock, and draws no random numbers of its own."""

from __future__ import annotations

from typing import Protocol


class Jitter(Protocol):
    """The method of ``random.Random`` that spreads pauses."""

    def uniform(self, a: float, b: float, /) -> float: ...


class Backoff:
    """Pauses from ``first_s`` to ``longest_s``, each ``factor`` times the one before.

    ``jitter`` shortens each pause by up to a half, so that many waiters for one event do not retry at the same moment.
    """

    __slots__ = ("_factor", "_first_s", "_jitter", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float, factor: float = 2.0, jitter: Jitter | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._jitter = jitter
        self._next_s = first_s

    def next_s(self) -> float:
        """The pause to make now; the next one is longer."""
        pause_s = self._next_s
        self._next_s = min(self._longest_s, self._factor * pause_s or self._first_s)
        return pause_s if self._jitter is None else pause_s * self._jitter.uniform(0.5, 1.0)

    def restart(self, next_s: float | None = None) -> None:
        """Start again; ``next_s`` (0: no pause) goes before the first pause."""
        self._next_s = self._first_s if next_s is None else next_s
