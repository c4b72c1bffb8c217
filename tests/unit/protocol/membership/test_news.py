"""The queue of news: bounded messages, a bounded number of them, and nobody is starved."""

from __future__ import annotations

from collections import Counter

from farcall.protocol.membership.messages import MAX_UPDATES, Status, Update
from farcall.protocol.membership.news import GossipQueue, sends_needed


def dead(incarnation: int, why: str = "") -> Update:
    return Update(incarnation, Status.DEAD, 0, None, why)


def test_an_update_is_passed_on_so_often_and_then_no_more() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 3)
    assert [queue.take() for _ in range(4)] == [(dead(1),)] * 3 + [()]
    assert not queue


def test_what_rides_along_does_not_count() -> None:
    queue = GossipQueue()
    queue.add(dead(1), 1)
    assert [queue.peek() for _ in range(5)] == [(dead(1),)] * 5
    assert queue.take() == (dead(1),)
    assert queue.peek() == ()


def test_a_later_update_replaces_an_earlier_one_and_starts_anew() -> None:
    queue = GossipQueue()
    queue.add(dead(1, "first"), 2)
    queue.take()
    queue.add(dead(1, "second"), 2)
    assert [queue.take(), queue.take(), queue.take()] == [(dead(1, "second"),)] * 2 + [()]


def test_many_updates_take_turns_and_new_ones_go_first() -> None:
    queue = GossipQueue()
    for incarnation in range(100):
        queue.add(dead(incarnation), 5)
    sent: Counter[int] = Counter()
    for _ in range(8):
        taken = queue.take()
        assert len(taken) == MAX_UPDATES
        sent.update(update.incarnation for update in taken)
    assert max(sent.values()) - min(sent[incarnation] for incarnation in range(100)) <= 1
    queue.add(dead(1000), 5)
    taken = queue.take()
    assert taken[0].incarnation == 1000
    sent.update(update.incarnation for update in taken)
    while queue:
        sent.update(update.incarnation for update in queue.take())
    assert {sent[incarnation] for incarnation in range(100)} == {5}


def test_the_number_of_sends_grows_with_the_logarithm() -> None:
    assert [sends_needed(size) for size in (1, 2, 10, 100, 1000, 10_000)] == [3, 5, 8, 12, 17, 23]
