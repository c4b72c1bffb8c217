"""The timers of one I/O thread: a heap of times, and what is called when they come.

Each part of a node that has deadlines makes one timer and names the nearest of them. Only due timers are called. Knows
no clock: the loop says what time it is, and so do tests.

Thread rules
- ``Timer.at`` may be called from any thread, by destructors and signal handlers too: it takes no lock. It costs a
  comparison where the time is no nearer than the one named before, and wakes the loop only if no timer is due earlier.
- The heap belongs to the I/O thread, and so do ``Timer.due`` and ``Timers.next_due``, which others only read. Other
  threads hand their times over in a deque, whose ends are atomic.
- A part changes its own state first and calls ``at`` afterwards. The I/O thread forgets the time of a timer first and
  calls it afterwards. So either ``at`` finds that the time is free again, or the callback sees the new state.
- An exception may end ``at`` anywhere (Ctrl-C, inside a garbage collection even): what it has not done yet, the next
  ``at`` does. Hence the order of its steps, and the number of calls in what it remembers: a note made too late must not
  hide a time from the next call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

logger: logging.Logger = logging.getLogger("farcall")

NEVER = float("inf")

Callback = Callable[[float], float]
"""``callback(now)``, on the I/O thread, must not block. Returns when it is due again: NEVER, until ``at`` says more."""


class Timer:
    """A callback of the I/O thread, and when it is due."""

    __slots__ = ("_callback", "_calls", "_named", "_timers", "due")

    def __init__(self, timers: Timers, callback: Callback) -> None:
        self._timers = timers
        self._callback = callback
        self._calls = 0
        self._named = (0, NEVER)  # the time named last, and how many calls there had been
        self.due: float = NEVER
        """The time in the heap that counts. Where ``at`` is called often, compare with it before."""

    def at(self, when: float) -> None:
        """Have the callback called at ``when``, or earlier where an earlier time was named before."""
        calls = self._calls
        if when >= self.due or (self._named[0] == calls and when >= self._named[1]):
            return
        timers = self._timers
        timers.named.append((when, self))
        if when < timers.next_due:
            timers.wake()
        self._named = (calls, when)


class Timers:
    """All timers of one loop. Other threads add to ``named``; all else is the I/O thread's."""

    __slots__ = ("_heap", "_numbers", "named", "next_due", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` ends the sleep of the I/O thread; from any thread."""
        self.wake: Callable[[], None] = wake
        self.named: deque[tuple[float, Timer]] = deque()
        """Times that are not in the heap yet: the I/O thread calls ``run_due`` before it sleeps on them."""
        self.next_due: float = NEVER
        """When to call ``run_due`` at the latest."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count()  # of equal times, the one named first is first

    def timer(self, callback: Callback) -> Timer:
        """A timer that nobody has set yet. From any thread."""
        return Timer(self, callback)

    def run_due(self, now: float) -> None:
        """Call the timer that is due first, if one is. Only one: sockets are looked at before the next."""
        heap, named = self._heap, self.named
        due: Timer | None = None
        # Another thread appends to ``named``, then compares with ``next_due``; here ``next_due`` is written, then
        # ``named`` looked at. One of the two sees the other. (Where a timer is due the loop looks when it is done.)
        while due is None and (named or (heap and heap[0][0] <= now)):
            while named:
                when, timer = named.popleft()
                if when < timer.due:
                    timer.due = when  # which makes a later entry of the same timer a dead one
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
