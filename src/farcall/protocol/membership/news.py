"""How news leaves a member: what it sends, what rides along, whose turn it is, and what is due when.

Owns the effects since they were last collected, the updates that are still passed on, and the timers; `Shared` is what
every part of the machine gets of these. Knows nothing of what an update means, nor why a message is sent.

**Riding along.** A message to an unresponsive member always tells it so, and one about a third member always tells what
is known of that one: a refutation then comes back with the very answer.

**Gossip** runs only while there is something to tell. Each update is passed on ``sends_needed(n)`` times by everyone
who learns it, to members in an order of chance; one in e^R is missed by all of them. R = 1.5 * bits(n) + 2 makes that
less than one member in a cluster of a thousand for 20,000 updates. At most ``MAX_UPDATES`` travel at once, so a message
is bounded, whatever happens. What has not been told at all goes first; the rest takes turns. Only messages sent for the
sake of news count: others carry updates, too, but in a storm of probes those all go to the same few.

**Comparing** whole tables (digests first, and of the tables only where they differ) runs for ever: it finds what gossip
missed, and what was said on the other side of a partition.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import chain, count, islice
from typing import TypeAlias

import msgspec

from farcall.protocol.membership.events import Effect, MembershipOptions, Randomness, Send
from farcall.protocol.membership.messages import MAX_UPDATES, Digest, Entries, Gossip, Message, Ping, Status, Update
from farcall.protocol.membership.table import Entry, Table

GOSSIP_FANOUT = 3
"""How many members are told at once, each gossip interval, while there is news."""


def sends_needed(size: int) -> int:
    """How often each member passes an update on, in a cluster of ``size``."""
    return 3 * size.bit_length() // 2 + 2


class _Item:
    __slots__ = ("sends_left", "update")

    def __init__(self, update: Update, sends_left: int) -> None:
        self.update = update
        self.sends_left = sends_left


class GossipQueue:
    """The updates that are still passed on."""

    __slots__ = ("_fresh", "_told")

    def __init__(self) -> None:
        self._fresh: dict[int, _Item] = {}
        self._told: dict[int, _Item] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._told)

    def add(self, update: Update, sends: int) -> None:
        """Pass ``update`` on ``sends`` times, instead of what was told of its incarnation before."""
        self._told.pop(update.incarnation, None)
        self._fresh[update.incarnation] = _Item(update, sends)

    def peek(self) -> tuple[Update, ...]:
        """What rides along with a message that is sent anyway. It does not count."""
        if not self._fresh and not self._told:
            return ()
        return tuple(item.update for item in islice(chain(self._fresh.values(), self._told.values()), MAX_UPDATES))

    def take(self) -> tuple[Update, ...]:
        """What goes into a message that is sent for its sake."""
        taken = [self._fresh.pop(incarnation) for incarnation in list(islice(self._fresh, MAX_UPDATES))]
        taken += [self._told.pop(incarnation) for incarnation in list(islice(self._told, MAX_UPDATES - len(taken)))]
        for item in taken:
            item.sends_left -= 1
            if item.sends_left > 0:
                self._told[item.update.incarnation] = item  # at the end: they take turns
        return tuple(item.update for item in taken)

    def clear(self) -> None:
        self._fresh.clear()
        self._told.clear()


Action: TypeAlias = Callable[[float, float], None]
"""Called with the time it was due and the time it is."""


class Timers:
    """Actions and when they are due.

    An action cannot be taken back. Whoever set it looks, when it comes, whether it still matters: that is cheaper than
    to search the heap, because almost every timer of a failure detector is overtaken by good news.
    """

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


class Turns:
    """All other members one after the other, in an order of chance that is drawn anew each round.

    Better than drawing one at a time: nobody is left out for long, and in a small cluster nobody at all. A newcomer
    gets a place in the round that is under way, or it would be left out for all of it.
    """

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


class Outbox:
    """The effects since they were last collected."""

    __slots__ = ("_effects", "_gossip", "_table")

    def __init__(self, table: Table, gossip: GossipQueue) -> None:
        self._table = table
        self._gossip = gossip
        self._effects: list[Effect] = []

    def collect(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def tell(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: int, message: Message) -> None:
        self._effects.append(Send(to, message))

    def ping(self, to: int) -> None:
        self._effects.append(Send(to, Ping(self.news(to))))

    def gossip(self, to: int) -> None:
        """Pass news on to one whose turn it is."""
        self._effects.append(Send(to, Gossip(self._with_what_concerns(to, 0, self._gossip.take()))))

    def news(self, to: int, about: int = 0) -> tuple[Update, ...]:
        """The updates for a message to ``to``, which may be about another."""
        return self._with_what_concerns(to, about, self._gossip.peek())

    def _with_what_concerns(self, to: int, about: int, news: tuple[Update, ...]) -> tuple[Update, ...]:
        entries = self._table.entries
        addressee = entries.get(to)
        if addressee is not None and addressee.status is Status.UNRESPONSIVE:
            news = (*news, addressee.as_update())
        if about and (subject := entries.get(about)) is not None and subject.precedence > 0:
            news = (*news, subject.as_update())
        return news


class Shared(msgspec.Struct, frozen=True):
    """What the parts of one member's machine have in common."""

    options: MembershipOptions
    random: Randomness
    table: Table
    timers: Timers
    outbox: Outbox


class Spreading:
    """What one member does so that all know what it knows."""

    def __init__(self, shared: Shared, gossip: GossipQueue) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._gossip = gossip
        self._turns = Turns(shared.random, shared.table)
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
