"""News of a death in groups of a thousand and of ten thousand: how long it takes to all, and what that costs each.

The parts that pass news on are the real ones; of its table each member has the neighbours only, since ten thousand
tables of ten thousand members would not fit into any memory. The neighbours of the dead one know of its end at first.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from types import SimpleNamespace

import pytest

from farcall.protocol.membership.events import MembershipOptions, Send
from farcall.protocol.membership.messages import Gossip, Status, Update
from farcall.protocol.membership.neighbours import Neighbours
from farcall.protocol.membership.news import GossipQueue, Outbox, Shared, Spreading, Timers, sends_needed

DEATH_KNOWN_S = 5.0


class Member:
    """One that passes news on."""

    def __init__(self, neighbours: frozenset[int], size: int, chance: random.Random) -> None:
        entries = {one: SimpleNamespace(incarnation=one, status=Status.ALIVE) for one in neighbours}
        table = SimpleNamespace(neighbours=lambda: neighbours, others=neighbours, size=size, entries=entries)
        gossip = GossipQueue()
        self.timers = Timers()
        self.outbox = Outbox(table, gossip)  # type: ignore[arg-type]
        shared = Shared(MembershipOptions(), chance, table, self.timers, self.outbox)  # type: ignore[arg-type]
        self.spreading = Spreading(shared, gossip)
        self.knows_at = math.inf
        self.sent = 0


def rings(members: list[int]) -> dict[int, frozenset[int]]:
    """All neighbours at once: what each would find for itself, which a sample checks, takes long for ten thousand."""
    from farcall.protocol.membership import neighbours as rule

    found: dict[int, set[int]] = {member: set() for member in members}
    for order in range(rule.ORDERS):
        ring = sorted(members, key=lambda member: rule._place(member, order))
        for one, other in itertools.pairwise([*ring, ring[0]]):
            found[one].add(other)
            found[other].add(one)
    for me in members[:3]:
        assert found[me] == Neighbours(me, [member for member in members if member != me])()
    return {me: frozenset(others) for me, others in found.items()}


@pytest.mark.parametrize("size", [1_000, 10_000])
def test_a_death_is_known_to_all_within_five_seconds(size: int) -> None:
    chance = random.Random(size)
    incarnations = [chance.getrandbits(62) | 1 << 40 for _ in range(size)]
    graph = rings(incarnations)
    dead = incarnations[0]
    members = {me: Member(graph[me] - {dead}, size, chance) for me in incarnations[1:]}
    agenda: list[tuple[float, int, int, bool]] = []  # when, a number, who, and whether news comes or a timer is due
    numbers = itertools.count()
    for me in graph[dead]:
        heapq.heappush(agenda, (chance.uniform(0.005, 0.05), next(numbers), me, True))
    while agenda:
        now, _, me, is_news = heapq.heappop(agenda)
        member = members[me]
        if is_news and member.knows_at == math.inf:
            member.knows_at = now
            member.spreading.spread(Update(dead, Status.DEAD, 0), now)
        elif not is_news:
            member.timers.run_due(now)
        for effect in member.outbox.collect():
            assert isinstance(effect, Send)
            assert isinstance(effect.message, Gossip)
            member.sent += 1
            heapq.heappush(agenda, (now + chance.uniform(0.0005, 0.02), next(numbers), effect.to, True))
        due = member.timers.next()
        if due is not None and (not is_news or member.knows_at == now):
            heapq.heappush(agenda, (due, next(numbers), me, False))
    assert max(member.knows_at for member in members.values()) < DEATH_KNOWN_S
    assert max(member.sent for member in members.values()) <= sends_needed(size)
