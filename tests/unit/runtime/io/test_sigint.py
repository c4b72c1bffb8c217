"""The shield against Ctrl-C: sections are whole, nothing is lost, and the former handler comes back."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

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
    assert sigint.install()
    yield seen
    sigint.uninstall()
    signal.signal(signal.SIGINT, before)
    assert sigint._state.depth == sigint._state.sealed == sigint._state.users == 0


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


def test_the_main_thread_finds_its_guard_even_if_another_thread_imported_the_module(
    pressed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigint.here, "guard", sigint.SigintGuard())  # as there: that of the other threads
    sigint.install()
    sigint.enter()
    press()
    assert pressed == []
    sigint.leave()
    assert pressed == [signal.SIGINT]
    sigint.uninstall()


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


def test_other_threads_install_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    results: list[bool] = []
    elsewhere(lambda: results.append(sigint.install()))
    assert results == [False]
    assert signal.getsignal(signal.SIGINT) is before


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
