"""The shield against Ctrl-C: sections are whole, nothing is lost, and the former handler comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.kit.cores import implementation
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.destructors import destructor
from farcall.runtime.io import sigint


@pytest.fixture(autouse=True)
def _without_our_handler() -> None:
    """A node that was shut down off the main thread, in another test, has left it behind, as it may."""
    sigint.install()
    sigint.uninstall()


@pytest.fixture
def pressed() -> Iterator[list[int]]:
    """Signals that reached the program's own handler."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    sigint.install()
    yield seen
    sigint.uninstall()
    signal.signal(signal.SIGINT, before)
    assert sigint._state.depth == sigint._state.sealed == sigint._users == 0


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_signal_outside_goes_through_at_once(pressed: list[int]) -> None:
    press()
    assert pressed == [signal.SIGINT]


def test_signal_inside_waits_for_the_outermost_end(pressed: list[int]) -> None:
    sigint.enter()
    sigint.enter()
    press()
    press()
    sigint.leave()
    assert pressed == []
    sigint.leave()
    assert pressed == [signal.SIGINT]


def test_pause_lets_a_held_signal_through_and_goes_on(pressed: list[int]) -> None:
    sigint.enter()
    press()
    sigint.pause(sigint.here.guard)
    assert pressed == [signal.SIGINT]
    press()
    assert len(pressed) == 1
    sigint.leave()
    assert len(pressed) == 2


def test_pause_that_raises_leaves_the_section_intact() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sigint.install()
    try:
        sigint.enter()
        press()
        with pytest.raises(KeyboardInterrupt):
            sigint.pause(sigint.here.guard)
        assert sigint._state.depth == 1
        press()
        with pytest.raises(KeyboardInterrupt):
            sigint.leave()
        assert sigint._state.depth == 0
    finally:
        sigint.uninstall()
        signal.signal(signal.SIGINT, before)


def test_sealed_section_holds_even_where_others_pause(pressed: list[int]) -> None:
    sigint.seal()
    press()
    sigint.pause(sigint.here.guard)
    mine = sigint.here.guard
    depth, mine.depth = mine.depth, 0
    sigint.deliver()
    mine.depth = depth
    assert pressed == []
    sigint.unseal()
    assert pressed == [signal.SIGINT]


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_sections_of_other_threads_hold_nothing_back(pressed: list[int]) -> None:
    elsewhere(sigint.enter)
    press()
    assert pressed == [signal.SIGINT]
    elsewhere(sigint.leave)


def test_handler_comes_back_after_the_last_user() -> None:
    before = signal.getsignal(signal.SIGINT)
    sigint.install()
    sigint.install()
    sigint.uninstall()
    assert signal.getsignal(signal.SIGINT) is not before
    sigint.uninstall()
    assert signal.getsignal(signal.SIGINT) is before


def test_handler_set_by_the_program_meanwhile_is_kept() -> None:
    before = signal.getsignal(signal.SIGINT)
    sigint.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sigint.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sigint.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    sigint.uninstall()
    signal.signal(signal.SIGINT, before)


def test_a_node_started_on_another_thread_has_the_main_threads_sections_whole() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    elsewhere(sigint.install)
    sigint.enter()
    press()
    assert seen == []
    sigint.leave()
    assert seen == [signal.SIGINT]
    elsewhere(sigint.uninstall)
    signal.signal(signal.SIGINT, before)


# --- handlers that the program sets later


def section() -> None:
    """Press Ctrl-C inside a section; the handler's exception comes at its end."""
    whole = False
    sigint.enter()
    try:
        press()
        whole = True
    finally:
        assert whole
        sigint.leave()


BEGINNINGS = [
    (sigint.enter, sigint.leave),
    (sigint.seal, sigint.unseal),
]


@pytest.mark.parametrize(("begin", "end"), BEGINNINGS)
def test_a_handler_that_the_program_sets_later_waits_for_the_end_of_a_section(
    pressed: list[int], begin: Callable[[], None], end: Callable[[], None]
) -> None:
    later: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: later.append(number))
    begin()
    press()
    press()
    assert later == []
    end()
    assert later == [signal.SIGINT]  # late, but once
    assert pressed == []


def test_a_notebook_sets_the_handler_for_each_cell(pressed: list[int]) -> None:
    outside = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(3):
        saved = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            section()
        signal.signal(signal.SIGINT, saved)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        press()
    signal.signal(signal.SIGINT, outside)
    press()
    assert len(pressed) == 1


def test_handlers_that_call_the_one_before_them_end(pressed: list[int]) -> None:
    order: list[str] = []

    def chained(name: str) -> None:
        previous = signal.getsignal(signal.SIGINT)

        def handler(number: int, frame: object) -> None:
            order.append(name)
            previous(number, frame)

        signal.signal(signal.SIGINT, handler)

    for name in "abc":
        chained(name)
        section()
    assert order == ["a", "b", "a", "c", "b", "a"]
    assert len(pressed) == 3


def test_a_handler_that_sets_another_one_while_a_section_waits(pressed: list[int]) -> None:
    """The first Ctrl-C asks for a slow end, the second one kills: both are common."""

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, first)
    sigint.enter()
    press()
    sigint.pause(sigint.here.guard)  # here `first` runs
    press()  # and this is still inside the section
    with pytest.raises(KeyboardInterrupt):
        sigint.leave()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, None])
def test_what_cannot_raise_is_left_alone(
    pressed: list[int], monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers | None
) -> None:
    ours = signal.getsignal(signal.SIGINT)
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    else:
        monkeypatch.setattr(sigint, "getsignal", lambda number: None)  # set by code that is not Python
    sigint.enter()
    sigint.leave()
    if handler is not None:
        assert signal.getsignal(signal.SIGINT) is handler
    else:
        assert signal.getsignal(signal.SIGINT) is ours
    monkeypatch.undo()
    signal.signal(signal.SIGINT, ours)


def test_without_a_node_no_handler_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    sigint.enter()
    sigint.leave()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_event_loops_hear_of_a_signal_in_a_section(pressed: list[int], runner: str) -> None:
    make = pytest.importorskip(runner).new_event_loop
    heard: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def hear() -> None:
            heard.append("heard")
            done.set()

        loop.add_signal_handler(signal.SIGINT, hear)
        section()
        await asyncio.wait_for(done.wait(), LONG_S)
        loop.remove_signal_handler(signal.SIGINT)

    with asyncio.Runner(loop_factory=make) as loops:
        loops.run(work())
    assert heard == ["heard"]
    assert pressed == []


def test_a_section_in_a_task_lets_ctrl_c_cancel_the_program() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleaned: list[str] = []

    async def work() -> None:
        sigint.install()
        section()
        try:
            await asyncio.sleep(2 * LONG_S)
        finally:
            cleaned.append("cleaned")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert cleaned == ["cleaned"]
    with pytest.raises(KeyboardInterrupt):
        press()
    sigint.uninstall()
    signal.signal(signal.SIGINT, before)


# --- destructors


class Gives:
    """Something that a destructor gives back, under Ctrl-C."""

    def __init__(self, given: list[str]) -> None:
        self.given = given

    @destructor
    def __del__(self) -> None:
        press()
        section()
        self.given.append("back")


def test_ctrl_c_in_a_destructor_comes_once_it_is_over(pressed: list[int]) -> None:
    given: list[str] = []
    Gives(given)
    assert given == ["back"]
    wait_until(lambda: pressed)
    assert len(pressed) == 1  # two came at once: as with sections, late, but once


def test_the_end_of_a_section_is_quicker_and_the_signal_comes_once(pressed: list[int]) -> None:
    given: list[str] = []
    Gives(given)
    sigint.enter()
    sigint.leave()
    assert len(pressed) == 1
    sigint._state.again = True  # as the thread that sends it again does
    press()
    assert len(pressed) == 1
    press()
    assert len(pressed) == 2


# --- gates


def test_gate_lets_one_through_whoever_comes_first() -> None:
    gate = sigint.Gate()
    assert not gate.wait(0.0)
    gate.open()
    gate.open()
    assert gate.wait(0.0)
    assert not gate.wait(0.0)
    elsewhere(gate.open)
    assert gate.wait()


def test_a_signal_that_does_not_interrupt_the_kernel_ends_the_wait_all_the_same(pressed: list[int]) -> None:
    """As when it comes just before the wait: here another thread gets it, and the main thread is not woken."""
    gate = sigint.Gate()

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def press_here() -> None:
        wait_until(lambda: sys._current_frames()[main].f_code is sigint.Gate.wait.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    main = threading.get_ident()
    sigint.uninstall()
    before = signal.signal(signal.SIGINT, stop)
    presses = threading.Thread(target=press_here)
    presses.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            gate.wait(2 * LONG_S)
    finally:
        signal.signal(signal.SIGINT, before)
        sigint.install()
        presses.join()
    assert time.monotonic() - began < LONG_S


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 2.5 * sigint.SLICE_S])
def test_a_gate_that_stays_shut_is_left_in_time(timeout_s: float) -> None:
    began = time.monotonic()
    assert not sigint.Gate().wait(timeout_s)
    assert time.monotonic() - began >= timeout_s


@pytest.mark.parametrize("name", ["compiled", "plain"])
@pytest.mark.parametrize("held_before", [False, True])
def test_a_wait_of_the_core_inside_a_section_can_be_cut(name: str, held_before: bool) -> None:
    core = implementation(name)()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sigint.install()
    presser = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        sigint.enter()
        if held_before:
            press()
        else:
            presser.start()
        with pytest.raises(KeyboardInterrupt):
            core.next(time.monotonic() + LONG_S)
        assert sigint._state.depth == 1
        sigint.leave()
    finally:
        presser.cancel()
        sigint.uninstall()
        signal.signal(signal.SIGINT, before)
        core.stop()
