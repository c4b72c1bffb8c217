"""Quick functions run on the I/O thread itself, under a watch that takes the role away from it if one is slow after
all.

A hop to a worker thread costs more than most functions that take microseconds. So a request whose function was quick
when it last ran is run by the thread that read it. The rule that control messages never wait for user code still
holds: a standby thread looks in every LOOK_S, and when a function has run for longer than that, a fresh thread
becomes the I/O thread. The old one finishes its function, answers, and ends.

Who owns the role while a function runs is decided by a ticket, a list with one item: popping it is atomic.

    popped by                                 then
    the running thread, function returned     it goes on as the I/O thread
    the standby thread, function too slow     the link it was reading is freed, a fresh thread is the I/O thread
    the running thread, about to wait         the same (`abdicate`), by itself
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import Protocol

logger = logging.getLogger("farcall")

LOOK_S = 0.005
_LOOKS_BEFORE_SLEEP = 40


class Role(Protocol):
    """What is taken away from a thread whose function is slow."""

    def pass_on(self) -> None:
        """Let another thread read on. Called by the standby thread."""


Ticket = list[Role]


def claim(ticket: Ticket) -> bool:
    """Take the ticket; False if somebody else has it already."""
    try:
        ticket.pop()
    except IndexError:
        return False
    return True


class Standby:
    """The watch over one I/O thread. Its own thread is started at first use and sleeps while nothing runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: tuple[Ticket, float] | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = True
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self, role: Role) -> Ticket:
        """A function begins to run on the I/O thread."""
        ticket = [role]
        self._running = (ticket, monotonic())
        if self._asleep:
            self._rouse()
        return ticket

    def end(self, ticket: Ticket) -> bool:
        """The function returned. False: the role was taken away meanwhile."""
        if not claim(ticket):
            return False  # and by now _running may be that of the thread that took over
        self._running = None
        return True

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
            running = self._running
            if running is None:
                quiet += 1
                if quiet > _LOOKS_BEFORE_SLEEP:
                    quiet = 0
                    # begin() sets _running before it looks at _asleep, so one of the two sees the other.
                    self._asleep = True
                    if self._running is None:
                        self._wake.acquire()
                        continue
                    self._asleep = False
            else:
                quiet = 0
                ticket, since = running
                if monotonic() - since > LOOK_S and ticket:
                    self._take_over(ticket)
            self._wake.acquire(True, LOOK_S)

    def _take_over(self, ticket: Ticket) -> None:
        try:
            role = ticket.pop()
        except IndexError:
            return  # it returned this moment
        self._running = None  # before anybody else can be the I/O thread
        try:
            role.pass_on()
        except Exception:
            logger.exception("the I/O role could not be passed on; please report this")

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        thread = self._thread
        if thread is not None:
            self._release()
            if thread is not threading.current_thread():
                thread.join(1.0)
