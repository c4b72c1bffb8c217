"""Who has to wait before something can be sent: the queue of senders at one link, and how much is queued before them.

Owns the gates of waiting threads and the count of queued bytes. Knows neither bytes nor connections: `send.py` says
when the kernel is full, when there is no connection, and when there is room again.

Readers never wait in here, nor does the I/O thread: the peer may be waiting for them to read. Nor does a thread with a
running event loop, which has other things to do; the timeouts of its calls bound what it queues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from farcall.errors import Delivery, RpcTimeout
from farcall.runtime.io import sigint
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import in_event_loop, reading
from farcall.runtime.io.timers import NEVER
from farcall.transport.interface import WAIT_SLICE_S


class SendQueue:
    """The senders of one link that wait, and why."""

    __slots__ = ("_backlog_limit", "_loop", "_name", "_waiting", "closed", "down", "full", "queued_bytes")

    def __init__(self, name: str, loop: Loop, backlog_limit_bytes: int) -> None:
        self._name = name
        self._loop = loop
        self._backlog_limit = backlog_limit_bytes
        self._waiting: deque[threading.Lock] = deque()
        self.closed: bool = False
        self.down: bool = False
        """Is there no connection at the moment?"""
        self.full: bool = False
        """Does the kernel take no more at the moment, whoever writes?"""
        self.queued_bytes: int = 0

    def has_room(self) -> None:
        """Nothing waits for the kernel any more."""
        if self.full:
            self.full = False
            self.queued_bytes = 0
            self.wake_waiting()

    def set_queued(self, size_bytes: int) -> None:
        """So much is queued now; let senders go on if that is little enough."""
        self.queued_bytes = size_bytes
        if size_bytes <= self._backlog_limit:
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Have every waiting thread look again."""
        waiting = self._waiting
        while waiting:
            try:
                waiting.popleft().release()
            except IndexError:
                return  # another thread was faster

    def wait_for_room(self, size_bytes: int, deadline: float) -> None:
        """The kernel is full and a small frame is to be queued: wait if too much is queued already."""
        if not self._loop.on_thread() and reading.link is None and not in_event_loop():
            self.wait_while(lambda: self.full and self.queued_bytes > self._backlog_limit and not self.closed, deadline)
            if monotonic() >= deadline and self.full and self.queued_bytes > self._backlog_limit:
                why = "cannot be reached" if self.down else "does not read"
                raise RpcTimeout(f"{self._name} {why}: {self.queued_bytes} bytes wait to be sent", Delivery.NOT_SENT)
        self.queued_bytes += size_bytes

    def wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        """Sleep while ``condition`` holds, looking again at each ``wake_waiting``, until ``deadline`` at most.

        Not a Condition: Ctrl-C in the middle of that would leave its lock behind.
        """
        mine = sigint.of_thread()
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        while condition():  # after the line above: whoever changes it from now on opens the gate
            remaining = deadline - monotonic()
            if remaining <= 0:
                return
            depth, mine.depth = mine.depth, 0
            try:
                if mine.held is not None:
                    sigint.deliver()
                opened = gate.acquire(True, bounded(min(WAIT_SLICE_S, remaining)))
            finally:
                mine.depth = depth
            if opened:
                self._waiting.append(gate)


def bounded(seconds: float) -> float:
    """Seconds as ``Lock.acquire`` wants them: -1 for no bound, never negative otherwise."""
    if seconds == NEVER:
        return -1
    return min(max(0.0, seconds), threading.TIMEOUT_MAX)
