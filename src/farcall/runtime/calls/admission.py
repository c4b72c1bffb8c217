"""Backpressure: a node reports that too many calls wait for its threads, and its callers wait or are refused.

Owns the limit, the two messages between callee and caller, and the threads that wait at the caller. Knows nothing of
functions, arguments or frames; `node/dispatcher.py` asks it about each request that arrives while many are unanswered.

The limit counts tasks that wait for a thread (``Executor.waiting``), not functions that run, wait for nested calls,
or have returned a future. So the pool, which grows when every thread waits, always drains the queue again, and no
nested call waits for ever. Only requests are held up: answers, references, gradients and membership always pass.

    the caller chose   its request finds the queue full, and is     its further requests
    "wait"             accepted; the caller is told, once           wait at the caller, unsent, until told of room
    "fail"             refused: answered, not run                   are sent, and each is accepted or refused

The I/O thread reports room when half of the limit is free; it looks every LOOK_S while any caller waits for room.
For "wait" the limit is therefore soft: requests in flight are accepted. Rejected: to refuse them and have them sent
again. The sender may have changed its tensors since.

    a peer, at the caller   hears                       becomes
    open (``full`` None)    QueueFull                   full: senders wait, within their calls' timeouts
    full                    QueueHasRoom, or its end    open: all senders go on (and learn of its end when they send)
    full                    a cancellation              full: the senders whose call is not wanted any more go on

Both messages are sent under the lock, which is held only briefly, and so in the right order; the reader of the link
handles them in that order, on whatever thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.runtime.calls.scope import Served
from farcall.runtime.io.sigint import Gate, exposed
from farcall.runtime.io.timers import NEVER, Callback, Timer
from farcall.runtime.link.send_queue import bounded

LOOK_S = 0.002


class Caller(Protocol):
    """A caller, as the receiver of the two messages."""

    def tell_full(self, queued: int, limit: int) -> None: ...

    def tell_room(self) -> None: ...


class Sender(Protocol):
    """A call that waits to be sent."""

    @property
    def parent(self) -> Served | None: ...


class Admission:
    """At the callee: which requests are refused, and which callers have been told to wait."""

    def __init__(self, limit: int, count_queued: Callable[[], int], timer: Callable[[Callback], Timer]) -> None:
        self.limit = limit
        self._count_queued = count_queued
        self._timer = timer(self.look_for_room)
        self._told: set[Caller] = set()  # changed under the lock only
        self._lock = threading.Lock()

    def refuses(self, caller: Caller, refusable: bool) -> bool:
        """Is a request to be refused? Asked only while at least ``limit`` requests are unanswered."""
        queued = self._count_queued()
        if queued < self.limit:
            return False
        if refusable:
            return True
        if caller not in self._told:
            with self._lock:
                if caller not in self._told:
                    self._told.add(caller)
                    caller.tell_full(queued, self.limit)
            self._timer.at(monotonic() + LOOK_S)
        return False

    @property
    def queued(self) -> int:
        """How many tasks wait for a thread here."""
        return self._count_queued()

    def look_for_room(self, now: float) -> float:
        """On the I/O thread: tell the waiting callers, if there is room; returns when to look again."""
        if not self._told:
            return NEVER
        if self._count_queued() > self.limit // 2:
            return now + LOOK_S
        with self._lock:
            told, self._told = self._told, set()
            for caller in told:
                caller.tell_room()
        return NEVER

    def forget(self, caller: Caller) -> None:
        """``caller`` is gone."""
        with self._lock:
            self._told.discard(caller)


class Fullness:
    """At the caller: the full queue of one peer, and the threads that wait to send to that peer. Ends once."""

    __slots__ = ("_gates", "_over", "limit", "queued")

    def __init__(self, queued: int, limit: int) -> None:
        self.queued: int = queued
        self.limit: int = limit
        self._gates: list[Gate] = []
        self._over = False

    def wait(self, deadline: float, sender: Sender | None = None) -> bool:
        """Block until the queue has room, or the peer is gone; False: ``deadline`` came first.

        Returns also when the request whose function makes the call ``sender`` is cancelled.
        """
        parent = None if sender is None else sender.parent
        gate = Gate()
        self._gates.append(gate)
        try:
            # Look only after the line above: an `end` or `look_again` that this look misses then opens the gate.
            while not self._over and not (parent is not None and parent.cancelled):
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return False
                exposed(gate.wait, bounded(remaining))
            return True
        finally:
            self._gates.remove(gate)

    def look_again(self) -> None:
        """The call of a waiting thread may have been cancelled. From any thread; never blocks."""
        for gate in self._gates.copy():  # each leaves when its thread goes on
            gate.open()

    def end(self) -> None:
        """There is room again, or the peer is gone. From any thread; never blocks."""
        self._over = True
        self.look_again()
