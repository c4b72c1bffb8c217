"""Streams: items that one member sends to another as it makes them, in order, exactly once, within a window.

Owns the messages of a stream and the two machines at its ends; knows neither items nor threads. A stream has the number
of its call (the callee writes), or one chosen by its writer (``outgoing``: an argument of a call; the caller writes).

    message         way                  says
    `Part`          writer -> reader     in the head of a letter: which items are in it; whether the stream ends here
    `StreamCredit`  reader -> writer     how many items, and bytes, may have been sent in all by now
    `StreamClosed`  reader -> writer     nobody wants more of an outgoing stream (a call's is ended by cancelling it)

A link delivers each message once. Small messages may pass large ones, so a part carries the number of its first item,
and the reader puts parts in order. A credit holds totals, not differences: the latest counts, and others may be lost.

    writer     event                        becomes
    open       an item, and there is room   open; the item counts against the credit
    open       an item, and there is none   open; the item waits for credit
    open       no more items, or an error   ended, with a last part
    open       closed, or the reader died   closed: the source of the items is closed

    reader     event                        becomes
    open       a part in order              open; it and those that waited for it can be taken
    open       a part ahead of others       open; it waits
    open       a part seen before           open; it is dropped
    open       the last part                ended, once all items before it have been taken
    open       the writer died              broken, once all items that came in order have been taken

Room: a writer may send while it has sent fewer items, and fewer bytes, than were granted. So besides the part that a
reader is handing out, it never holds more than its window of items, nor more than its window of bytes plus one item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from farcall.protocol.control import ControlMessage

WINDOW_ITEMS = 1024
WINDOW_BYTES = 8 * 1024 * 1024
"""How much may be in transit or wait to be taken. The first credit of a call's stream.

Items in shared memory cycle through as many blocks as the window has. Of 8 MiB the processor's caches keep most: copies
of 1 MiB into 8 such blocks in turn take 30 us each, into 16 blocks two to three times as long.
"""

T = TypeVar("T")


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The head of a letter that carries items."""

    number: int
    outgoing: bool
    first: int  # the number of its first item, from 0
    segments: list[tuple[int, int, int]]  # (items, bytes of the payload, buffers): each pickled separately
    last: bool = False  # no item follows; if the payload is not empty, it is the error that ended the stream

    @property
    def items(self) -> int:
        """The number of items in this part."""
        items = 0
        for segment in self.segments:
            items += segment[0]
        return items


class StreamCredit(ControlMessage, frozen=True, tag=90):
    """The totals of items and bytes that the writer may send, counted from the stream's beginning."""

    number: int
    outgoing: bool
    items: int
    size_bytes: int


class StreamClosed(ControlMessage, frozen=True, tag=91):
    """The reader of an outgoing stream has closed it."""

    number: int


Message = StreamCredit | StreamClosed

encode_part: Callable[[Part], bytes] = msgspec.msgpack.Encoder().encode
decode_part: Callable[[bytes], Part] = msgspec.msgpack.Decoder(Part).decode


class WriterMachine:
    """The totals that a writer has sent, and may send. Mutable: all four."""

    __slots__ = ("granted_bytes", "granted_items", "sent_bytes", "sent_items")

    def __init__(self, items: int = 0, size_bytes: int = 0) -> None:
        """``items``, ``size_bytes``: the first credit."""
        self.granted_items: int = items
        self.granted_bytes: int = size_bytes
        self.sent_items: int = 0
        self.sent_bytes: int = 0

    @property
    def has_room(self) -> bool:
        """May another item be sent?"""
        return self.sent_items < self.granted_items and self.sent_bytes < self.granted_bytes

    def send(self, items: int, size_bytes: int) -> int:
        """Count items against the credit; return the number of the first."""
        first = self.sent_items
        self.sent_items += items
        self.sent_bytes += size_bytes
        return first

    def on_credit(self, items: int, size_bytes: int) -> None:
        """Accept the totals that the reader grants. Credits may arrive out of order, so the highest counts."""
        self.granted_items = max(self.granted_items, items)
        self.granted_bytes = max(self.granted_bytes, size_bytes)


class ReaderMachine(Generic[T]):
    """Orders the parts that arrive, and grants credit for items taken. A part is whatever the driver hands in.

    Mutable: the totals taken and granted, the next item expected, and the parts ahead of it.
    """

    __slots__ = (
        "_ahead",
        "_granted_bytes",
        "_granted_items",
        "_next",
        "_taken_bytes",
        "_total",
        "_window_bytes",
        "_window_items",
        "taken_items",
    )

    def __init__(self, items: int = WINDOW_ITEMS, size_bytes: int = WINDOW_BYTES, *, granted: bool = True) -> None:
        """``granted``: the writer has the first window without a credit message."""
        self._window_items = items
        self._window_bytes = size_bytes
        self._granted_items = items if granted else 0
        self._granted_bytes = size_bytes if granted else 0
        self.taken_items: int = 0
        self._taken_bytes = 0
        self._next = 0
        self._ahead: dict[int, tuple[int, T]] = {}
        self._total: int | None = None

    def on_part(self, first: int, items: int, part: T) -> list[T]:
        """Take a part that arrived; return the parts that are ready now, in order."""
        if first < self._next or first in self._ahead or items <= 0:
            return []
        self._ahead[first] = (items, part)
        found = []
        while (waited := self._ahead.pop(self._next, None)) is not None:
            count, ready = waited
            self._next += count
            found.append(ready)
        return found

    @property
    def has_ahead(self) -> bool:
        """Do parts wait for others before them?"""
        return bool(self._ahead)

    def drop_ahead(self) -> list[T]:
        """Give out the parts that wait for others, which will not come. From any thread, also during `on_part`."""
        found = []
        while self._ahead:
            try:
                found.append(self._ahead.popitem()[1][1])
            except KeyError:
                break  # another thread took the last one
        return found

    def on_last(self, total: int) -> None:
        """Note that the stream has ``total`` items."""
        self._total = total

    @property
    def complete(self) -> bool:
        """Have all items arrived?"""
        return self._next == self._total

    def take(self, items: int, size_bytes: int) -> tuple[int, int] | None:
        """Count items taken; return a new credit if it should be sent now.

        A credit is due when half of a window is free: one message per item would cost as much as the items.
        """
        self.taken_items += items
        self._taken_bytes += size_bytes
        may_items = self.taken_items + self._window_items
        may_bytes = self._taken_bytes + self._window_bytes
        if self._total is not None or not (
            may_items - self._granted_items >= self._window_items // 2
            or may_bytes - self._granted_bytes >= self._window_bytes // 2
        ):
            return None
        self._granted_items, self._granted_bytes = may_items, may_bytes
        return may_items, may_bytes
