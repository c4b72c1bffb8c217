"""The wire layout: how one message becomes bytes, and bytes become messages again.

Bytes in, frames out; no socket, thread, clock or torch. All integers are little-endian.

    offset  size  field
    0       2     magic, b"fc"
    2       1     version of this layout
    3       1     kind: request, response, failure, control, letter
    4       4     flags (see notes.py; 0 for most; of a control frame: 1 if a descriptor rides along)
    8       8     call id (0 for control; of a letter, the number of its subject)
    16      8     payload length
    24      4     function length (requests only)
    28      4     notes length (what rides along, see notes.py)
    32      4     number of buffers
    36      4     reserved, 0
    40      24*n  buffer table: length (8), segment (8), offset (8); segment 0 means inline, the highest bit that it
                  is a segment of the receiver, who gets a block back that it had lent; the next one that
                  the sender goes on using these bytes
    ...           function, notes, payload, then every inline buffer in order

Both ends handle a message as a `Frame`: its writer fills one in, the decoder makes one, and handlers read its fields.

A large message travels in chunks, and other frames pass between them. A chunk has the same header: its kind, in the
flags a slot that tells messages under way from each other, in the place of the call id the offset of its bytes within
the message, and as the payload's length how many of them follow. The first chunk of a message begins with that
message's own header. The flag ABANDONED says instead that no more of it comes. The receiver puts together MAX_SLOTS
messages at most at a time.

The order of frames: if the sending of one had ended before that of another began, it arrives first. Of two that were
sent at the same time, by two threads, either may: small frames pass between the chunks of large ones, and large
ones take turns. So an answer, a cancellation or a release never overtakes what its own thread sent before.

Invariant: whatever the split of the stream, the same frames come out; a buffer of LARGE_BYTES or more is received
straight into the memory that ``allocate`` gave for it, never through a joined ``bytes``.

Over 400 lines, because writer and reader of one layout are checked against each other, on one page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, TypeAlias

import msgspec

from farcall.errors import NetworkError
from farcall.ids import RefId

MAGIC = b"fc"
VERSION = 1
HEADER = Struct("<2sBBIQQIIII")
BUFFER_ENTRY = Struct("<QQQ")

FIRST_STAGING_BYTES = 16 * 1024
STAGING_BYTES = 256 * 1024
LARGE_BYTES = 64 * 1024
"""Pieces of at least this size are sent and received without being joined to others."""
MAX_FUNCTION_BYTES = 64 * 1024
MAX_NOTES_BYTES = 16 * 1024 * 1024
MAX_BUFFERS = 16 * 1024 * 1024
MAX_PART_BYTES = 1 << 46
STEP_BYTES = 1 << 20
"""Memory for larger payloads is taken as their bytes arrive: an announcement alone costs no more than this."""


class Kind(IntEnum):
    """What a frame is; the receiver dispatches on it."""

    REQUEST = 1
    RESPONSE = 2
    FAILURE = 3
    CONTROL = 4
    LETTER = 5


REQUEST = int(Kind.REQUEST)
RESPONSE = int(Kind.RESPONSE)
FAILURE = int(Kind.FAILURE)
CONTROL = int(Kind.CONTROL)
LETTER = int(Kind.LETTER)

CHUNK = 6
"""The kind of a frame that is no message but a part of one."""
ABANDONED = 1 << 31
"""The flag of a chunk without bytes: the rest of the message in its slot does not come."""
MAX_SLOTS = 16
BETWEEN_CHUNKS_BYTES = 4 * 1024
"""How much is read at a time where a chunk's header is expected: what follows it belongs elsewhere, uncopied."""


CARRIES_DESCRIPTOR = 1
"""The flag of a control frame with whose first byte a descriptor comes."""
YOURS = 1 << 63
"""Set in a ticket's segment id: the segment is the receiver's own."""
SHARED = 1 << 62
"""Set in a ticket's segment id: the sender goes on using the bytes."""


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """Where a buffer lies in a shared segment, normally of the sender."""

    size_bytes: int
    segment_id: int
    offset: int


Piece: TypeAlias = bytes | memoryview


class Frame(msgspec.Struct):
    """One message, at its sender and at its receiver. The first seven fields are on the wire, the others are not.

    A struct costs 53 ns to make, a tuple 30; but attributes are quicker to read than indices.
    """

    kind: int
    flags: int = 0
    call_id: int = 0
    function: bytes = b""
    notes: bytes = b""
    payload: bytes | memoryview = b""
    buffers: list[Any] | tuple[()] = ()
    """A memoryview each; a `Ticket` stands for one in shared memory until its receiver has looked that up."""

    forks: list[Any] | tuple[()] = ()
    """References in the payload: at the sender the forks that the notes name, at the receiver what became of them."""
    undo: Sequence[Callable[[], None]] = ()
    """At the sender: takes back what writing the payload changed, if the frame is not sent after all."""
    recording: Any = None
    """The distributed autograd context of this message."""
    message_id: int = 0
    """Names the payload's tensors within that context; 0: no gradient comes back for them."""
    profile: Any = None
    """At the receiver of a request: what its caller, being profiled, wants to know."""
    telemetry: dict[str, str] | None = None
    """At the sender of a request: OpenTelemetry's context of the caller, if its user has opted into that."""
    scope: Any = None
    """At the receiver of a request: what the calls of its function inherit, a deadline and metadata; None: nothing."""
    serial: RefId | None = None
    """Of a request: the object whose calls run one at a time."""
    turns: Any = None
    """At the receiver of such a request: that object's mailbox."""
    handed_over: bool = False
    """Did a link take it? From then on only an error that says so means that it was not sent."""

    @property
    def size_bytes(self) -> int:
        """What its payload and its buffers hold; not for one with tickets."""
        size_bytes = len(self.payload)
        for buffer in self.buffers:
            size_bytes += buffer.nbytes
        return size_bytes


Allocate: TypeAlias = Callable[[int], memoryview]


class FrameError(NetworkError):
    """The peer sent something that is not a frame: the connection cannot go on."""


def allocate_plainly(size_bytes: int) -> memoryview:
    """Memory for one received buffer, where nothing better was given."""
    return memoryview(bytearray(size_bytes))


def encode_small(kind: int, flags: int, call_id: int, function: bytes, notes: bytes, payload: bytes) -> bytes:
    """One frame without buffers, as one ``bytes``: the hot path."""
    return (
        HEADER.pack(MAGIC, VERSION, kind, flags, call_id, len(payload), len(function), len(notes), 0, 0)
        + function
        + notes
        + payload
    )


def encode_frame(
    kind: int,
    flags: int,
    call_id: int,
    function: bytes,
    notes: bytes,
    payload: Piece,
    buffers: Sequence[memoryview | Ticket],
) -> list[Piece]:
    """One frame as pieces to be sent in order. Small neighbours are joined, large ones stay where they are."""
    head: list[Piece] = [
        HEADER.pack(MAGIC, VERSION, kind, flags, call_id, len(payload), len(function), len(notes), len(buffers), 0)
    ]
    inline: list[Piece] = [payload]
    for buffer in buffers:
        if isinstance(buffer, Ticket):
            head.append(BUFFER_ENTRY.pack(buffer.size_bytes, buffer.segment_id, buffer.offset))
        else:
            head.append(BUFFER_ENTRY.pack(buffer.nbytes, 0, 0))
            inline.append(buffer)
    head.append(function)
    head.append(notes)
    pieces: list[Piece] = []
    small: list[Piece] = head
    for part in inline:
        if len(part) >= LARGE_BYTES:
            if small:
                pieces.append(b"".join(small))
                small = []
            pieces.append(part)
        else:
            small.append(part)
    if small:
        pieces.append(b"".join(small))
    return pieces


class FrameDecoder:
    """Incremental decoder. Receive into ``writable()``, then tell ``received(count)``.

    state      waits for                                   leaves when
    staging    a whole head (header, table, small parts)   the head is complete
    filling    the rest of one large part                  that part is complete: the next part, or staging
    in chunk   the rest of one chunk                       that chunk is complete: staging

    Each message that comes in chunks has a decoder of its own, which a chunk's bytes go to.
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
        "uncounted",
    )

    def __init__(self, allocate: Allocate = allocate_plainly, *, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._assemblies: dict[int, FrameDecoder] = {}  # by slot
        self._chunk: int | None = None  # the slot whose chunk is being received
        self._chunk_left = 0
        self._chunk_skip = 0  # of these, so many came over an earlier connection
        self._taken = 0  # as the decoder of one message: how much of it has come
        self._room = STAGING_BYTES
        self.uncounted: int = 0
        """Frames of the link that came beyond those returned: chunks do not return one each. The reader resets it."""
        self._staging = bytearray(FIRST_STAGING_BYTES)
        self._view = memoryview(self._staging)
        self._start = 0
        self._end = 0
        self._allocate = allocate
        self._frame: _PartialFrame | None = None
        self._fill_view: memoryview | None = None
        self._filled = 0

    def writable(self) -> memoryview:
        """Where the next received bytes belong. Never empty."""
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
        """Take note of ``count`` bytes written into the last ``writable()``; return the frames now complete."""
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
            frames.append(done)
        staging, view = self._staging, self._view
        unpack_header = HEADER.unpack_from
        while True:
            start = self._start
            if self._end - start < 40:
                break
            (magic, version, kind, flags, call_id, payload_len, function_len, notes_len, buffer_count, _) = (
                unpack_header(staging, start)
            )
            if magic != MAGIC or version != VERSION or not REQUEST <= kind <= LETTER:
                if magic == MAGIC and version == VERSION and kind == CHUNK:
                    self._start += 40
                    frames += self._begin_chunk(flags, call_id, payload_len)
                    if self._chunk is not None:
                        break
                    continue
                raise FrameError(
                    f"the peer sent {bytes(staging[start : start + 8])!r}, which is not the start of a frame"
                )
            after_table = start + 40 + 24 * buffer_count
            if after_table <= self._end:
                # Most frames are here as a whole, and need no account of their parts.
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
                            break  # it is to be read into memory of its own, or is not here yet
                        buffers.append(memoryview(staging[end : end + size]))
                        end += size
                if len(buffers) == buffer_count and end <= self._end:
                    self._start = end
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
                    break  # the rest fits in here, too, and comes with the next read
            if function_len > MAX_FUNCTION_BYTES or notes_len > MAX_NOTES_BYTES or buffer_count > MAX_BUFFERS:
                raise FrameError("the peer sent a frame whose parts are larger than any real one")
            if payload_len > MAX_PART_BYTES:
                raise FrameError(f"the peer announced a payload of {payload_len} bytes")
            partial = _PartialFrame(kind, flags, call_id, payload_len, function_len, notes_len, buffer_count)
            self._start += 40
            done = self._go_on(partial)
            if done is None:
                self._frame = partial
                break
            frames.append(done)
        return frames

    # ------------------------------------------------------------------ messages in chunks

    def restart(self) -> None:
        """Another connection follows: the frame that is incomplete comes again, messages in chunks go on."""
        self._start = self._end = 0
        self._frame = self._fill_view = self._chunk = None

    def _begin_chunk(self, flags: int, offset: int, size: int) -> list[Frame]:
        """The header of a chunk was read: take what is here of its bytes."""
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
        # A chunk that came in part before the connection broke comes again as a whole.
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
        """The next bytes of the chunk go where its message wants them."""
        assert self._chunk is not None
        if self._chunk_skip:
            self._fill_view = memoryview(bytearray(min(self._chunk_skip, STAGING_BYTES)))
        else:
            self._fill_view = self._assemblies[self._chunk].writable()[: self._chunk_left]
        self._filled = 0

    def _take_chunk(self, count: int) -> list[Frame]:
        """Take note of ``count`` bytes of the chunk."""
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
            self.uncounted -= 1
        if self._chunk_left:
            self._offer_chunk_room()
        else:
            self._end_chunk()
        return frames

    def _end_chunk(self) -> None:
        self._chunk = self._fill_view = None
        self.uncounted += 1
        self._room = BETWEEN_CHUNKS_BYTES if self._assemblies else STAGING_BYTES

    # ------------------------------------------------------------------ parts

    def _stage_more(self) -> None:
        """A read took all the room there was: from now on there is more. Most links of a large group never get here."""
        staging = bytearray(STAGING_BYTES)
        staging[: self._end] = self._view
        self._staging = staging
        self._view = memoryview(staging)

    def _go_on(self, frame: _PartialFrame) -> Frame | None:
        """Complete as many parts of ``frame`` as the bytes at hand allow."""
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
                # The part is not here yet (or is large): give it memory of its own, and read the rest straight into it.
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
            # What ``allocate`` gives costs nothing until it is written to; a bytearray is zeroed at once.
            return self._allocate(size) if out_of_band else allocate_plainly(min(size, STEP_BYTES))
        except (MemoryError, OSError, OverflowError) as error:
            raise FrameError(f"there is no memory for {size} bytes that the peer announced") from error

    def _grown(self, part: memoryview, size: int) -> memoryview:
        """More memory, with what ``part`` has of the whole; filling goes on behind that."""
        try:
            larger = allocate_plainly(min(size, 4 * len(part)))
        except MemoryError as error:
            raise FrameError(f"there is no memory for {size} bytes that the peer announced") from error
        larger[: len(part)] = part
        self._filled = len(part)
        return larger


class _PartialFrame:
    """A frame some of whose parts have arrived: table, function, notes, payload, then inline buffers."""

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
        """Accept the next complete part; the buffer table tells which inline buffers follow."""
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
        """The whole frame, inline buffers put back in their places."""
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
