"""The wire layout, and the encoding of one message. The core decodes it (`core/frames.py`).

No socket, thread, clock or torch. All integers are little-endian.

    offset  size  field
    0       2     magic, b"fc"
    2       1     version of this layout
    3       1     kind: 1 request, 2 response, 3 failure, 4 control, 5 letter; the core's own: 6 chunk,
                  7 acknowledgement, 8 cancellation
    4       4     flags (see notes.py; 0 for most; of a control frame: 1 if a descriptor rides along)
    8       8     call id (0 for control; of a letter, the number of its subject)
    16      8     payload length
    24      4     function length (requests only), at most 4096
    28      4     notes length (what rides along, see notes.py)
    32      4     number of buffers
    36      4     number: how many frames came before over this link, the low 32 bits
    40      24*n  buffer table: length (8), segment (8), offset (8); segment 0 means inline, the highest bit that it
                  is a segment of the receiver, which gets back a block that it had lent; the next one that
                  the sender goes on using these bytes
    ...           function, notes, payload, then every inline buffer in order

Both ends handle a message as a `Frame`: the writer fills one in, the dispatcher makes one, and handlers read its
fields.

A large message travels in chunks, and other frames pass between them. A chunk has the same header, with other
contents: the flags hold a slot, which distinguishes the messages in progress; the call id is the offset of the chunk's
bytes within the message; the payload length is their number. The first chunk of a message begins with the message's
own header. The flag ABANDONED says instead that no more of the message comes. The receiver reassembles at most
MAX_SLOTS messages at a time. Each chunk is a frame of the link and has a number; in the message's own header it is 0.

A frame gets its number when it leaves, also when it leaves again (`core/session.py`). Another one than expected ends the
link: so a slip at either end, which loses or repeats a frame, can never run a request twice.

The order of frames: a frame whose sending ended before that of another began arrives first. Of two frames that two
threads send at the same time, either may be first: small frames pass between the chunks of large ones, and large
ones take turns. So an answer, a cancellation or a release never overtakes an earlier frame of its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, TypeAlias

import msgspec

from farcall.ids import RefId
from farcall.protocol.compiled import library

MAGIC = b"fc"
VERSION = 3
HEADER = Struct("<2sBBIQQIIII")
BUFFER_ENTRY = Struct("<QQQ")

MAX_FUNCTION_BYTES = 4096
"""A function's name: receivers keep some of those that senders choose. `_frames.c` has the number, too."""
LARGE_BYTES = 64 * 1024
"""Pieces of at least this size are sent and received without being joined to others."""


# The kinds. Plain ints: an enum's members are slower to compare, on the path of every call.
REQUEST = 1
RESPONSE = 2
FAILURE = 3
CONTROL = 4
LETTER = 5

YOURS = 1 << 63
"""Set in a ticket's segment id: the segment is the receiver's own."""
SHARED = 1 << 62
"""Set in a ticket's segment id: the sender goes on using the bytes."""


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """The location of a buffer in a shared segment, normally the sender's."""

    size_bytes: int
    segment_id: int
    offset: int


Piece: TypeAlias = bytes | memoryview


class Frame(msgspec.Struct):
    """One message, at its sender and at its receiver. Only the first seven fields are on the wire.

    A struct takes 53 ns to make, a tuple 30; but attributes are quicker to read than indices.
    """

    kind: int
    flags: int = 0
    call_id: int = 0
    function: bytes = b""
    notes: bytes = b""
    payload: bytes | memoryview = b""
    buffers: list[Any] | tuple[()] = ()
    """Memoryviews; a `Ticket` stands for a buffer in shared memory until the receiver has resolved it."""

    forks: list[Any] | tuple[()] = ()
    """References in the payload: at the sender the forks named in the notes, at the receiver the outcome of each."""
    undo: Sequence[Callable[[], None]] = ()
    """At the sender: undoes the side effects of writing the payload, if the frame is not sent after all."""
    recording: Any = None
    """The distributed autograd context of this message."""
    message_id: int = 0
    """Names the payload's tensors within that context; 0: no gradient comes back for them."""
    profile: Any = None
    """At the receiver of a request: the `ProfileWanted` of a profiled caller."""
    telemetry: dict[str, str] | None = None
    """At the sender of a request: OpenTelemetry's context of the caller, if its user has opted into that."""
    scope: Any = None
    """At the receiver of a request: the deadline and metadata that its function's own calls inherit; None: nothing."""
    serial: RefId | None = None
    """Of a request: the object whose calls run one at a time."""
    code: Any = None
    """At the receiver of a request for a function by value: its `LoadedUnit`, or why there is none."""
    turns: Any = None
    """At the receiver of such a request: that object's mailbox."""
    marked: bool = False
    """At the sender: is it handled in order with the other marked frames of its link?"""
    handed_over: bool = False
    """Did a link take the frame? From then on only an error with ``Delivery.NOT_SENT`` proves that it was not sent."""

    @property
    def size_bytes(self) -> int:
        """The size of payload and buffers; not for a frame with tickets."""
        size_bytes = len(self.payload)
        for buffer in self.buffers:
            size_bytes += buffer.nbytes
        return size_bytes


def encode_small_in_python(kind: int, flags: int, call_id: int, function: bytes, notes: bytes, payload: bytes) -> bytes:
    """See `encode_small`."""
    return (
        HEADER.pack(MAGIC, VERSION, kind, flags, call_id, len(payload), len(function), len(notes), 0, 0)
        + function
        + notes
        + payload
    )


encode_small: Callable[[int, int, int, bytes, bytes, bytes], bytes] = (
    encode_small_in_python if library is None else library.encode_small
)
"""``encode_small(kind, flags, call_id, function, notes, payload)``: a frame without buffers as one ``bytes``."""


def encode_frame(
    kind: int,
    flags: int,
    call_id: int,
    function: bytes,
    notes: bytes,
    payload: Piece,
    buffers: Sequence[memoryview | Ticket],
) -> list[Piece]:
    """Encode a frame as pieces to be sent in order. Small neighbours are joined; large parts are not copied."""
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
