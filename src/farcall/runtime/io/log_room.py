"""Log lines of the I/O thread: dropped, where writing them would block.

A full pipe (a parent that does not read its child's stderr) blocks every writer; the I/O thread would stand still, and
the node with it. All other threads write as usual.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Iterator

from farcall.runtime.io.reader import reading

_HAS_POLL = hasattr(select, "poll")


class LogRoom(logging.Filter):
    """A filter of the logger ``farcall``. Mutable: how many lines were dropped since the last written one."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Can ``record`` be written without blocking the I/O thread?"""
        if reading.loop is None or not _HAS_POLL:
            return True
        if not all(map(_has_room, _streams(logging.getLogger(record.name)))):
            self._left_out += 1
            return False
        if self._left_out:
            record.msg = f"{record.getMessage()} ({self._left_out} lines before this were left out: nobody read them)"
            record.args = ()
            self._left_out = 0
        return True


def _streams(logger: logging.Logger) -> Iterator[int]:
    """The descriptors that a record of ``logger`` would be written to."""
    found = False
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            found = True
            yield from _descriptor(handler)
        at = at.parent if at.propagate else None
    if not found and logging.lastResort is not None:
        yield from _descriptor(logging.lastResort)


def _descriptor(handler: logging.Handler) -> Iterator[int]:
    stream = getattr(handler, "stream", None)
    try:
        yield stream.fileno()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return  # the handler does not write to a descriptor


def _has_room(descriptor: int) -> bool:
    look = select.poll()
    look.register(descriptor, select.POLLOUT)
    return any(
        flags & (select.POLLOUT | select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, flags in look.poll(0)
    )
