"""Backpressure: a node reports that too many calls wait for its threads, and its callers wait or are refused.

Owns the limit, the two messages between callee and caller, and the threads that wait at the caller. The core counts what
waits (`Core.limit_queue`): FULL and ROOM are its news.

The limit counts tasks that wait for a thread , not functions that run, wait for nested calls,
or have returned a future. So the pool, which grows when every thread waits, always drains the queue again, and no
nested call waits for ever. Only requests are held up: answers, references, gradients and membership always pass.

    the caller chose   its request finds the queue full, and is     its further requests
    "wait"             accepted; the caller is told, once           wait at the caller, unsent, until told of room
    "fail"             refused: answered, not run                   are sent, and each is accepted or refused

For "wait" the limit is therefore soft: requests in flight are accepted. Rejected: to refuse them and have them sent
again. The sender may have changed its tensors since.

    a peer, at the caller   hears                       becomes
    open (``full`` None)    QueueFull                   full: senders wait, within their calls' timeouts
    full                    QueueHasRoom, or its end    open: all senders go on (and learn of its end when they send)
    full                    a cancellation              full: the senders whose call is not wanted any more go on

"""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from farcall.runtime.calls.scope import Served
from farcall.runtime.io.sigint import Gate, exposed
from farcall.runtime.io.timers import bounded


class Caller(Protocol):
    """A caller, as the receiver of the two messages."""

    def tell_full(self, queued: int, limit: int) -> None: ...

    def tell_room(self) -> None: ...


class Sender(Protocol):
    """A call that waits to be sent."""

    @property
    def parent(self) -> Served | None: ...


class Admission:
    """At the callee: which callers have been told to wait. On the I/O thread, as the core has it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._told: set[Caller] = set()

    def tell_full(self, caller: Caller, queued: int) -> None:
        """A request of ``caller`` came while ``queued`` wait, more than the limit."""
        self._told.add(caller)
        caller.tell_full(queued, self.limit)

    def tell_room(self) -> None:
        """No more than half of the limit wait."""
        told, self._told = self._told, set()
        for caller in told:
            caller.tell_room()

    def forget(self, caller: Caller) -> None:
        """``caller`` is gone."""
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
