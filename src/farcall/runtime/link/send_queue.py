"""The threads that wait to send over one link, and the backlog that they wait for.

Owns the gates of waiting threads and the count of queued bytes. Knows neither bytes nor connections: `send.py` reports
when the kernel is full, when the link is down, and when there is room again.

Readers and the I/O thread never wait for room: the peer may be waiting for them to read. Nor does a thread with a
running event loop, which would hold up its other tasks; the timeouts of its calls bound what it queues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from farcall.errors import Delivery, RpcTimeout
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import in_event_loop, reading
from farcall.runtime.io.sigint import exposed
from farcall.runtime.io.timers import NEVER
from farcall.transport.interface import WAIT_SLICE_S


class SendQueue:
    """The waiting senders of one link. Mutable: their gates, why they wait, and the size of the backlog."""

    __slots__ = ("_backlog_limit", "_loop", "_name", "_waiting", "closed", "down", "full", "queued_bytes")

    def __init__(self, name: str, loop: Loop, backlog_limit_bytes: int) -> None:
        self._name = name
        self._loop = loop
        self._backlog_limit = backlog_limit_bytes
        self._waiting: deque[threading.Lock] = deque()
        self.closed: bool = False
        self.down: bool = False
        """Is the link without a connection now?"""
        self.full: bool = False
        """Does the kernel take no more now, so that frames queue up?"""
        self.queued_bytes: int = 0

    def has_room(self) -> None:
        """The kernel has taken the whole backlog: wake up all senders."""
        if self.full:
            self.full = False
            self.queued_bytes = 0
            self.wake_waiting()

    def set_queued(self, size_bytes: int) -> None:
        """The backlog is ``size_bytes`` now; wake up the senders if it is within its limit."""
        self.queued_bytes = size_bytes
        if size_bytes <= self._backlog_limit:
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Have every waiting thread check its condition again."""
        waiting = self._waiting
        while waiting:
            try:
                waiting.popleft().release()
            except IndexError:
                return  # another thread was faster

    def wait_for_room(self, size_bytes: int, deadline: float) -> None:
        """Before a small frame is queued while the kernel is full: wait if the backlog is too large."""
        if not self._loop.on_thread() and reading.link is None and not in_event_loop():
            self.wait_while(lambda: self.full and self.queued_bytes > self._backlog_limit and not self.closed, deadline)
            if monotonic() >= deadline and self.full and self.queued_bytes > self._backlog_limit:
                why = "cannot be reached" if self.down else "does not read"
                raise RpcTimeout(f"{self._name} {why}: {self.queued_bytes} bytes wait to be sent", Delivery.NOT_SENT)
        self.queued_bytes += size_bytes

    def wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        """Sleep while ``condition`` holds, checking it at each ``wake_waiting``, until ``deadline`` at most.

        Not a ``threading.Condition``: Ctrl-C in the middle of its ``wait`` could leave its lock taken.
        """
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        try:
            while condition():  # after the append: a thread that changes it from now on opens the gate
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return
                if exposed(gate.acquire, True, bounded(min(WAIT_SLICE_S, remaining))):
                    self._waiting.append(gate)
        finally:
            try:
                self._waiting.remove(gate)
            except ValueError:
                pass  # a thread that opens it has taken it


def bounded(seconds: float) -> float:
    """Seconds as ``Lock.acquire`` wants them: -1 for no bound, never negative otherwise."""
    if seconds == NEVER:
        return -1
    return min(max(0.0, seconds), threading.TIMEOUT_MAX)
