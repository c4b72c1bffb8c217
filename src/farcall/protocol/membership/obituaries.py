"""The dead who are not: telling them, being told, and which side of a healed partition stays.

Owns whom to try again, and the rule. A verdict is final, so a member that was declared dead has to go; it is told
so by whoever it speaks to. Only where two are dead to *each other* is there something to decide: then it was a
partition, and the larger side stays (of equal ones the one with the lowest rank; that failing, the lower incarnation).
Each pair decides for itself, by what both take for the cluster, and as one side shrinks it only loses the more. So it
is among strangers: two parts of one cluster may have no incarnation in common any more.

Whoever goes for this reason names the one it met to some of its own side (``Resurfaced``): among those may be
newcomers whom nobody on the other side has ever heard of. They ask that one themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farcall.protocol.membership.messages import Message, Obituary, Resurfaced, Status
from farcall.protocol.membership.news import Shared

RESURFACED_FANOUT: Final = 8


class Obituaries:
    """What one member says to those who are dead to it."""

    def __init__(self, shared: Shared, expel: Callable[[str, int], None]) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._expel = expel
        self._fallen: list[int] = []  # dead, and known alive before: if it was a partition, they come back

    def begin(self, now: float) -> None:
        """Try the dead now and then."""
        self._timers.set(now + self._options.reconnect_interval_s * self._random.random(), self._try_one)

    def note(self, incarnation: int) -> None:
        """A member has died."""
        self._fallen.append(incarnation)

    def tell(self, incarnation: int, why: str, *, hinted: bool = False, alone: bool = False) -> None:
        """Tell one that it is dead, and who says so."""
        lowest = self._table.lowest_rank().rank
        self._outbox.send(incarnation, Obituary(incarnation, why, self._table.size, lowest, hinted, alone))

    def _try_one(self, due: float, now: float) -> None:
        """Only so does either side of a healed partition learn of the other."""
        while self._fallen:
            place = int(self._random.random() * len(self._fallen))
            entry = self._table.entries.get(self._fallen[place])
            if entry is not None and entry.status is Status.DEAD:
                self.tell(entry.incarnation, entry.why, alone=entry.alone)
                break
            self._fallen[place] = self._fallen[-1]  # forgotten, or it had left
            self._fallen.pop()
        delay_s = self._options.reconnect_interval_s * (0.9 + 0.2 * self._random.random())
        self._timers.set(now + delay_s, self._try_one)

    def on_dead(self, sender: int, message: Message, why: str) -> None:
        """Somebody speaks who is dead to us."""
        if not isinstance(message, Obituary) or message.alone:
            self.tell(sender, why)
            return
        if message.incarnation != self._table.me:
            return
        if self._outweighs(sender, message):
            self.tell(sender, why)
            return
        others = self._table.others
        for friend in self._random.sample(others, min(RESURFACED_FANOUT, len(others))):
            self._outbox.send(friend, Resurfaced(sender))
        self._expel(f"the cluster was split, and the other part of it is the larger one ({message.why})", sender)

    def on_given_up_alone(self, sender: int, message: Message, why: str) -> None:
        """Somebody speaks whom we gave up while we heard nobody: we were wrong, unless it did the same."""
        gave_us_up = isinstance(message, Obituary) and message.alone and message.incarnation == self._table.me
        if gave_us_up and isinstance(message, Obituary) and self._outweighs(sender, message):
            self.tell(sender, why, alone=True)
        else:
            self._expel("it was cut off from the other members, and gave them up", sender)

    def _outweighs(self, sender: int, message: Obituary) -> bool:
        """Is what we take for the cluster more than what the sender takes for it?"""
        ours = (self._table.size, -self._table.lowest_rank().rank, -self._table.me)
        return ours > (message.size, -message.lowest_rank, -sender)

    def on_stranger(self, sender: int, message: Obituary) -> None:
        """We are dead to somebody we never heard of: somebody whom the other side of a partition let in."""
        if message.incarnation != self._table.me:
            return
        if message.hinted or self._outweighs(sender, message):
            self.tell(sender, "it belongs to the smaller part of a cluster that was split")
        else:
            self._expel(f"the cluster was split, and the other part of it is the larger one ({message.why})", sender)

    def on_resurfaced(self, incarnation: int) -> None:
        """Somebody met one that is dead to us: settle it with that one."""
        entry = self._table.entries.get(incarnation)
        if entry is not None and entry.status is Status.DEAD and not entry.alone:
            self.tell(incarnation, entry.why, hinted=True)
