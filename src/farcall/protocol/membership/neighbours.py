"""The neighbours of a member: all others in a small group, a few in a large one.

Owns the rule. Neighbours have a standing link, probe each other, and gossip with each other. Any other pair connects
when one of them has a message for the other, and parts again (`runtime/link/connector.py`).

In a group of up to ``full_mesh`` members, all are neighbours. In a larger one there are ``ORDERS`` rings, each with all
members in an order of its own; a member's neighbours are its predecessor and its successor in each ring. So being
neighbours is mutual, nobody has more than 2 * ORDERS, and equal tables lead to equal neighbours, in whatever order
members were heard of. The graph is an expander: no small part hangs on few links. Of a thousand members the farthest is
four or five hops away, of ten thousand six, and if a tenth dies at once, the rest stays connected (a test checks this).

A ring without some members is the same ring with the gaps closed: when a member comes or ends, only the members next to
it get another neighbour. So a member stores only its own two neighbours per ring. It compares a newcomer with these,
and searches all members only when a neighbour ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

__all__ = ["FULL_MESH", "ORDERS", "Neighbours"]

FULL_MESH: Final = 32
ORDERS: Final = 4
_WORD: Final = (1 << 64) - 1
_STEPS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


def _place(incarnation: int, order: int) -> int:
    """The place of an incarnation in a ring: pseudo-random, and unique, since every step of the mix is a bijection."""
    mixed = (incarnation * _STEPS[order] + order) & _WORD
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
    return mixed ^ (mixed >> 32)


class Neighbours:
    """The neighbours of ``me`` among ``others``; the owner changes ``others``, then calls ``came`` or ``ended``."""

    __slots__ = ("_before", "_behind", "_found", "_full_mesh", "_me", "_others", "_places")

    def __init__(self, me: int, others: Collection[int], full_mesh: int = FULL_MESH) -> None:
        self._full_mesh = full_mesh
        self._me = me
        self._others = others
        self._places = tuple(_place(me, order) for order in range(ORDERS))
        # Mutable: per ring the distance and incarnation of the successor and predecessor (empty: to be searched), and
        # the answer made from them (None: to be made again).
        self._behind: list[tuple[int, int]] = []
        self._before: list[tuple[int, int]] = []
        self._found: frozenset[int] | None = None

    def came(self, incarnation: int) -> None:
        """``incarnation`` is among the others now."""
        if self._behind:
            self._compare(incarnation)
        self._found = None

    def ended(self, incarnation: int) -> None:
        """``incarnation`` is not among the others any more."""
        if self._found is None or incarnation in self._found:
            self._behind = []
            self._found = None
        elif self.are_all:
            self._found = None

    @property
    def are_all(self) -> bool:
        """Are all others neighbours? Safe from any thread."""
        return len(self._others) < self._full_mesh

    def __call__(self) -> frozenset[int]:
        """The incarnations of all neighbours."""
        found = self._found
        if found is None:
            found = self._found = self._find()
        return found

    def _find(self) -> frozenset[int]:
        others = self._others
        if self.are_all:
            self._behind = []
            return frozenset(others)
        if not self._behind:
            self._behind = [(_WORD + 1, 0)] * ORDERS
            self._before = [(0, 0)] * ORDERS
            for incarnation in others:
                self._compare(incarnation)
        return frozenset(incarnation for _, incarnation in (*self._behind, *self._before))

    def _compare(self, incarnation: int) -> None:
        behind, before = self._behind, self._before
        for order, mine in enumerate(self._places):
            away = (_place(incarnation, order) - mine) & _WORD
            if away < behind[order][0]:
                behind[order] = (away, incarnation)
            if away > before[order][0]:
                before[order] = (away, incarnation)
