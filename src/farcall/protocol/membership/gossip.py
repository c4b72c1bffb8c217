"""News on its way: which updates ride along with the next message, and for how long they go on doing so.

Owns the queue. Each update is passed on ``sends_needed(n)`` times by everyone who learns it, a number that
grows with the logarithm of the cluster, and at most ``MAX_UPDATES`` travel at once; so what a message carries
is bounded, whatever happens. What has not been told at all goes first; the rest takes turns. A later update
about an incarnation replaces an earlier one. Knows nothing of what an update means.

Each holder of an update passes it on R times, to members in an order of chance; one in e^R is missed by all of
them. R = 1.5 * bits(n) + 2 makes that less than one member in a cluster of a thousand for 20,000 updates;
comparing whole tables finds what is missed. Only those messages count: what is sent for another reason carries
updates, too, but in a storm of probes it all goes to the same few.
"""

from __future__ import annotations

from itertools import chain, islice

from farcall.protocol.membership.messages import MAX_UPDATES, Update

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
