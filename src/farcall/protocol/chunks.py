"""Large outgoing messages: cut into chunks, so that other frames can pass between them.

Owns the division of a message into chunks, and the fate of a message that loses a chunk. Knows no socket, thread or
lock: callers hold the link's write lock, to write and to resume a session. `frames.py` has the layout of chunks;
`frame_decoder.py` reassembles them.

A message that fits into one chunk travels as a plain frame. Each chunk of a larger message is a frame of the link:
counted, acknowledged, and retransmitted alone if the connection broke.

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

from farcall.protocol.frames import ABANDONED, CHUNK, HEADER, MAGIC, NUMBER_MASK, VERSION, Piece, numbered
from farcall.protocol.session import Kept

SMALLEST_CHUNK_BYTES = 64 * 1024
LARGEST_CHUNK_BYTES = 1024 * 1024
CHUNK_S = 0.000_6
"""How long a chunk should take: other frames wait for it, but each chunk costs both ends some 20 us."""
_REMEMBERED = 0.9
"""The weight of earlier chunks in the average: kernels take bytes in bursts."""

Instead: TypeAlias = Callable[[], Sequence[bytes]]
"""Makes the frames that replace a lost message. Must neither block nor raise."""


class ChunkSize:
    """The size of a link's next chunk: larger if the last ones left quickly. Mutable: the two running averages."""

    __slots__ = ("_bytes", "_seconds", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes: int = LARGEST_CHUNK_BYTES // 4
        self._bytes = 0.0
        self._seconds = 0.0

    def took(self, size_bytes: int, seconds: float) -> None:
        """Learn from a chunk of ``size_bytes`` that the kernel took within ``seconds``."""
        self._bytes = _REMEMBERED * self._bytes + size_bytes
        self._seconds = _REMEMBERED * self._seconds + seconds
        if self._seconds > 0.0:
            steps = int(CHUNK_S * self._bytes / self._seconds / SMALLEST_CHUNK_BYTES)
            self.size_bytes = min(max(1, steps) * SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES)


class LargeMessage:
    """One message being sent. Mutable: how much of it has been cut, whether its memory is still ours, and its loss."""

    __slots__ = ("_instead", "_is_lost", "_ours", "_parts", "_slot", "_starts", "cut_bytes", "size_bytes")

    def __init__(self, parts: Sequence[Piece], slot: int, instead: Instead | None) -> None:
        """``slot`` distinguishes its chunks from those of other messages. ``instead`` is None if it is repeatable."""
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
        """How many of its bytes have been cut into chunks."""

    def next_chunk(self, limit_bytes: int | None) -> Chunk:
        """Cut the next chunk, of at most ``limit_bytes`` (None: all that is left)."""
        start = self.cut_bytes
        end = self.size_bytes if limit_bytes is None else min(self.size_bytes, start + limit_bytes)
        self.cut_bytes = end
        return Chunk(self, start, end)

    def return_chunk(self, chunk: Chunk) -> None:
        """Take back the last chunk, of which no byte has left over any connection: it is cut anew later, or never."""
        assert not chunk.may_be_there
        self.cut_bytes = chunk.start

    def bytes_of(self, start: int, end: int, number: int) -> list[Piece]:
        """One chunk as it travels on the wire, as the frame with this number."""
        found: list[Piece] = []
        if end - start < self.size_bytes:
            sizes = (end - start, 0, 0, 0)
            found.append(HEADER.pack(MAGIC, VERSION, CHUNK, self._slot, start, *sizes, number & NUMBER_MASK))
        else:
            found.append(numbered(bytes(self._parts[0][: HEADER.size]), number))
            start = HEADER.size
        index = bisect_right(self._starts, start) - 1
        while start < end:
            begins = self._starts[index]
            part = self._parts[index][start - begins : end - begins]
            found.append(part)
            start += len(part)
            index += 1
        return found

    def written(self) -> None:
        """Note that the kernel has taken all bytes: the sender may change the memory again."""
        self._ours = self._instead is None

    def give_up(self) -> bytes | None:
        """Give the memory back to the sender. Returns the frame that tells the peer; None if no byte has left."""
        assert self.cut_bytes < self.size_bytes, "all of it is on its way"
        self._ours = False
        self._is_lost = True
        if not self.cut_bytes:
            return None
        return self._abandon()

    def lost(self, chunk: Chunk) -> Sequence[Kept]:
        """Return what to write in place of ``chunk``, which the peer did not get."""
        if self._ours:
            chunk.may_be_there = not chunk.is_whole
            return (chunk,)
        if self._is_lost or self._instead is None:
            return ()
        self._is_lost = True
        frames = self._instead()
        # Abandon first: that frees the slot for other messages, and the peer's memory.
        return frames if chunk.is_whole else (self._abandon(), *frames)

    def _abandon(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CHUNK, self._slot | ABANDONED, 0, 0, 0, 0, 0, 0)


class Chunk:
    """A range of bytes of a large message, as a session keeps it until it is acknowledged. Mutable: `may_be_there`."""

    __slots__ = ("_end", "may_be_there", "message", "start")

    def __init__(self, message: LargeMessage, start: int, end: int) -> None:
        self.message: LargeMessage = message
        self.start: int = start
        self._end = end
        self.may_be_there: bool = False
        """Has the peer perhaps some of it, from an earlier connection? (Of a whole message it drops such bytes.)"""

    @property
    def is_whole(self) -> bool:
        """Is this chunk the whole message?"""
        return self._end - self.start == self.message.size_bytes

    def lost(self) -> Sequence[Kept]:
        """See `Unkept`."""
        return self.message.lost(self)

    def pieces(self, number: int) -> Sequence[Piece]:
        """See `Unkept`."""
        return self.message.bytes_of(self.start, self._end, number)
