"""Ctrl-C while the main thread sleeps, if the kernel gives the signal to another thread: no sleep is cut by it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.rpc.combine import as_completed
from farcall.rpc.mapping import _Fixed, _Map
from farcall.rpc.outcome import DerivedFuture
from farcall.rpc.owned_values import Owned

SLEEPERS = ("sigint.py", "combine.py", "mapping.py", "owned_values.py")


def never_made() -> Any:
    Owned().wait(2 * LONG_S)


def never_done() -> Any:
    next(as_completed([DerivedFuture()], 2 * LONG_S))


def never_answered() -> Any:
    nobody: Any = SimpleNamespace()
    map_ = _Map(len, iter(()), _Fixed([nobody]), in_flight=1, timeout=None, retry=None)
    until = time.monotonic() + 2 * LONG_S
    while time.monotonic() < until:
        assert map_._next_result() == (-1, None)


@pytest.mark.parametrize("wait", [never_made, never_done, never_answered])
def test_a_wait_notices_a_signal_that_did_not_cut_its_sleep(wait: Callable[[], Any]) -> None:
    main = threading.get_ident()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def press_here() -> None:
        wait_until(lambda: sys._current_frames()[main].f_code.co_filename.endswith(SLEEPERS))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, stop)
    presses = threading.Thread(target=press_here)
    presses.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, before)
        presses.join()
    assert time.monotonic() - began < LONG_S
