"""Whose turn it is: all members one after the other, in an order of chance that is drawn anew each round.

Better than drawing one at a time: nobody is left out for long, and in a small cluster nobody at all. A newcomer
gets a place in the round that is under way, or it would be left out for all of it.
"""

from __future__ import annotations

from farcall.protocol.membership.events import Randomness
from farcall.protocol.membership.members import Entry, Table

__all__ = ["Turns"]


class Turns:
    """A round over the other members."""

    __slots__ = ("_left", "_random", "_table")

    def __init__(self, randomness: Randomness, table: Table) -> None:
        self._random = randomness
        self._table = table
        self._left: list[int] = []

    def include(self, incarnation: int) -> None:
        """A newcomer."""
        left = self._left
        place = int(self._random.random() * (len(left) + 1))
        left.append(incarnation)
        left[place], left[-1] = left[-1], left[place]

    def next(self) -> Entry | None:
        """Whose turn it is; None if there is nobody else."""
        if not self._table.others:
            return None
        while True:
            if not self._left:
                self._left = list(self._table.others)
                self._random.shuffle(self._left)
            entry = self._table.member(self._left.pop())
            if entry is not None:
                return entry
