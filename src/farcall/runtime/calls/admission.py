"""What a node does when more calls wait for its threads than it allows: it says so. And what its callers do then.

Owns the limit, the two words that go between callee and caller, and those who wait at the caller. Knows nothing of
functions, arguments or frames; `node/dispatcher.py` asks it about each request that comes while many are unanswered.

What counts is what waits for a thread (``Executor.waiting``). Functions that run, that wait for calls of their own, or
that have returned a future do not; so the pool, which grows where every thread waits, always gets the queue down again,
and a nested call is kept waiting but not for good. Only requests are counted out: answers, references, gradients and
membership always pass.

    the caller chose   its request finds the queue full, and is     its further requests
    "wait"             taken in; the caller is told, once           wait at the caller, unsent, until told of room
    "fail"             refused: answered, not run                   are sent, and refused or not, each for itself

Room is told when half of the limit is free, by the I/O thread, which looks every LOOK_S while anybody waits for it.
To "wait" the limit is therefore a soft one: what was on its way is taken in. It is not refused and sent again: its
sender may have changed its tensors since.

    a peer, at the caller   hears                       becomes
    open (``full`` None)    QueueFull                   full: senders wait, within their calls' timeouts
    full                    QueueHasRoom, or its end    open: all of them go on (and find out about its end by sending)

Both words are read in the order they were sent, on whichever thread reads the link. They are sent under the lock,
which is held for moments: so they are sent in the right order, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER, Callback, Timer
from farcall.runtime.link.send_queue import bounded

LOOK_S = 0.002


class Caller(Protocol):
    """Whom a full queue is told to."""

    def tell_full(self, queued: int, limit: int) -> None: ...

    def tell_room(self) -> None: ...


class Admission:
    """At the callee: which requests are refused, and who has been told to wait."""

    def __init__(self, limit: int, count_queued: Callable[[], int], timer: Callable[[Callback], Timer]) -> None:
        self.limit = limit
        self._count_queued = count_queued
        self._timer = timer(self.look_for_room)
        self._told: set[Caller] = set()
        self._lock = threading.Lock()

    def refuses(self, caller: Caller, refusable: bool) -> bool:
        """Is a request not to be taken in? Asked only while at least ``limit`` requests are unanswered."""
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
        """How much waits for a thread here."""
        return self._count_queued()

    def look_for_room(self, now: float) -> float:
        """On the I/O thread: tell who waits for room that there is some."""
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
        """It is gone."""
        with self._lock:
            self._told.discard(caller)


class Fullness:
    """At the caller: a peer whose queue is full, and the threads that have something to send to it."""

    __slots__ = ("_gates", "_over", "limit", "queued")

    def __init__(self, queued: int, limit: int) -> None:
        self.queued: int = queued
        self.limit: int = limit
        self._gates: list[Gate] = []
        self._over = False

    def wait(self, deadline: float) -> bool:
        """Block until it is over; False: ``deadline`` came first."""
        gate = Gate()
        self._gates.append(gate)
        # After the line above: whoever ends it from now on opens the gate.
        while not self._over:
            remaining = deadline - monotonic()
            if remaining <= 0:
                return False
            gate.wait(bounded(remaining))
        return True

    def end(self) -> None:
        """There is room again, or the peer is gone. From any thread; never blocks."""
        self._over = True
        for gate in self._gates:
            gate.open()
