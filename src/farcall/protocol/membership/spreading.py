"""How news travels: to a few members at a time, in turns, and by comparing whole tables now and then.

Owns when news is passed on, not what it means. Gossip runs only while there is something to tell. The comparison
(digests first, and of the tables only where they differ) runs for ever: it finds what gossip missed, and what was
said on the other side of a partition.
"""

from __future__ import annotations

from farcall.protocol.membership.events import MembershipOptions, Randomness
from farcall.protocol.membership.gossip import GOSSIP_FANOUT, GossipQueue, sends_needed
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.messages import Digest, Entries, Update
from farcall.protocol.membership.outbox import Outbox
from farcall.protocol.membership.timers import Timers
from farcall.protocol.membership.turns import Turns

__all__ = ["Spreading"]


class Spreading:
    """What one member does so that all know what it knows."""

    def __init__(
        self,
        options: MembershipOptions,
        randomness: Randomness,
        table: Table,
        timers: Timers,
        gossip: GossipQueue,
        outbox: Outbox,
    ) -> None:
        self._options = options
        self._random = randomness
        self._table = table
        self._timers = timers
        self._gossip = gossip
        self._outbox = outbox
        self._turns = Turns(randomness, table)
        self._is_due = False

    def begin(self, now: float) -> None:
        """Compare tables from now on."""
        self._timers.set(now + self._options.sync_interval_s * self._random.random(), self._compare)

    def include(self, incarnation: int) -> None:
        """A newcomer."""
        self._turns.include(incarnation)

    def spread(self, update: Update, now: float) -> None:
        """Let everybody know."""
        self._gossip.add(update, sends_needed(self._table.size))
        if not self._is_due:
            self._is_due = True
            self._timers.set(now + self._random.random() * self._options.gossip_interval_s, self._pass_on)

    def _pass_on(self, due: float, now: float) -> None:
        for _ in range(min(GOSSIP_FANOUT, len(self._table.others))):
            entry = self._turns.next()
            if entry is not None and self._gossip:
                self._outbox.gossip(entry.incarnation)
        self._is_due = bool(self._gossip) and bool(self._table.others)
        if self._is_due:
            self._timers.set(now + self._options.gossip_interval_s, self._pass_on)
        else:
            self._gossip.clear()

    def _compare(self, due: float, now: float) -> None:
        self._table.forget(now - self._options.remember_s)
        if self._table.others:
            (to,) = self._random.sample(self._table.others, 1)
            self._outbox.send(to, Digest(self._table.digest()))
        self._timers.set(now + self._options.sync_interval_s * (0.9 + 0.2 * self._random.random()), self._compare)

    def on_digest(self, sender: int, message: Digest) -> None:
        """Somebody's table in short: answer with ours where it is another."""
        buckets = self._table.differing(message.buckets)
        if buckets:
            self._outbox.send(sender, Entries(buckets, self._table.updates_in(buckets), True))

    def answer_entries(self, sender: int, message: Entries) -> None:
        """After theirs was taken in: tell them what we know better."""
        better = self._table.better_than(message.buckets, message.updates)
        if better:
            self._outbox.send(sender, Entries(message.buckets, better, False))
