"""Members declared dead that still live: how they learn of it, and which side of a healed partition stays.

Owns which of the dead to try again, and the rule. A verdict is final, so a member that was declared dead has to go; any
member that it talks to tells it so. Only if two members are dead to *each other* is there something to decide: then
it was a partition, and the larger side stays (of equal ones the side with the lowest rank; that failing, the lower
incarnation). Each pair decides for itself, by comparing the two tables; a side that shrinks only loses more clearly.
The same rule holds between strangers: two parts of one cluster may have no incarnation in common any more.

The loser names the winner to some members of its own side (``Resurfaced``), and they contact the winner themselves:
among them may be newcomers unknown to the other side. That message may be lost, or its receiver cut off. So a node that
has come back also looks for members that it knew before and that nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from farcall.protocol.member import Member
from farcall.protocol.membership.accusations import Accusations
from farcall.protocol.membership.messages import Message, Obituary, Resurfaced, Status
from farcall.protocol.membership.news import Shared

RESURFACED_FANOUT: Final = 8
OTHER_PART: Final = "the cluster was split, and it belongs to the other part"


class Obituaries:
    """One member's dealings with the incarnations that are dead to it."""

    def __init__(self, shared: Shared, accusations: Accusations, expel: Callable[[str, int], None]) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._accusations = accusations
        self._expel = expel
        # Mutable: the incarnations to try again.
        self._fallen: list[int] = []  # dead, and members before: after a partition they come back
        self.missing: dict[int, Member] = {}
        """Members that this node knew in a former membership, and of which it has not heard since."""
        self._missed_since = 0.0

    def begin(self, now: float) -> None:
        """Start trying one of the dead now and then."""
        self._timers.set(now + self._options.retry_dead_s(self._table.size) * self._random.random(), self._try_one)

    def note(self, incarnation: int) -> None:
        """A member has died."""
        self._fallen.append(incarnation)

    def look_for(self, members: Iterable[Member], now: float) -> None:
        """Look for those of ``members`` that are strangers here: only this node may know of them."""
        self.missing.update((member.incarnation, member) for member in members)
        self._missed_since = now

    def tell(self, incarnation: int, why: str, *, hinted: bool = False, alone: bool = False) -> None:
        """Send ``incarnation`` its obituary, with the size and lowest rank of our table."""
        lowest = self._table.lowest_rank().rank
        self._outbox.send(incarnation, Obituary(incarnation, why, self._table.size, lowest, hinted, alone))

    def _try_one(self, due: float, now: float) -> None:
        """Try one of the dead: only so does either side of a healed partition learn of the other."""
        while self._fallen:
            place = int(self._random.random() * len(self._fallen))
            entry = self._table.entries.get(self._fallen[place])
            if entry is not None and entry.status is Status.DEAD:
                self.tell(entry.incarnation, entry.why, alone=entry.alone)
                break
            self._fallen[place] = self._fallen[-1]  # forgotten by the table, or it had left
            self._fallen.pop()
        self._try_missing(now)
        delay_s = self._options.retry_dead_s(self._table.size) * (0.9 + 0.2 * self._random.random())
        self._timers.set(now + delay_s, self._try_one)

    def _try_missing(self, now: float) -> None:
        """Try one of the missing. Hinted, since it may be a newcomer here that must not be expelled by this."""
        if now - self._missed_since > self._options.remember_s:
            self.missing.clear()
        known = self._table.entries.keys() | self._table.buried
        self.missing = {incarnation: self.missing[incarnation] for incarnation in self.missing.keys() - known}
        if self.missing:
            (incarnation,) = self._random.sample(sorted(self.missing), 1)
            self.tell(incarnation, OTHER_PART, hinted=True)

    def on_dead(self, sender: int, message: Message, why: str) -> None:
        """A message came from an incarnation that is dead to us."""
        if not isinstance(message, Obituary) or message.alone:
            self.tell(sender, why)
            return
        if message.incarnation != self._table.me:
            return
        if self._outweighs(sender, message):
            self.tell(sender, why)
            return
        if not self._accusations.convince(sender, self._table.me):
            return
        friends = sorted(self._table.neighbours())
        for friend in self._random.sample(friends, min(RESURFACED_FANOUT, len(friends))):
            self._outbox.send(friend, Resurfaced(sender))
        self._give_way(sender, message)

    def on_given_up_alone(self, sender: int, message: Message, why: str) -> None:
        """A message from a member that we gave up while we heard nobody: we were wrong, unless it did the same."""
        gave_us_up = isinstance(message, Obituary) and message.alone and message.incarnation == self._table.me
        if gave_us_up and isinstance(message, Obituary) and self._outweighs(sender, message):
            self.tell(sender, why, alone=True)
        else:
            self._expel("it was cut off from the other members, and gave them up", sender)

    def _give_way(self, sender: int, message: Obituary) -> None:
        """The other side stays."""
        is_larger = message.size > self._table.size
        stays = "is the larger one" if is_larger else "is as large, and has the lowest rank"
        self._expel(f"the cluster was split, and the other part of it {stays} ({message.why})", sender)

    def _outweighs(self, sender: int, message: Obituary) -> bool:
        """Is our side of the partition the larger one?"""
        ours = (self._table.size, -self._table.lowest_rank().rank, -self._table.me)
        return ours > (message.size, -message.lowest_rank, -sender)

    def on_stranger(self, sender: int, message: Obituary) -> None:
        """We are dead to a stranger: the other side of a partition admitted it."""
        if message.incarnation != self._table.me:
            return
        if message.hinted or self._outweighs(sender, message):
            self.tell(sender, OTHER_PART)
        elif not (self._options.is_guarded and self._table.others):  # any number of strangers can be made up
            self._give_way(sender, message)

    def on_resurfaced(self, incarnation: int) -> None:
        """A member of our side met ``incarnation``, which is dead to us: send it an obituary, and settle it."""
        entry = self._table.entries.get(incarnation)
        if entry is not None and entry.status is Status.DEAD and not entry.alone:
            self.tell(incarnation, entry.why, hinted=True)
