"""Looking for something for a moment before sleeping on it.

Putting a core to sleep and waking it costs more than a whole quick call. A thread that has reason to expect something
within microseconds (the caller of a quick function, the I/O thread between two requests) therefore looks a few times,
yielding its core between looks, before it lets the kernel wake it.

That pays only while waits are short and cores are free. So it remembers how long waits have been lately, and looks
only if less than ``limit_s`` is to be expected, and for no longer; and where a yield hands the core to somebody for
long, it stops looking for a while: 10 ms, and twice as long each time, up to 1 s.

Where waits are longer, but one like the other, a thread that *may doze* sleeps until shortly before the end of the one
to be expected, and looks then: the core is awake when the answer comes.

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
"""A thread that sleeps for a time is late: by the slack of the kernel's timers, and by the way out of a deep sleep."""

_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class BusyWait:
    """A place where threads wait for things that often come at once."""

    __slots__ = ("_deviation_s", "_expected_s", "_limit_s", "_may_doze", "_pause_s", "_resume_at")

    def __init__(self, limit_s: float, may_doze: bool = False) -> None:
        self._limit_s = limit_s if _yield is not None else 0.0
        self._may_doze = may_doze
        self._expected_s = 0.0
        self._deviation_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._resume_at = 0.0

    def look_for(self, limit_s: float) -> None:
        """Look for so long, if at all: waits in this place are longer than elsewhere."""
        if self._limit_s:
            self._limit_s = max(self._limit_s, limit_s)

    def wait(self, attempt: Callable[[float], T], now: float, timeout_s: float) -> T:
        """``attempt(timeout_s)``, the kernel's way to wait; if that may be short, looks with ``attempt(0)`` before."""
        began = now
        found: T | None = None
        expected_s = self._expected_s
        looks = expected_s < self._limit_s and now >= self._resume_at
        if not looks and self._may_doze and self._dozes(now, timeout_s) and not (found := attempt(0.0)):
            sleep(expected_s - 2 * self._deviation_s - _WAKE_S)
            now = monotonic()
            looks = True
        if looks and not found and _yield is not None:
            end = now + self._limit_s
            while not (found := attempt(0.0)):
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
        result = found or attempt(timeout_s)
        error_s = min(monotonic() - began, _LONG_WAIT_S) - expected_s
        self._expected_s = expected_s + error_s * 0.25
        self._deviation_s += (abs(error_s) - self._deviation_s) * 0.25
        return result

    def _dozes(self, now: float, timeout_s: float) -> bool:
        """Are waits of late too long to look all the time, and so even that their end is known?"""
        return (
            0 < self._limit_s <= self._expected_s < min(0.75 * _LONG_WAIT_S, timeout_s)
            and 3 * self._deviation_s < self._limit_s
            and 2 * self._deviation_s + _WAKE_S < self._expected_s
            and now >= self._resume_at
        )
