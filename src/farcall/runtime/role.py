"""Which link a thread is reading, and how it stops before it blocks.

Reading a link is a role that one thread has at a time. Whoever has it must not block: frames behind the one it
handles may be what it would wait for. So everything in farcall that is about to wait calls ``abdicate`` first.
"""

from __future__ import annotations

import threading
from typing import Protocol

from farcall.runtime.inline import Ticket, claim
from farcall.runtime.loop import loop_of_thread


class Readable(Protocol):
    """A link, as far as its reader is concerned."""

    def end_reading(self) -> None:
        """Let another thread read on."""


class _Role(threading.local):
    """What the calling thread reads, and, if it runs a function meanwhile (`inline.py`), the ticket for that."""

    link: Readable | None = None
    ticket: Ticket | None = None


role: _Role = _Role()


def abdicate() -> None:
    """To be called by a thread about to block: if it is reading a link, somebody else must read on."""
    link = role.link
    if link is not None:
        # Of this thread, not of the link: another one may be the I/O thread by now and run a function, too.
        ticket = role.ticket
        if ticket is not None:
            role.ticket = None
            if not claim(ticket):
                role.link = None  # taken away already
                return
        link.end_reading()
    loop = loop_of_thread()
    if loop is not None:
        loop.hand_over()
