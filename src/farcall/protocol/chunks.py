"""Large messages on their way out: cut into chunks, so that others pass between them.

Owns which bytes of a message make up a chunk, and what becomes of a message whose chunks are lost. Knows no socket,
thread or lock: its callers hold the link's write lock, to write and to resume a session. The layout of chunks, and the
way they are put together again, is in `frames.py`.

A message that fits into one chunk goes as a plain frame. Each chunk of another one is a frame of the link's: counted,
acknowledged, and, where the connection broke, written again alone.

    the message is            a chunk of it is lost
    in hand: being written    the chunk is written again: the memory is still ours
    repeatable                the chunk is written again, at any time: nobody changes the memory
    written                   its memory is its sender's again: the peer drops what it has, and gets `instead`
    given up                  nothing: the peer has been told, or will be, behind the chunks
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

from farcall.protocol.frames import ABANDONED, CHUNK, HEADER, MAGIC, VERSION, Piece
from farcall.protocol.session import Kept

SMALLEST_CHUNK_BYTES = 64 * 1024
LARGEST_CHUNK_BYTES = 1024 * 1024
QUICK_S = 0.000_3
SLOW_S = 0.001
"""A chunk should take between these: what is sent meanwhile waits for it, and each costs both ends some 20 us."""

Instead: TypeAlias = Callable[[], Sequence[bytes]]
"""The frames that are written in the place of a lost message. Must neither block nor raise."""


class ChunkSize:
    """How large the next chunk of a link should be: larger where the last one left quickly."""

    __slots__ = ("size_bytes",)

    def __init__(self) -> None:
        self.size_bytes: int = LARGEST_CHUNK_BYTES // 4

    def took(self, size_bytes: int, seconds: float) -> None:
        """So long a chunk of ``size_bytes`` was on its way into the kernel."""
        if seconds > SLOW_S:
            self.size_bytes = max(SMALLEST_CHUNK_BYTES, self.size_bytes // 2)
        elif seconds < QUICK_S and size_bytes >= self.size_bytes:  # not the short rest of a message
            self.size_bytes = min(LARGEST_CHUNK_BYTES, self.size_bytes * 2)


class LargeMessage:
    """One message under way. Mutable: how much of it has been cut, and whether its memory is still ours."""

    __slots__ = ("_instead", "_is_lost", "_ours", "_parts", "_slot", "_starts", "cut_bytes", "size_bytes")

    def __init__(self, parts: Sequence[Piece], slot: int, instead: Instead | None) -> None:
        """``slot``: tells its chunks from those of others. ``instead`` is None for a message that is repeatable."""
        self._parts = [memoryview(part) for part in parts if len(part)]
        self._slot = slot
        self._instead = instead
        self._ours = True
        self._is_lost = False
        self._starts: list[int] = []
        self.size_bytes: int = 0
        for part in self._parts:
            self._starts.append(self.size_bytes)
            self.size_bytes += len(part)
        self.cut_bytes: int = 0
        """How much of it has been made chunks of."""

    def next_chunk(self, limit_bytes: int | None) -> Chunk:
        """The next chunk, of at most ``limit_bytes`` (None: all that is left)."""
        start = self.cut_bytes
        end = self.size_bytes if limit_bytes is None else min(self.size_bytes, start + limit_bytes)
        self.cut_bytes = end
        return Chunk(self, start, end)

    def return_chunk(self, chunk: Chunk) -> None:
        """No byte of the last chunk has left: it is cut anew later, or never."""
        self.cut_bytes = chunk.start

    def bytes_of(self, start: int, end: int) -> list[Piece]:
        """One chunk as it goes over the wire."""
        found: list[Piece] = []
        if end - start < self.size_bytes:
            found.append(HEADER.pack(MAGIC, VERSION, CHUNK, self._slot, start, end - start, 0, 0, 0, 0))
        index = bisect_right(self._starts, start) - 1
        while start < end:
            begins = self._starts[index]
            part = self._parts[index][start - begins : end - begins]
            found.append(part)
            start += len(part)
            index += 1
        return found

    def written(self) -> None:
        """The kernel has all of it: the memory is its sender's again."""
        self._ours = self._instead is None

    def give_up(self) -> bytes | None:
        """The sender wants it back: what to tell the peer, which has a part of it; None: nothing has left."""
        assert self.cut_bytes < self.size_bytes, "all of it is on its way"
        self._ours = False
        self._is_lost = True
        if not self.cut_bytes:
            return None
        return self._abandon()

    def lost(self, chunk: Chunk) -> Sequence[Kept]:
        """The peer has not got ``chunk``: what is written in its place."""
        if self._ours:
            return (chunk,)
        if self._is_lost or self._instead is None:
            return ()
        self._is_lost = True
        frames = self._instead()
        # First: the slot is free for others, and the peer's memory, too.
        return frames if chunk.is_whole else (self._abandon(), *frames)

    def _abandon(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CHUNK, self._slot | ABANDONED, 0, 0, 0, 0, 0, 0)


class Chunk:
    """Some bytes of a large message, as a session keeps them."""

    __slots__ = ("_end", "message", "start")

    def __init__(self, message: LargeMessage, start: int, end: int) -> None:
        self.message: LargeMessage = message
        self.start: int = start
        self._end = end

    @property
    def is_whole(self) -> bool:
        """Is it all of its message?"""
        return self._end - self.start == self.message.size_bytes

    def lost(self) -> Sequence[Kept]:
        """See `Unkept`."""
        return self.message.lost(self)

    def pieces(self) -> Sequence[Piece]:
        """See `Unkept`."""
        return self.message.bytes_of(self.start, self._end)
