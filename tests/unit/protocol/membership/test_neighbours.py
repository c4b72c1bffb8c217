"""Who keeps in touch with whom, and whether news gets everywhere that way."""

from __future__ import annotations

import random

import pytest

from farcall.protocol.membership.neighbours import FULL_MESH, ORDERS, Neighbours


def incarnations(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.getrandbits(62) | 1 << 40 for _ in range(count)]


def graph(members: list[int]) -> dict[int, frozenset[int]]:
    return {me: Neighbours(me, [other for other in members if other != me])() for me in members}


def steps_to_all(links: dict[int, frozenset[int]], start: int) -> int:
    """How many steps the farthest is away; -1: somebody cannot be reached."""
    seen, front, steps = {start}, {start}, -1
    while front:
        front = {other for one in front for other in links[one] if other in links} - seen
        seen |= front
        steps += 1
    return steps if len(seen) == len(links) else -1


def test_in_a_small_group_all_are_neighbours() -> None:
    members = incarnations(FULL_MESH)
    assert all(found == set(members) - {me} for me, found in graph(members).items())


@pytest.mark.parametrize("count", [FULL_MESH + 1, 200])
def test_in_a_large_group_there_are_few_and_it_is_mutual(count: int) -> None:
    links = graph(incarnations(count))
    assert all(1 < len(found) <= 2 * ORDERS for found in links.values())
    assert all(me in links[other] for me, found in links.items() for other in found)
    assert 0 < steps_to_all(links, next(iter(links))) <= 5


def test_the_order_in_which_members_come_and_end_does_not_matter() -> None:
    chance = random.Random(5)
    me, *pool = incarnations(60)
    others: list[int] = []
    neighbours = Neighbours(me, others)
    for _ in range(1_000):
        if others and (len(others) == len(pool) or chance.random() < 0.45):
            gone = others.pop(chance.randrange(len(others)))
            neighbours.ended(gone)
        else:
            came = chance.choice([one for one in pool if one not in others])
            others.append(came)
            neighbours.came(came)
        if chance.random() < 0.5:
            assert neighbours() == Neighbours(me, list(others))()


def test_when_a_tenth_dies_at_once_the_others_still_hang_together() -> None:
    for seed in range(3):
        members = incarnations(200, seed)
        links = graph(members)
        left = {me: found for me, found in links.items() if me not in members[:20]}
        assert steps_to_all(left, members[-1]) > 0, f"seed {seed}"
