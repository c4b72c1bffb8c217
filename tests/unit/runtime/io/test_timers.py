"""The timer heap, with a clock that the test turns: what is due is called, once, and nothing else is."""

from __future__ import annotations

import threading

import pytest

from farcall.runtime.io.timers import NEVER, Timers


class Clock:
    """Timers, how often they woke the loop, and who was called when."""

    def __init__(self) -> None:
        self.wakes = 0
        self.timers = Timers(self._wake)
        self.called: list[tuple[str, float]] = []

    def _wake(self) -> None:
        self.wakes += 1

    def timer(self, name: str, again: float = NEVER):  # type: ignore[no-untyped-def]
        def callback(now: float) -> float:
            self.called.append((name, now))
            return now + again

        return self.timers.timer(callback)

    def turn_to(self, now: float) -> None:
        while self.timers.named or self.timers.next_due <= now:
            self.timers.run_due(now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_only_what_is_due_is_called_in_the_order_of_its_times(clock: Clock) -> None:
    late, early, never = clock.timer("late"), clock.timer("early"), clock.timer("never")
    late.at(2.0)
    early.at(1.0)
    assert never.due == NEVER
    clock.turn_to(0.9)
    assert clock.called == []
    clock.turn_to(1.5)
    clock.turn_to(2.0)
    clock.turn_to(1e9)
    assert clock.called == [("early", 1.5), ("late", 2.0)]
    assert clock.timers.next_due == NEVER


def test_one_turn_calls_one_timer(clock: Clock) -> None:
    first, second = clock.timer("first"), clock.timer("second")
    second.at(1.0)
    first.at(0.5)
    clock.timers.run_due(1.0)
    assert clock.called == [("first", 1.0)]
    assert clock.timers.next_due == 1.0


def test_the_nearest_of_several_times_counts_and_counts_once(clock: Clock) -> None:
    timer = clock.timer("one")
    for when in (3.0, 1.0, 2.0):
        timer.at(when)
    assert timer.due == 1.0
    clock.turn_to(5.0)
    assert clock.called == [("one", 5.0)]
    timer.at(6.0)
    clock.turn_to(6.0)
    assert len(clock.called) == 2


def test_dead_entries_wake_nobody(clock: Clock) -> None:
    timer = clock.timer("one")
    timer.at(3.0)
    clock.turn_to(0.0)
    timer.at(1.0)
    clock.turn_to(1.0)
    assert clock.called == [("one", 1.0)]
    assert clock.timers.next_due == NEVER


def test_a_callback_says_when_it_is_due_again(clock: Clock) -> None:
    clock.timer("again", again=10.0).at(0.0)
    clock.turn_to(1.0)
    assert clock.timers.next_due == 11.0
    clock.turn_to(11.0)
    assert [now for _, now in clock.called] == [1.0, 11.0]


def test_a_nearer_time_named_meanwhile_beats_what_the_callback_returns(clock: Clock) -> None:
    def callback(now: float) -> float:
        timer.at(now + 1.0)
        return now + 10.0

    timer = clock.timers.timer(callback)
    timer.at(0.0)
    clock.turn_to(0.0)
    clock.timers.run_due(0.0)
    assert clock.timers.next_due == 1.0


def test_the_loop_is_woken_for_the_earliest_time_only(clock: Clock) -> None:
    one, other = clock.timer("one"), clock.timer("other")
    one.at(5.0)
    assert clock.wakes == 1
    for when in (5.0, 6.0):
        one.at(when)
        other.at(when + 1.0)
    assert clock.wakes == 1
    other.at(4.0)
    assert clock.wakes == 2


def test_a_time_named_before_the_last_call_was_done_is_kept(clock: Clock) -> None:
    """The earliest time goes; another thread compared with it a moment before, and woke nobody."""
    clock.timer("first").at(1.0)
    clock.turn_to(0.0)
    other = clock.timer("other")
    other.at(2.0)
    assert clock.wakes == 1
    clock.turn_to(1.0)
    assert clock.timers.next_due == 2.0


def test_a_callback_that_raises_ends_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def callback(now: float) -> float:
        raise ZeroDivisionError

    clock.timers.timer(callback).at(0.0)
    clock.timer("other").at(0.0)
    clock.turn_to(0.0)
    assert clock.called == [("other", 0.0)]
    assert "please report this" in caplog.text


def test_no_time_named_by_other_threads_is_lost(clock: Clock) -> None:
    """Each thread writes its state, then names a time: a call that comes later must see each state."""
    states: list[int] = []
    seen: set[int] = set()

    def callback(now: float) -> float:
        seen.update(states)
        return NEVER

    timer = clock.timers.timer(callback)

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
