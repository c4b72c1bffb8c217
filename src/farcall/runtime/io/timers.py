"""The timers of one I/O thread: a heap of times, each with the callback that is due then.

Each part of a node that has deadlines makes one timer and sets it to the nearest of them. Only due timers are called.
Knows no clock: the loop passes the time in, and so do tests.

Thread rules
- Any thread may call ``Timer.at``, and so may destructors and signal handlers: it takes no lock. It costs a comparison
  if the time is no nearer than the one named before, and wakes up the loop only if no timer is due earlier.
- The heap belongs to the I/O thread, and so do ``Timer.due`` and ``Timers.next_due``, which other threads only read.
  They hand their times over in a deque, whose ends are atomic.
- A part changes its own state, then calls ``at``. The I/O thread clears the time of a timer, then calls it. So either
  ``at`` finds the time cleared, and names its own, or the callback sees the new state.
- An exception may end ``at`` anywhere (Ctrl-C, even inside a garbage collection): the next ``at`` then does the rest.
  Hence the order of its steps, and the number of calls in ``_named``: a value stored too late must not hide a time from
  the next call.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

logger: logging.Logger = logging.getLogger("farcall")

NEVER = float("inf")

Callback = Callable[[float], float]
"""``callback(now)`` runs on the I/O thread, must not block, and returns when it is due again (NEVER: after ``at``)."""


def bounded(seconds: float) -> float:
    """Seconds as ``Lock.acquire`` wants them: -1 for no bound, never negative otherwise."""
    return -1 if seconds == NEVER else min(max(0.0, seconds), threading.TIMEOUT_MAX)


class Timer:
    """A callback of the I/O thread, and when it is due. Any thread changes ``_named``, the I/O thread all else."""

    __slots__ = ("_callback", "_calls", "_named", "_timers", "due")

    def __init__(self, timers: Timers, callback: Callback) -> None:
        self._timers = timers
        self._callback = callback
        self._calls = 0
        self._named = (0, NEVER)  # the time named last, and how many calls there had been
        self.due: float = NEVER
        """The time of its one live entry in the heap. Frequent callers of ``at`` compare with it first."""

    def at(self, when: float) -> None:
        """Have the callback called at ``when``, or earlier if an earlier time was named before."""
        calls = self._calls
        if when >= self.due or (self._named[0] == calls and when >= self._named[1]):
            return
        timers = self._timers
        timers.named.append((when, self))
        if when < timers.next_due:
            timers.wake()
        self._named = (calls, when)


class Timers:
    """All timers of one loop. Any thread appends to ``named``; the I/O thread changes all else."""

    __slots__ = ("_heap", "_numbers", "named", "next_due", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` ends the sleep of the I/O thread; any thread calls it."""
        self.wake: Callable[[], None] = wake
        self.named: deque[tuple[float, Timer]] = deque()
        """Times that are not in the heap yet: the I/O thread calls ``run_due`` before it sleeps."""
        self.next_due: float = NEVER
        """When to call ``run_due`` at the latest."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count()  # of timers with equal times, the first named runs first

    def timer(self, callback: Callback) -> Timer:
        """A new timer, not set yet. From any thread."""
        return Timer(self, callback)

    def run_due(self, now: float) -> None:
        """Call the first due timer, if any. Only one: the loop looks at sockets before the next."""
        heap, named = self._heap, self.named
        due: Timer | None = None
        # Another thread appends to ``named``, then compares with ``next_due``. This one writes ``next_due``, then looks
        # at ``named``. So one of the two sees the other. (After a timer was called, the loop looks at ``named``.)
        while due is None and (named or (heap and heap[0][0] <= now)):
            while named:
                when, timer = named.popleft()
                if when < timer.due:
                    timer.due = when  # a later entry of the same timer in the heap is dead from now on
                    heappush(heap, (when, next(self._numbers), timer))
            if heap and heap[0][0] <= now:
                when, _, timer = heappop(heap)
                if when == timer.due:
                    due = timer
                    timer._calls += 1
                    timer.due = NEVER
            while heap and heap[0][0] != heap[0][2].due:
                heappop(heap)
            self.next_due = heap[0][0] if heap else NEVER
        if due is not None:
            try:
                due.at(due._callback(now))
            except Exception:
                logger.exception("a timer of the I/O thread failed; please report this")
