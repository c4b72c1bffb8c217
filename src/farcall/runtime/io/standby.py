"""Quick functions run by the thread that reads, under a watch that takes the role away from it if one is slow.

A hop to a worker thread costs more than most functions that take microseconds. So a request whose function was quick
when it last ran is run by the I/O thread itself, and an answer without Python callbacks is unpickled, and its future
completed, by the thread that read it. The rule that control messages never wait for user code still holds: a standby
thread looks in every LOOK_S, and when a reader has been busy with one thing for longer than that, another thread reads
on. The old one finishes what it does, and is a reader no more.

Who owns the role is decided by a ticket, a list with one item: popping it is atomic.

    popped by                               then
    the reader, done with its frames        it goes on
    the standby thread, reader too slow     the link is freed; for an I/O thread a fresh one takes its place
    the reader, about to wait               the same (`stop_reading`), by itself
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import Protocol

logger: logging.Logger = logging.getLogger("farcall")

LOOK_S = 0.005
_LOOKS_BEFORE_SLEEP = 40
_get_ident = threading.get_ident


class Role(Protocol):
    """What is taken away from a thread that is busy for too long."""

    def pass_on(self) -> None:
        """Let another thread read on. Called by the standby thread."""


class Ticket(list[Role]):
    """The right to a role, and since when its owner is busy with one thing."""

    __slots__ = ("since",)

    since: float


def claim(ticket: Ticket) -> bool:
    """Take the ticket; False if somebody else has it already."""
    try:
        ticket.pop()
    except IndexError:
        return False
    return True


class Standby:
    """The watch over the readers of one node. Its thread is started at first use and sleeps while nothing runs."""

    def __init__(self, name: str, look_s: float = LOOK_S) -> None:
        self._name = name
        self._look_s = look_s
        self._running: dict[int, Ticket] = {}  # by thread
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = True
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self, role: Role) -> Ticket:
        """The calling thread, a reader, begins something that may take long."""
        ticket = Ticket((role,))
        ticket.since = monotonic()
        self._running[_get_ident()] = ticket
        if self._asleep:
            self._rouse()
        return ticket

    def end(self, ticket: Ticket) -> bool:
        """It is done. False: the role was taken away meanwhile."""
        if self._running.get(_get_ident()) is ticket:
            self.forget()
        return claim(ticket)

    def forget(self) -> None:
        """The calling thread is no reader any more."""
        self._running.pop(_get_ident(), None)

    def _rouse(self) -> None:
        self._asleep = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name=f"farcall-standby-{self._name}", daemon=True)
            self._thread.start()
        else:
            self._release()

    def _release(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            pass  # released before, and not taken yet: it is about to look

    def _watch(self) -> None:
        quiet = 0
        while not self._ended:
            watched = [ticket for ticket in list(self._running.values()) if ticket]
            now = monotonic()
            for ticket in watched:
                if now - ticket.since > self._look_s:
                    self._take_over(ticket)
            quiet = 0 if watched else quiet + 1
            if quiet > _LOOKS_BEFORE_SLEEP:
                quiet = 0
                # begin() sets _running before it looks at _asleep, so one of the two sees the other.
                self._asleep = True
                if not any(self._running.values()):
                    self._wake.acquire()
                    continue
                self._asleep = False
            self._wake.acquire(True, self._look_s)

    def _take_over(self, ticket: Ticket) -> None:
        try:
            role = ticket.pop()
        except IndexError:
            return  # it is done this moment
        try:
            role.pass_on()
        except Exception:
            logger.exception("the role of a reader could not be passed on; please report this")

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        thread = self._thread
        if thread is not None:
            self._release()
            if thread is not threading.current_thread():
                thread.join(1.0)
