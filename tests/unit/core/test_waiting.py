"""How a thread sleeps in the Python core, without threads."""

from __future__ import annotations

from farcall.core.waiting import Sleeper


def test_a_ring_that_came_too_late_for_a_sleep_is_no_error_at_the_next() -> None:
    sleeper = Sleeper()
    sleeper.sleep(0.0)  # its time is over
    sleeper.ring()
    sleeper.unring()  # it looks again
    sleeper.ring()
    sleeper.sleep(60.0)  # returns at once
    sleeper.unring()
    sleeper.ring()
    sleeper.sleep(60.0)
