"""Busy waiting: looking for an event for a moment before sleeping on it.

Putting a core to sleep and waking it up costs more than a whole quick call. So a thread that expects an event within
microseconds (the caller of a quick function, the I/O thread between two requests) looks a few times, yielding its core
between looks, before it sleeps in the kernel.

That pays only while waits are short and cores are free. So a `BusyWait` tracks how long waits have been lately, and
looks only if it expects less than ``limit_s``, and for no longer. Where a yield gives the core away for long, it stops
looking for a while: 10 ms, and twice as long each time, up to 1 s.

Where waits are longer, but all alike, a thread that *may doze* sleeps until shortly before the expected end of the
wait, and looks then: the core is awake when the answer comes.

One object per place that waits; used by one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
_DESCHEDULED_S = 0.0005
_LONG_WAIT_S = 0.002
_WAKE_S = 120e-6
"""How late a sleeping thread wakes up: the slack of the kernel's timers, plus the core's way out of a deep sleep."""

_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class BusyWait:
    """A place where threads wait for events that often come at once.

    Mutable: the moving averages of recent waits and of their deviation, and the pause after a yield took long.
    """

    __slots__ = ("_deviation_s", "_expected_s", "_limit_s", "_may_doze", "_pause_s", "_resume_at")

    def __init__(self, limit_s: float, may_doze: bool = False) -> None:
        self._limit_s = limit_s if _yield is not None else 0.0
        self._may_doze = may_doze
        self._expected_s = 0.0
        self._deviation_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._resume_at = 0.0

    def look_for(self, limit_s: float) -> None:
        """Raise the limit to ``limit_s``, if busy waiting is on: waits in this place are longer than elsewhere."""
        if self._limit_s:
            self._limit_s = max(self._limit_s, limit_s)

    def wait(self, look: Callable[[], T], sleep_until: Callable[[float], T], now: float, timeout_s: float) -> T:
        """Wait in the kernel with ``sleep_until(timeout_s)``; if the wait may be short, first ``look`` again and again.

        Both return something true once the event has come. ``look`` should be compiled code, such as a bound method of
        a poll object: a Python function would be entered at each look.
        """
        began = now
        found: T | None = None
        expected_s = self._expected_s
        looks = expected_s < self._limit_s and now >= self._resume_at
        if not looks and self._may_doze and self._dozes(now, timeout_s) and not (found := look()):
            sleep(expected_s - 2 * self._deviation_s - _WAKE_S)
            now = monotonic()
            looks = True
        if looks and not found and _yield is not None:
            end = now + self._limit_s
            while not (found := look()):
                before = now
                _yield()
                now = monotonic()
                if now > end:
                    if now - before > _DESCHEDULED_S:
                        self._resume_at = now + self._pause_s
                        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
                    else:
                        self._pause_s = FIRST_PAUSE_S
                    break
        result = found or sleep_until(timeout_s)
        error_s = min(monotonic() - began, _LONG_WAIT_S) - expected_s
        self._expected_s = expected_s + error_s * 0.25
        self._deviation_s += (abs(error_s) - self._deviation_s) * 0.25
        return result

    def _dozes(self, now: float, timeout_s: float) -> bool:
        """Are recent waits too long for looking throughout, but so even that their end can be predicted?"""
        return (
            0 < self._limit_s <= self._expected_s < min(0.75 * _LONG_WAIT_S, timeout_s)
            and 3 * self._deviation_s < self._limit_s
            and 2 * self._deviation_s + _WAKE_S < self._expected_s
            and now >= self._resume_at
        )
