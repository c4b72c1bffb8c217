"""The timer heap, with a clock that the test turns: what is due is called, once, and nothing else is."""

from __future__ import annotations

import threading

import pytest
from tests.kit.clock import Clock

from farcall.runtime.io.timers import NEVER, Timer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def called() -> list[tuple[str, float]]:
    """The names of timers, and when they were called."""
    return []


def named(clock: Clock, called: list[tuple[str, float]], name: str, again: float = NEVER) -> Timer:
    def callback(now: float) -> float:
        called.append((name, now))
        return now + again

    return clock.timer(callback)


def test_only_what_is_due_is_called_in_the_order_of_its_times(clock: Clock, called: list[tuple[str, float]]) -> None:
    late, early, never = (named(clock, called, name) for name in ("late", "early", "never"))
    late.at(2.0)
    early.at(1.0)
    assert never.due == NEVER
    clock.turn_to(0.9)
    assert called == []
    clock.turn_to(1.5)
    clock.turn_to(2.0)
    clock.turn_to(1e9)
    assert called == [("early", 1.5), ("late", 2.0)]
    assert clock.due == NEVER


def test_one_turn_calls_one_timer(clock: Clock, called: list[tuple[str, float]]) -> None:
    first, second = named(clock, called, "first"), named(clock, called, "second")
    second.at(1.0)
    first.at(0.5)
    clock.run_due(1.0)
    assert called == [("first", 1.0)]
    assert clock.due == 1.0


def test_the_nearest_of_several_times_counts_and_counts_once(clock: Clock, called: list[tuple[str, float]]) -> None:
    timer = named(clock, called, "one")
    for when in (3.0, 1.0, 2.0):
        timer.at(when)
    assert clock.due == timer.due == 1.0
    clock.turn_to(5.0)
    assert called == [("one", 5.0)]
    timer.at(6.0)
    clock.turn_to(6.0)
    assert len(called) == 2


def test_dead_entries_wake_nobody(clock: Clock, called: list[tuple[str, float]]) -> None:
    timer = named(clock, called, "one")
    timer.at(3.0)
    clock.turn_to(0.0)
    timer.at(1.0)
    clock.turn_to(1.0)
    assert called == [("one", 1.0)]
    assert clock.due == NEVER


def test_a_callback_says_when_it_is_due_again(clock: Clock, called: list[tuple[str, float]]) -> None:
    named(clock, called, "again", again=10.0).at(0.0)
    clock.turn_to(1.0)
    assert clock.due == 11.0
    clock.turn_to(11.0)
    assert [now for _, now in called] == [1.0, 11.0]


def test_a_nearer_time_named_meanwhile_beats_what_the_callback_returns(clock: Clock) -> None:
    def callback(now: float) -> float:
        timer.at(now + 1.0)
        return now + 10.0

    timer = clock.timer(callback)
    timer.at(0.0)
    clock.turn_to(0.0)
    assert clock.due == 1.0


def test_the_loop_is_woken_for_the_earliest_time_only(clock: Clock, called: list[tuple[str, float]]) -> None:
    one, other = named(clock, called, "one"), named(clock, called, "other")
    one.at(5.0)
    assert clock.wakes == 1
    assert clock.due == 5.0
    for when in (5.0, 6.0):
        one.at(when)
        other.at(when + 1.0)
    assert clock.wakes == 1
    other.at(4.0)
    assert clock.wakes == 2


def test_times_that_are_no_nearer_are_not_even_noted(clock: Clock, called: list[tuple[str, float]]) -> None:
    """A loop that sleeps does not look at them for long: many calls must not take memory meanwhile."""
    timer = named(clock, called, "one")
    for number in range(1000):
        timer.at(60.0 + number)
    assert len(clock.named) == 1


def test_a_time_named_before_the_last_call_was_done_is_kept(clock: Clock, called: list[tuple[str, float]]) -> None:
    """The earliest time goes; another thread compared with it a moment before, and woke nobody."""
    named(clock, called, "first").at(1.0)
    clock.turn_to(0.0)
    named(clock, called, "other").at(2.0)
    assert clock.wakes == 1
    clock.turn_to(1.0)
    assert clock.due == 2.0


def test_a_callback_that_raises_ends_nothing(
    clock: Clock, called: list[tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    def callback(now: float) -> float:
        raise ZeroDivisionError

    clock.timer(callback).at(0.0)
    named(clock, called, "other").at(0.0)
    clock.turn_to(0.0)
    assert called == [("other", 0.0)]
    assert "please report this" in caplog.text


def test_an_interrupted_call_loses_no_later_one(called: list[tuple[str, float]]) -> None:
    """Ctrl-C may come in the middle of ``at``: here, as the loop is about to be woken."""

    class Interrupted(Clock):
        def _count_wake(self) -> None:
            super()._count_wake()
            if self.wakes == 1:
                raise KeyboardInterrupt

    clock = Interrupted()
    timer = named(clock, called, "one")
    with pytest.raises(KeyboardInterrupt):
        timer.at(1.0)
    timer.at(2.0)
    assert clock.wakes == 2
    clock.turn_to(1.0)
    timer.at(2.0)
    clock.turn_to(2.0)
    assert called == [("one", 1.0), ("one", 2.0)]


def test_no_time_named_by_other_threads_is_lost(clock: Clock) -> None:
    """Each thread writes its state, then names a time: a call that comes later must see each state."""
    states: list[int] = []
    seen: set[int] = set()

    def callback(now: float) -> float:
        seen.update(states)
        return NEVER

    timer = clock.timer(callback)

    def name_times(first: int) -> None:
        for number in range(first, first + 2000):
            states.append(number)
            timer.at(float(number % 7))

    threads = [threading.Thread(target=name_times, args=(first,)) for first in (0, 2000, 4000)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        clock.turn_to(7.0)
    clock.turn_to(7.0)
    assert seen == set(range(6000))
