"""The queue of news: bounded messages, a bounded number of them, and nobody is starved."""

from __future__ import annotations

from collections import Counter

from farcall.protocol.membership.messages import MAX_UPDATES, Status, Update, precedence
from farcall.protocol.membership.news import GossipQueue, sends_needed


def dead(incarnation: int, why: str = "") -> Update:
    return Update(incarnation, Status.DEAD, 0, None, why)


def test_an_update_is_passed_on_so_often_and_then_no_more() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 3)
    assert [queue.take(7, once=False) for _ in range(4)] == [(dead(1),)] * 3 + [()]
    assert not queue


def test_what_rides_along_does_not_count() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 1)
    assert [queue.peek(7) for _ in range(5)] == [(dead(1),)] * 5
    assert queue.take(7, once=False) == (dead(1),)
    assert queue.peek(7) == ()


def test_a_later_update_replaces_an_earlier_one_and_starts_anew() -> None:
    queue = GossipQueue()
    queue.add(dead(1, "first"), 2)
    queue.take(7, once=False)
    queue.add(dead(1, "second"), 2)
    assert [queue.take(7, once=False) for _ in range(3)] == [(dead(1, "second"),)] * 2 + [()]


def test_many_updates_take_turns_and_new_ones_go_first() -> None:
    queue = GossipQueue()
    for incarnation in range(100):
        queue.add(dead(incarnation), 5)
    sent: Counter[int] = Counter()
    for _ in range(8):
        taken = queue.take(7, once=False)
        assert len(taken) == MAX_UPDATES
        sent.update(update.incarnation for update in taken)
    assert max(sent.values()) - min(sent[incarnation] for incarnation in range(100)) <= 1
    queue.add(dead(1000), 5)
    taken = queue.take(7, once=False)
    assert taken[0].incarnation == 1000
    sent.update(update.incarnation for update in taken)
    while queue:
        sent.update(update.incarnation for update in queue.take(7, once=False))
    assert {sent[incarnation] for incarnation in range(100)} == {5}


def test_who_told_an_update_is_not_told_it() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 3)
    claim = precedence(Status.DEAD, 0)
    queue.heard(1, claim - 1, 7)
    assert queue.take(7, once=False) == (dead(1),), "it knew less"
    queue.heard(1, claim, 7)
    assert queue.peek(7) == queue.take(7, once=False) == ()
    assert queue.take(8, once=False) == (dead(1),)


def test_in_a_large_group_each_neighbour_is_told_once_and_so_is_one_that_becomes_a_neighbour_soon() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 3, keep_until=5.0)
    assert [queue.take(to, once=True) for to in (7, 7, 8, 8)] == [(dead(1),), (), (dead(1),), ()]
    assert not queue.is_news_to(frozenset({7, 8}))
    queue.drop_old(4.9)
    assert queue.is_news_to(frozenset({7, 8, 9}))
    assert queue.take(9, once=True) == (dead(1),)
    queue.drop_old(5.0)
    assert not queue


def test_the_number_of_sends_grows_with_the_logarithm() -> None:
    assert [sends_needed(size) for size in (1, 2, 10, 100, 1000, 10_000)] == [3, 5, 8, 12, 17, 23]


def test_every_neighbour_is_told_once_though_all_sends_are_used_up() -> None:
    """Most of a growing group do not pass an update on: they had it from their sponsors."""
    queue = GossipQueue()
    queue.add(dead(1), 2)
    neighbours = frozenset({7, 8})
    assert [queue.take(7, neighbours, once=False) for _ in range(3)] == [(dead(1),)] * 2 + [()]
    assert queue.is_news_to(neighbours)
    assert queue.take(8, neighbours, once=False) == (dead(1),)
    assert not queue
