"""Looking for something for a moment before sleeping on it.

Putting a core to sleep and waking it costs more than a whole quick call. A thread that has reason to expect something
within microseconds (the caller of a quick function, the I/O thread between two requests) therefore looks a few times,
yielding its core between looks, before it lets the kernel wake it.

That pays only while waits are short and cores are free. So it remembers how long waits have been lately, and looks
only if less than ``limit_s`` is to be expected, and for no longer; and where a yield hands the core to somebody for
long, it stops looking for a while: 10 ms, and twice as long each time, up to 1 s.

One object per place that waits; used by one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
_DESCHEDULED_S = 0.0005
_LONG_WAIT_S = 0.001

_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class BusyWait:
    """A place where threads wait for things that often come at once."""

    __slots__ = ("_expected_s", "_limit_s", "_pause_s", "_resume_at")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s if _yield is not None else 0.0
        self._expected_s = 0.0
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
        if self._expected_s < self._limit_s and now >= self._resume_at and _yield is not None:
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
        waited_s = min(monotonic() - began, _LONG_WAIT_S)
        self._expected_s += (waited_s - self._expected_s) * 0.25
        return result
