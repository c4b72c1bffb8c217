"""Leaving: telling a few, and going when two of them have said that they know.

Two, because one of them may die before it tells anybody. Those who do not answer are not waited for: each round
tells others, and after the last one this member goes all the same; then it is found dead instead of gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from farcall.protocol.membership.events import MembershipOptions, Randomness
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.messages import Ping, Status, Update
from farcall.protocol.membership.outbox import Outbox
from farcall.protocol.membership.timers import Timers

__all__ = ["Farewell", "end_of"]

ACKS_NEEDED: Final = 2
ROUNDS: Final = 5


def end_of(incarnation: int, updates: Iterable[Update]) -> tuple[Update, ...]:
    """Those of ``updates`` that say that ``incarnation`` has ended."""
    return tuple(update for update in updates if update.incarnation == incarnation and update.status >= Status.DEAD)


class Farewell:
    """The way out of one member; ``depart`` is called at its end."""

    def __init__(
        self,
        options: MembershipOptions,
        randomness: Randomness,
        table: Table,
        timers: Timers,
        outbox: Outbox,
        depart: Callable[[], None],
    ) -> None:
        self._options = options
        self._random = randomness
        self._table = table
        self._timers = timers
        self._outbox = outbox
        self._depart = depart
        self._acks: set[int] = set()
        self._rounds = 0

    def begin(self, now: float) -> None:
        """The table says already that we have left."""
        self._tell(now, now)

    def _tell(self, due: float, now: float) -> None:
        others = self._table.others
        if not others or self._rounds == ROUNDS:
            self._depart()
            return
        self._rounds += 1
        for to in self._random.sample(others, min(ACKS_NEEDED + 1, len(others))):
            self._outbox.send(to, Ping(self._outbox.news(to, self._table.me)))
        self._timers.set(now + self._options.probe_timeout_s, self._tell)

    def on_answer(self, sender: int, updates: Iterable[Update]) -> None:
        """Something came back; it counts if it shows that our leave is known there."""
        if end_of(self._table.me, updates):
            self._acks.add(sender)
            if len(self._acks) >= min(ACKS_NEEDED, len(self._table.others)):
                self._depart()
