"""Versions that a member lends to others, and when the memory of a version may be reused.

A loan begins when the version is sent, and ends when the borrower reports that it no longer reads the lender's memory,
or dies. A borrower gets no further version until it has answered for the last one, and then gets the newest. So a
stopped borrower holds few versions, however many are pushed meanwhile.

    version      event                                    becomes
    kept         ``keep`` newer ones were pushed          superseded
    superseded   nobody borrows it (any more)             `Freed`: its memory may be filled again
    newest       the publisher ends                       kept until each subscriber has got it
    any          a borrower dies                          `Stranded`: freed as usual, but its memory is never filled
                                                          again, since that process may live on and read it
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import msgspec

from farcall.protocol.weights.messages import How


class Lend(msgspec.Struct, frozen=True):
    """Send this version to this member."""

    member: int
    number: int


class Freed(msgspec.Struct, frozen=True):
    """This version has no reader any more."""

    number: int


class Stranded(msgspec.Struct, frozen=True):
    """A process that this member cannot reach may read this version for ever."""

    number: int


Lending: TypeAlias = Lend | Freed | Stranded


class Lender:
    """The versions of one name that one member lends.

    Mutable: the borrowers of each version; for each member the version it has not answered for, the last version it
    got, and the serial of its last `VersionsWanted`.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._is_ending = False
        # How often each member has borrowed each version: it reports the end of every loan separately.
        self._borrowers: dict[int, Counter[int]] = {}
        self._unanswered: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self.taken: dict[int, tuple[int, How]] = {}
        """The last version that each subscriber has answered for, and its answer."""
        self.newest: int = 0

    @property
    def versions(self) -> list[int]:
        """The versions that are kept or borrowed, oldest first."""
        return sorted(self._borrowers)

    @property
    def subscribers(self) -> list[int]:
        """The members that get each new version."""
        return list(self._last)

    @property
    def awaited(self) -> list[int]:
        """The members that want the newest version and have not answered for it."""
        behind = {member for member, last in self._last.items() if last < self.newest}
        return sorted(behind.union(member for member, number in self._unanswered.items() if number == self.newest))

    def push(self, number: int) -> list[Lending]:
        """Lend a new version to all subscribers."""
        self._borrowers[number] = Counter()
        self.newest = max(self.newest, number)
        effects: list[Lending] = []
        for member in self._last:
            effects += self._lend(member)
        return effects + self._sweep()

    def want(self, member: int, wanted: bool, serial: int) -> list[Lending]:
        """Begin or end a member's subscription; the member still answers for each version that it holds."""
        if serial <= self._serials.get(member, -1):
            return []
        self._serials[member] = serial
        if not wanted:
            self._last.pop(member, None)
            self.taken.pop(member, None)
            return self._sweep()
        # 0 lends the newest version even if this member got it before: it may have dropped that one, because its
        # subscription was closed then, or because it had heard of a higher claim of this publisher.
        self._last[member] = 0
        return self._lend(member)

    def take(self, member: int, number: int, how: How) -> list[Lending]:
        """Record a member's answer for a version."""
        if self._unanswered.get(member) == number:
            del self._unanswered[member]
        if member in self._last and how != "dropped" and number >= self.taken.get(member, (0, how))[0]:
            self.taken[member] = (number, how)
        borrowers = self._borrowers.get(number)
        if how != "mapped" and borrowers is not None:
            borrowers[member] -= 1
            if borrowers[member] <= 0:
                del borrowers[member]
        return self._lend(member) + self._sweep()

    def lose(self, member: int) -> list[Lending]:
        """Forget a member that is gone. Each version that it borrowed is stranded."""
        self._last.pop(member, None)
        self._serials.pop(member, None)
        self.taken.pop(member, None)
        self._unanswered.pop(member, None)
        effects: list[Lending] = []
        for number, borrowers in self._borrowers.items():
            if member in borrowers:
                del borrowers[member]
                effects.append(Stranded(number))
        return effects + self._sweep()

    def end(self) -> list[Lending]:
        """Push no further version: keep the newest one until all subscribers have got it, and no other one."""
        self._is_ending = True
        return self._sweep()

    def close(self) -> list[Lending]:
        """Lend and keep nothing more."""
        self._keep = 0
        self._last.clear()
        self._unanswered.clear()
        return self._sweep()

    def _lend(self, member: int) -> list[Lending]:
        last = self._last.get(member)
        if last is None or member in self._unanswered or last >= self.newest or self.newest not in self._borrowers:
            return []
        self._last[member] = self._unanswered[member] = self.newest
        self._borrowers[self.newest][member] += 1
        return [Lend(member, self.newest)]

    def _sweep(self) -> list[Lending]:
        if self._is_ending:
            self._last = {member: last for member, last in self._last.items() if last < self.newest}
            self._keep = 1 if self._last else 0
        kept = sorted(self._borrowers)[-self._keep :] if self._keep else []
        over = [number for number, borrowers in self._borrowers.items() if not borrowers and number not in kept]
        for number in over:
            del self._borrowers[number]
        return [Freed(number) for number in over]
