"""Suspicions and their time: who is about to be declared dead, by whom, and when.

Owns the timers between "did not answer" and "is dead". Whoever found out that a member does not answer waits
``suspicion_s`` (more where its own health is low); who only heard of it waits at least twice as long, in case the
first one is gone. Then comes one last probe, always: a process that slept wakes up with all its timers
overdue, and must not declare anybody dead on the strength of that. Whoever was heard meanwhile, but has not
refuted, is asked again and given the same time again.
"""

from __future__ import annotations

from functools import partial

from farcall.protocol.membership.events import MembershipOptions, Randomness
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.probing import Prober
from farcall.protocol.membership.timers import Timers

__all__ = ["Suspicion", "Suspicions"]


class Suspicion:
    """One suspected member. ``own``: it did not answer us, rather than somebody else."""

    __slots__ = ("due", "incarnation", "own", "since", "version")

    def __init__(self, incarnation: int, version: int, own: bool, now: float) -> None:
        self.incarnation: int = incarnation
        self.version: int = version
        self.own: bool = own
        self.since: float = now
        self.due: float = now


class Suspicions:
    """All suspected members, as this one sees it."""

    def __init__(
        self, options: MembershipOptions, randomness: Randomness, table: Table, timers: Timers, prober: Prober
    ) -> None:
        self._options = options
        self._random = randomness
        self._table = table
        self._timers = timers
        self._prober = prober
        self._suspicions: dict[int, Suspicion] = {}

    def begin(self, incarnation: int, version: int, own: bool, now: float) -> None:
        """``incarnation`` is suspected; told again with ``own``, the shorter time counts, from the beginning."""
        known = self._suspicions.get(incarnation)
        if known is not None and known.version == version:
            if own and not known.own:
                known.own = True
                self._set(known, max(now, known.since + self._patience_s(known)))
            return
        suspicion = self._suspicions[incarnation] = Suspicion(incarnation, version, own, now)
        self._set(suspicion, now + self._patience_s(suspicion))

    def end(self, incarnation: int) -> None:
        """It has refuted, or ended."""
        self._suspicions.pop(incarnation, None)

    def stands(self, incarnation: int) -> bool:
        return incarnation in self._suspicions

    def age_s(self, incarnation: int, now: float) -> float:
        """For how long ``incarnation`` has been suspected; 0 if it is not. From any thread."""
        suspicion = self._suspicions.get(incarnation)
        return 0.0 if suspicion is None else now - suspicion.since

    def renew(self, incarnation: int, now: float) -> None:
        """It was heard, or our own eyes are not to be trusted: all its time again."""
        suspicion = self._suspicions.get(incarnation)
        if suspicion is not None:
            suspicion.since = now
            self._set(suspicion, now + self._patience_s(suspicion))

    def _patience_s(self, suspicion: Suspicion) -> float:
        if suspicion.own:
            return self._options.suspicion_s * self._prober.health.factor
        return self._options.suspicion_s * (2 + self._random.random())

    def _set(self, suspicion: Suspicion, due: float) -> None:
        suspicion.due = due
        self._timers.set(due, partial(self._is_over, suspicion))

    def _is_over(self, suspicion: Suspicion, due: float, now: float) -> None:
        incarnation = suspicion.incarnation
        if self._suspicions.get(incarnation) is not suspicion or suspicion.due != due:
            return
        heard_meanwhile = self._table.entries[incarnation].heard_at > suspicion.since
        if heard_meanwhile:
            self.renew(incarnation, now)
        self._prober.start(incarnation, now, urgent=True, last=not heard_meanwhile)
