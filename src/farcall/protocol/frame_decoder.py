"""An incremental decoder: bytes in as they arrive, frames out. The layout is in `frames.py`.

Owns the memory that a connection reads into, and limits how much of it a peer's announcement may claim. Knows no
socket, thread, clock or torch: the caller says how many bytes came.

Invariants: the frames do not depend on how the stream is split; a buffer of LARGE_BYTES or more is received
straight into the memory that ``allocate`` gave for it, never through a joined ``bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from farcall.errors import NetworkError
from farcall.protocol.compiled import library
from farcall.protocol.frames import (
    ABANDONED,
    BUFFER_ENTRY,
    CHUNK,
    HEADER,
    LARGE_BYTES,
    LETTER,
    MAGIC,
    MAX_FUNCTION_BYTES,
    MAX_SLOTS,
    NUMBER_MASK,
    REQUEST,
    VERSION,
    Frame,
    Ticket,
)

FIRST_STAGING_BYTES = 16 * 1024
STAGING_BYTES = 256 * 1024
BETWEEN_CHUNKS_BYTES = 4 * 1024
"""The size of reads that expect a chunk's header: the bytes behind it should go to their message without a copy."""
STEP_BYTES = 1 << 20
"""Memory for a larger payload grows as its bytes arrive: a mere announcement costs no more than this."""
MAX_NOTES_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 16 * 1024 * 1024
MAX_PART_BYTES = 1 << 46

Allocate: TypeAlias = Callable[[int], memoryview]

take_whole: Callable[..., int] | None = None if library is None else library.take_whole
"""``take_whole(Frame, Ticket, staging, start, end, frames, number)``: append the frames that lie whole between
``start`` and ``end``, with numbers from ``number`` on, up to the first that does not, makes no sense or has inline
buffers; return where that begins. None: Python code takes them all."""


class FrameError(NetworkError):
    """The peer sent something that is not a frame: the connection is unusable."""


def allocate_plainly(size_bytes: int) -> memoryview:
    """The default allocator of memory for a received buffer."""
    return memoryview(bytearray(size_bytes))


class FrameDecoder:
    """Incremental decoder. Receive into ``writable()``, then call ``received(count)``.

    state      waits for                                   leaves when
    staging    a whole head (header, table, small parts)   the head is complete
    filling    the rest of one large part                  that part is complete: the next part, or staging
    in chunk   the rest of one chunk                       that chunk is complete: staging

    Each message that comes in chunks has a decoder of its own, which gets the bytes of its chunks: one frame, number 0.
    Mutable: everything but the limits; the positions ``_start`` and ``_end`` bound the unread bytes of the staging.
    """

    __slots__ = (
        "_allocate",
        "_assemblies",
        "_chunk",
        "_chunk_left",
        "_chunk_skip",
        "_end",
        "_fill_view",
        "_filled",
        "_frame",
        "_max_slots",
        "_room",
        "_staging",
        "_start",
        "_taken",
        "_view",
        "count",
    )

    def __init__(self, allocate: Allocate = allocate_plainly, *, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._assemblies: dict[int, FrameDecoder] = {}  # by slot
        self._chunk: int | None = None  # the slot whose chunk is being received
        self._chunk_left = 0
        self._chunk_skip = 0  # how many of these came over an earlier connection
        self._taken = 0  # in the decoder of one message: how many of its bytes have come
        self._room = STAGING_BYTES
        self.count: int = 0
        """How many frames have come, over all connections: the number of the next one. Each chunk counts as one."""
        self._staging = bytearray(FIRST_STAGING_BYTES)
        self._view = memoryview(self._staging)
        self._start = 0
        self._end = 0
        self._allocate = allocate
        self._frame: _PartialFrame | None = None
        self._fill_view: memoryview | None = None
        self._filled = 0

    def writable(self) -> memoryview:
        """The memory for the next received bytes. Never empty."""
        if self._fill_view is not None:
            return self._fill_view[self._filled :]
        if self._start:
            if self._start == self._end:
                self._start = self._end = 0
            elif self._end > len(self._staging) // 2:
                rest = self._end - self._start
                self._view[:rest] = bytes(self._view[self._start : self._end])
                self._start, self._end = 0, rest
        return self._view[self._end : self._end + self._room]

    def received(self, count: int) -> list[Frame]:
        """Decode ``count`` bytes written into the last ``writable()``; return the frames now complete."""
        frames: list[Frame] = []
        if self._fill_view is not None:
            if self._chunk is not None:
                return self._take_chunk(count)
            self._filled += count
            if self._filled < len(self._fill_view):
                return frames
            self._fill_view = None
        else:
            self._end += count
            if self._end == len(self._staging) < STAGING_BYTES:
                self._stage_more()
        if self._frame is not None:
            done = self._go_on(self._frame)
            if done is None:
                return frames
            self._frame = None
            self.count += 1
            frames.append(done)
        staging, view = self._staging, self._view
        unpack_header = HEADER.unpack_from
        while True:
            if take_whole is not None:
                before = len(frames)
                self._start = take_whole(Frame, Ticket, staging, self._start, self._end, frames, self.count)
                self.count += len(frames) - before
            start = self._start
            if self._end - start < 40:
                break
            (magic, version, kind, flags, call_id, payload_len, function_len, notes_len, buffer_count, number) = (
                unpack_header(staging, start)
            )
            if magic != MAGIC or version != VERSION or not REQUEST <= kind <= LETTER:
                if magic == MAGIC and version == VERSION and kind == CHUNK:
                    self._check(number)
                    self._start += 40
                    frames += self._begin_chunk(flags, call_id, payload_len)
                    if self._chunk is not None:
                        break
                    continue
                raise FrameError(
                    f"the peer sent {bytes(staging[start : start + 8])!r}, which is not the start of a frame"
                )
            self._check(number)
            if function_len > MAX_FUNCTION_BYTES:
                raise FrameError(f"the peer sent a function's name of {function_len} bytes")
            after_table = start + 40 + 24 * buffer_count
            if after_table <= self._end:
                # The fast path: most frames have arrived whole, and need no `_PartialFrame`. (`take_whole` has taken
                # those without inline buffers.)
                after_function = after_table + function_len
                after_notes = after_function + notes_len
                after_payload = end = after_notes + payload_len
                buffers: list[Any] = []
                if buffer_count:
                    for size, segment_id, offset in BUFFER_ENTRY.iter_unpack(view[start + 40 : after_table]):
                        if segment_id:
                            buffers.append(Ticket(size, segment_id, offset))
                            continue
                        if size >= LARGE_BYTES or end + size > self._end:
                            break  # large: to be read into memory of its own; or not here yet
                        buffers.append(memoryview(staging[end : end + size]))
                        end += size
                if len(buffers) == buffer_count and end <= self._end:
                    self._start = end
                    self.count += 1
                    frames.append(
                        Frame(
                            kind,
                            flags,
                            call_id,
                            bytes(view[after_table:after_function]) if function_len else b"",
                            bytes(view[after_function:after_notes]) if notes_len else b"",
                            bytes(view[after_notes:after_payload]),
                            buffers or (),
                        )
                    )
                    continue
                if not buffer_count and payload_len < LARGE_BYTES and end - start <= len(staging) // 2:
                    break  # the rest fits into the staging as well, and comes with the next read
            if notes_len > MAX_NOTES_BYTES or buffer_count > MAX_BUFFERS:
                raise FrameError("the peer sent a frame whose parts are larger than any real one")
            if payload_len > MAX_PART_BYTES:
                raise FrameError(f"the peer announced a payload of {payload_len} bytes")
            partial = _PartialFrame(kind, flags, call_id, payload_len, function_len, notes_len, buffer_count)
            self._start += 40
            done = self._go_on(partial)
            if done is None:
                self._frame = partial
                break
            self.count += 1
            frames.append(done)
        return frames

    def _check(self, number: int) -> None:
        """Refuse a frame that is not the next one."""
        if number != self.count & NUMBER_MASK:
            raise FrameError(
                f"the peer sent frame {number} in the place of frame {self.count & NUMBER_MASK}: one was lost or "
                "repeated, so nothing that follows can be trusted; please report this"
            )

    # ------------------------------------------------------------------ messages in chunks

    def restart(self) -> None:
        """Prepare for another connection: the peer retransmits the incomplete frame; messages in chunks go on."""
        self._start = self._end = 0
        self._frame = self._fill_view = self._chunk = None

    def _begin_chunk(self, flags: int, offset: int, size: int) -> list[Frame]:
        """Begin a chunk whose header was read, and take those of its bytes that are already staged."""
        slot = flags & ~ABANDONED
        if slot >= self._max_slots:
            raise FrameError(f"the peer sent a chunk for slot {slot}, of {self._max_slots}")
        if flags & ABANDONED:
            self._assemblies.pop(slot, None)
            self._end_chunk()
            return []
        message = self._assemblies.get(slot)
        if message is None:
            message = self._assemblies[slot] = FrameDecoder(self._allocate, max_slots=0)
        # A chunk that the broken connection delivered in part is retransmitted as a whole: skip the known bytes.
        skip = message._taken - offset
        if not 0 <= skip <= size or not size:
            raise FrameError(f"the peer sent bytes {offset} to {offset + size} of a message that has {message._taken}")
        self._chunk = slot
        self._chunk_left = size
        self._chunk_skip = skip
        frames: list[Frame] = []
        while self._chunk is not None and self._start < self._end:
            self._offer_chunk_room()
            assert self._fill_view is not None
            count = min(len(self._fill_view), self._end - self._start)
            self._fill_view[:count] = self._view[self._start : self._start + count]
            self._start += count
            frames += self._take_chunk(count)
        if self._chunk is not None:
            self._offer_chunk_room()
        return frames

    def _offer_chunk_room(self) -> None:
        """Direct the next bytes of the chunk into the memory of its message."""
        assert self._chunk is not None
        if self._chunk_skip:
            self._fill_view = memoryview(bytearray(min(self._chunk_skip, STAGING_BYTES)))
        else:
            self._fill_view = self._assemblies[self._chunk].writable()[: self._chunk_left]
        self._filled = 0

    def _take_chunk(self, count: int) -> list[Frame]:
        """Account for ``count`` received bytes of the chunk; return its message, if that is complete."""
        assert self._chunk is not None
        message = self._assemblies[self._chunk]
        self._chunk_left -= count
        frames: list[Frame] = []
        if self._chunk_skip:
            self._chunk_skip -= count
        else:
            message._taken += count
            frames = message.received(count)
        if frames:
            if len(frames) > 1 or self._chunk_left or message._start != message._end:
                raise FrameError("the peer sent more bytes of a message than it has")
            del self._assemblies[self._chunk]
        if self._chunk_left:
            self._offer_chunk_room()
        else:
            self._end_chunk()
        return frames

    def _end_chunk(self) -> None:
        self._chunk = self._fill_view = None
        self.count += 1
        self._room = BETWEEN_CHUNKS_BYTES if self._assemblies else STAGING_BYTES

    # ------------------------------------------------------------------ parts

    def _stage_more(self) -> None:
        """Enlarge the staging for ever: a read filled it. Most links of a large group never get here."""
        staging = bytearray(STAGING_BYTES)
        staging[: self._end] = self._view
        self._staging = staging
        self._view = memoryview(staging)

    def _go_on(self, frame: _PartialFrame) -> Frame | None:
        """Complete as many parts of ``frame`` as the staged bytes allow; return the frame when it is whole."""
        while frame.next_part < len(frame.sizes):
            size = frame.sizes[frame.next_part]
            have = self._end - self._start
            if frame.filling is not None:
                part = frame.filling
                if len(part) < size:
                    part = self._grown(part, size)
                    frame.filling = self._fill_view = part
                    return None
                frame.filling = None
            elif have >= size and not (frame.next_part >= 4 and size >= LARGE_BYTES):
                chunk = self._staging[self._start : self._start + size]
                part = memoryview(chunk)
                self._start += size
            else:
                # The part is incomplete or large: give it memory of its own, and read the rest straight into it.
                part = self._memory_for(size, out_of_band=frame.next_part >= 4)
                taken = min(have, len(part))
                part[:taken] = self._view[self._start : self._start + taken]
                self._start += taken
                if taken < size:
                    if taken == len(part):
                        part = self._grown(part, size)
                    frame.filling = part
                    self._fill_view = part
                    self._filled = taken
                    return None
            frame.take(part)
        return frame.finish()

    def _memory_for(self, size: int, out_of_band: bool) -> memoryview:
        try:
            # Memory from ``allocate`` costs nothing until it is written to; a bytearray is zeroed at once.
            return self._allocate(size) if out_of_band else allocate_plainly(min(size, STEP_BYTES))
        except (MemoryError, OSError, OverflowError) as error:
            raise FrameError(f"there is no memory for {size} bytes that the peer announced") from error

    def _grown(self, part: memoryview, size: int) -> memoryview:
        """Copy ``part`` to the beginning of a larger piece of memory; filling goes on behind it."""
        try:
            larger = allocate_plainly(min(size, 4 * len(part)))
        except MemoryError as error:
            raise FrameError(f"there is no memory for {size} bytes that the peer announced") from error
        larger[: len(part)] = part
        self._filled = len(part)
        return larger


class _PartialFrame:
    """A frame that arrives in parts: table, function, notes, payload, then inline buffers."""

    __slots__ = ("buffers", "call_id", "filling", "flags", "kind", "next_part", "parts", "sizes")

    def __init__(
        self,
        kind: int,
        flags: int,
        call_id: int,
        payload_len: int,
        function_len: int,
        notes_len: int,
        buffer_count: int,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.call_id = call_id
        self.sizes = [buffer_count * BUFFER_ENTRY.size, function_len, notes_len, payload_len]
        self.parts: list[memoryview] = []
        self.buffers: list[memoryview | Ticket | None] = []
        self.next_part = 0
        self.filling: memoryview | None = None

    def take(self, part: memoryview) -> None:
        """Accept the next complete part; the buffer table adds the inline buffers to the parts expected."""
        index = self.next_part
        self.next_part += 1
        if index == 0:
            for size, segment_id, offset in BUFFER_ENTRY.iter_unpack(part):
                if size > MAX_PART_BYTES:
                    raise FrameError(f"the peer announced a buffer of {size} bytes")
                if segment_id:
                    self.buffers.append(Ticket(size, segment_id, offset))
                else:
                    self.buffers.append(None)
                    self.sizes.append(size)
        self.parts.append(part)

    def finish(self) -> Frame:
        """Return the whole frame, with the inline buffers in their places."""
        inline = iter(self.parts[4:])
        buffers = [buffer if buffer is not None else next(inline) for buffer in self.buffers]
        return Frame(
            self.kind,
            self.flags,
            self.call_id,
            bytes(self.parts[1]),
            bytes(self.parts[2]),
            self.parts[3],
            buffers,
        )
