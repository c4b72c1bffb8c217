"""Which link a thread is reading, and how it stops before it blocks.

Reading a link is a role that one thread has at a time. Whoever has it must not block: frames behind the one it
handles may be what it would wait for. So everything in farcall that is about to wait calls ``stop_reading`` first.
"""

from __future__ import annotations

import threading
from typing import Protocol

from farcall.runtime.io.loop import loop_of_thread
from farcall.runtime.io.standby import Ticket, claim


class Readable(Protocol):
    """A link, as far as its reader is concerned."""

    def end_reading(self) -> None:
        """Let another thread read on."""


class _Reading(threading.local):
    """What the calling thread reads, and, if it runs a function meanwhile (`standby.py`), the ticket for that."""

    link: Readable | None = None
    ticket: Ticket | None = None


reading: _Reading = _Reading()


def stop_reading() -> None:
    """To be called by a thread about to block: if it is reading a link, somebody else must read on."""
    link = reading.link
    if link is not None:
        # Of this thread, not of the link: another one may be the I/O thread by now and run a function, too.
        ticket = reading.ticket
        if ticket is not None:
            reading.ticket = None
            if not claim(ticket):
                reading.link = None  # taken away already
                return
        link.end_reading()
    loop = loop_of_thread()
    if loop is not None:
        loop.hand_over()
