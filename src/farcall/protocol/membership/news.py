"""How news leaves a member: outgoing messages, piggybacked updates, turns among neighbours, and timers.

Owns the effects since they were last collected, the updates still to be passed on, and the timers; `Shared` hands these
to every part of the machine. Knows nothing of what an update means, nor why a message is sent.

**Piggybacking.** A message to an unresponsive member always tells it so, and a message about a third member always
carries what the sender knows of that member: a refutation then comes back with the very answer.

**Gossip** runs only while there is news. Each member that learns an update passes it on to its neighbours, in random
order, except to those that it heard it from. In a large group each neighbour is told once: every member has eight that
will tell it, so it misses an update only if all eight messages are lost, and an edge of the graph carries an update
once or twice, however many members die at a time. Who becomes a neighbour while the news spreads is told, too: news of
a death comes to members whose neighbours change with it. In a small group an update goes out ``sends_needed(n)`` times;
all members together miss one in e^R, R = 1.5 * bits(n) + 2. And each member tells every neighbour once at least: while
many join, most hear of the others from their sponsors, and do not pass that on. A message carries at most
``MAX_UPDATES``, so its size is bounded. Updates never sent before go first; the rest take turns. Only messages sent for
the sake of news count: others carry updates, too, but in a storm of probes those all go to the same few members.

**Comparing** whole tables (digests first, then only the buckets that differ) runs for ever: it finds what gossip
missed, and what the other side of a partition learned.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import TypeAlias

import msgspec

from farcall.protocol.membership.events import Effect, MembershipOptions, Randomness, Send
from farcall.protocol.membership.messages import (
    MAX_UPDATES,
    Digest,
    Entries,
    Gossip,
    Message,
    Ping,
    Status,
    Update,
    precedence,
)
from farcall.protocol.membership.table import Entry, Table

GOSSIP_FANOUT = 3
"""How many members get a gossip message in each gossip interval, while there is news."""


def sends_needed(size: int) -> int:
    """How many times each member passes an update on at most, in a cluster of ``size``."""
    return 3 * size.bit_length() // 2 + 2


class _Item:
    __slots__ = ("keep_until", "knowing", "precedence", "sends_left", "told", "update")

    def __init__(self, update: Update, sends_left: int, keep_until: float) -> None:
        self.update = update
        self.precedence = precedence(update.status, update.version)
        self.sends_left = sends_left
        self.keep_until = keep_until
        self.knowing: set[int] = set()
        """The members that need not be told: they said so, or were told once, where that is enough."""
        self.told: set[int] = set()
        """The members that were told at least once."""

    def is_for(self, member: int) -> bool:
        """Is ``member`` to be told? When all sends are used up, only if it never was: it may have joined meanwhile."""
        return member not in self.knowing and (self.sends_left > 0 or member not in self.told)


class GossipQueue:
    """The updates that are still to be passed on, at most one per incarnation, and who knows each."""

    __slots__ = ("_fresh", "_told")

    def __init__(self) -> None:
        # Mutable: updates never sent for their own sake, and updates sent at least once, in the order of their turns.
        self._fresh: dict[int, _Item] = {}
        self._told: dict[int, _Item] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._told)

    def add(self, update: Update, sends: int, keep_until: float = math.inf) -> None:
        """Pass ``update`` on ``sends`` times, in place of the older update about its incarnation.

        ``keep_until``: who becomes a neighbour before then is told, too, even if all others know.
        """
        self._told.pop(update.incarnation, None)
        self._fresh[update.incarnation] = _Item(update, sends, keep_until)

    def heard(self, incarnation: int, claim: int, sender: int) -> None:
        """``sender`` told a claim about ``incarnation``, of this precedence: do not tell it the same."""
        item = self._fresh.get(incarnation) or self._told.get(incarnation)
        if item is not None and item.precedence <= claim:
            item.knowing.add(sender)

    def peek(self, to: int) -> tuple[Update, ...]:
        """The updates to piggyback on a message that is sent anyway; that does not count as a send."""
        if not self._fresh and not self._told:
            return ()
        return tuple(item.update for item in self._next_for(to))

    def take(self, to: int, neighbours: frozenset[int] = frozenset(), *, once: bool) -> tuple[Update, ...]:
        """The updates for a gossip message to ``to``; counts as a send of each. ``once``: do not tell it again.

        Keeps an update until all ``neighbours`` were told, even when its sends are used up.
        """
        taken = list(self._next_for(to))
        for item in taken:
            incarnation = item.update.incarnation
            if self._fresh.pop(incarnation, None) is None:
                del self._told[incarnation]
            item.sends_left -= not once
            (item.knowing if once else item.told).add(to)
            if item.sends_left > 0 or any(map(item.is_for, neighbours)):
                self._told[incarnation] = item  # at the end of the dict, so that updates take turns
        return tuple(item.update for item in taken)

    def _next_for(self, to: int) -> Iterator[_Item]:
        items = chain(self._fresh.values(), self._told.values())
        return islice((item for item in items if item.is_for(to)), MAX_UPDATES)

    def drop_old(self, now: float) -> None:
        """Drop the updates that need not be kept any longer."""
        for items in (self._fresh, self._told):
            for incarnation in [one for one, item in items.items() if item.keep_until <= now]:
                del items[incarnation]

    def is_news_to(self, members: frozenset[int]) -> bool:
        """Is there an update that one of ``members`` may not know?"""
        items = chain(self._fresh.values(), self._told.values())
        return any(item.is_for(member) for item in items for member in members)

    def clear(self) -> None:
        self._fresh.clear()
        self._told.clear()


Action: TypeAlias = Callable[[float, float], None]
"""Called with the time at which it was due, and the present time."""


class Timers:
    """Actions and when they are due.

    A timer cannot be cancelled: its action checks whether it still matters. That is cheaper than searching the heap,
    because good news overtakes almost every timer of a failure detector.
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
        """Run the actions due at ``now``, popped one by one: an action may clear the rest."""
        while self._heap and self._heap[0][0] <= now:
            when, _, action = heapq.heappop(self._heap)
            action(when, now)

    def clear(self) -> None:
        self._heap.clear()


class Turns:
    """All neighbours one after the other, in a random order that is drawn anew each round.

    Better than independent draws, which may skip a neighbour for long. A newcomer gets a random place in the present
    round; otherwise it would wait for the next one.
    """

    __slots__ = ("_left", "_random", "_table")

    def __init__(self, randomness: Randomness, table: Table) -> None:
        self._random = randomness
        self._table = table
        self._left: list[int] = []

    def include(self, incarnation: int) -> None:
        """Give a newcomer a place in the present round, if it is a neighbour."""
        if incarnation not in self._table.neighbours():
            return
        left = self._left
        place = int(self._random.random() * (len(left) + 1))
        left.append(incarnation)
        left[place], left[-1] = left[-1], left[place]

    def next(self) -> Entry | None:
        """The neighbour whose turn it is; None if there is none."""
        neighbours = self._table.neighbours()
        if not neighbours:
            return None
        while True:
            if not self._left:
                self._left = sorted(neighbours)  # the order of a set would not be reproducible from a seed
                self._random.shuffle(self._left)
            incarnation = self._left.pop()
            if incarnation in neighbours:
                return self._table.entries[incarnation]


class Outbox:
    """The effects since the last ``collect``, and the updates that go with each message."""

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

    def gossip(self, to: int, *, once: bool) -> bool:
        """Send ``to``, whose turn it is, the news that it may not know; False: it knows all."""
        news = self._gossip.take(to, self._table.neighbours(), once=once)
        if news:
            self._effects.append(Send(to, Gossip(self._with_what_concerns(to, 0, news))))
        return bool(news)

    def news(self, to: int, about: int = 0) -> tuple[Update, ...]:
        """The updates to piggyback on a message to ``to``, perhaps with what is known of ``about``."""
        return self._with_what_concerns(to, about, self._gossip.peek(to))

    def _with_what_concerns(self, to: int, about: int, news: tuple[Update, ...]) -> tuple[Update, ...]:
        entries = self._table.entries
        addressee = entries.get(to)
        if addressee is not None and addressee.status is Status.UNRESPONSIVE:
            news = (*news, addressee.as_update())
        if about and (subject := entries.get(about)) is not None and subject.precedence > 0:
            news = (*news, subject.as_update())
        return news


class Shared(msgspec.Struct, frozen=True):
    """The objects that all parts of one member's machine share."""

    options: MembershipOptions
    random: Randomness
    table: Table
    timers: Timers
    outbox: Outbox


class Spreading:
    """Spreads what one member knows: gossip while there is news, and comparison of tables for ever."""

    def __init__(self, shared: Shared, gossip: GossipQueue) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._gossip = gossip
        self._turns = Turns(shared.random, shared.table)
        self._is_due = False

    def begin(self, now: float) -> None:
        """Start the regular comparison of tables."""
        self._timers.set(now + self._options.sync_interval_s * self._random.random(), self._compare)

    def include(self, incarnation: int) -> None:
        """Include a newcomer in the turns of gossip."""
        self._turns.include(incarnation)

    def spread(self, update: Update, now: float) -> None:
        """Gossip ``update`` to everybody."""
        size = self._table.size
        self._gossip.add(update, sends_needed(size), now + self._options.news_bound_s(size))
        if not self._is_due:
            self._is_due = True
            self._timers.set(now + self._random.random() * self._options.gossip_interval_s, self._pass_on)

    def _pass_on(self, due: float, now: float) -> None:
        neighbours = self._table.neighbours()
        is_large = self._table.size > self._options.full_mesh
        told = 0
        for _ in range(len(neighbours)):
            entry = self._turns.next()
            if entry is not None and self._outbox.gossip(entry.incarnation, once=is_large):
                told += 1
                if told == GOSSIP_FANOUT:
                    break
        if not self._table.others:
            self._gossip.clear()
        self._is_due = self._gossip.is_news_to(neighbours)
        if self._is_due:
            self._timers.set(now + self._options.gossip_interval_s, self._pass_on)
        elif self._gossip:
            self._timers.set(now + self._options.news_bound_s(self._table.size), self._forget)

    def _forget(self, due: float, now: float) -> None:
        if not self._is_due:
            self._gossip.drop_old(now)

    def _compare(self, due: float, now: float) -> None:
        self._table.forget(now - self._options.remember_s)
        neighbours = sorted(self._table.neighbours())
        if neighbours:
            (to,) = self._random.sample(neighbours, 1)
            self._outbox.send(to, Digest(self._table.digest()))
        self._timers.set(now + self._options.sync_interval_s * (0.9 + 0.2 * self._random.random()), self._compare)

    def on_digest(self, sender: int, message: Digest) -> None:
        """Answer the digest of another table with our entries in the buckets that differ."""
        buckets = self._table.differing(message.buckets)
        if buckets:
            self._outbox.send(sender, Entries(buckets, self._table.updates_in(buckets), True))

    def answer_entries(self, sender: int, message: Entries) -> None:
        """After merging the sender's entries: send back the claims of ours that are later."""
        better = self._table.better_than(message.buckets, message.updates)
        if better:
            self._outbox.send(sender, Entries(message.buckets, better, False))
