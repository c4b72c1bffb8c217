"""The I/O thread: what is asked of it runs there, in time, and it can be replaced."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from time import monotonic

import pytest
from tests.kit.waiting import wait_until

from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER

PATIENCE_S = 60.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("test")
    made.start()
    yield made
    made.stop()
    wait_until(lambda: not any(thread.name.startswith("farcall-io-test") for thread in threading.enumerate()))


def test_functions_run_on_the_thread_in_order(loop: Loop) -> None:
    seen: list[object] = []
    done = threading.Event()
    for number in range(100):
        loop.call_soon(lambda number=number: seen.append((number, loop.on_thread())))
    loop.call_soon(done.set)
    assert done.wait(PATIENCE_S)
    assert seen == [(number, True) for number in range(100)]
    assert not loop.on_thread()


def test_a_function_that_raises_ends_nothing(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(done.set)
    assert done.wait(PATIENCE_S)
    assert "please report this" in caplog.text


def test_functions_that_ask_for_more_let_timers_and_descriptors_in(loop: Loop) -> None:
    timed, told, given_up = threading.Event(), threading.Event(), threading.Event()
    timer = loop.timer(lambda now: timed.set() or NEVER)
    there, here = os.pipe()
    os.write(here, b"x")

    def begin() -> None:
        timer.at(0.0)
        loop.watch(there, lambda events: loop.forget(there) or told.set())
        again()

    def again() -> None:
        if not (timed.is_set() and told.is_set()) and not given_up.is_set():
            loop.call_soon(again)

    loop.call_soon(begin)
    try:
        assert timed.wait(PATIENCE_S)
        assert told.wait(PATIENCE_S)
    finally:
        given_up.set()
        os.close(here)
        os.close(there)


def test_a_timer_is_called_when_it_is_due(loop: Loop) -> None:
    called: list[float] = []
    thrice = threading.Event()

    def on_time(now: float) -> float:
        called.append(now)
        if len(called) == 3:
            thrice.set()
            return NEVER
        return now + 0.005

    loop.timer(on_time).at(0.0)
    assert thrice.wait(PATIENCE_S)
    assert all(later - earlier >= 0.005 for earlier, later in pairwise(called))


def test_a_time_named_by_a_timer_is_kept(loop: Loop) -> None:
    """On the I/O thread ``at`` cannot wake anybody: the loop itself must look at it before it sleeps."""
    again = threading.Event()
    other = loop.timer(lambda now: again.set() or NEVER)

    def on_time(now: float) -> float:
        other.at(monotonic() + 0.005)
        return NEVER

    loop.timer(on_time).at(0.0)
    assert again.wait(PATIENCE_S)


def test_a_time_named_before_the_loop_starts_is_kept() -> None:
    loop, called = Loop("early"), threading.Event()
    loop.timer(lambda now: called.set() or NEVER).at(monotonic() + 0.005)
    loop.start()
    assert called.wait(PATIENCE_S)
    loop.stop()
