"""Messages as they are seen on their way: whole frames cut out of a stream of bytes, or messages to oneself.

`Splitter` finds the frames in what a node writes. It reads the head of each and copies the rest, so a frame passes
unchanged, and goes on whole or not at all.

What a lost message carried must not be lost with it: leases of shared memory, references and recorded gradients are
counted by both ends, and over a real connection they never get lost alone. So a message is lost the way a late answer
is: what is left of it (`remains`) is an answer to a call that nobody makes. Its receiver reads nothing, runs
nothing, and gives up what came with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from farcall.protocol.frames import (
    BUFFER_ENTRY,
    CONTROL,
    HEADER,
    LETTER,
    MAGIC,
    REQUEST,
    RESPONSE,
    VERSION,
    Frame,
    FrameError,
    Ticket,
)
from farcall.protocol.notes import decode_notes, without_creation
from farcall.protocol.session import remains_of
from farcall.testing.faults.kinds import names_of, offers_segment

__all__ = ["Message", "OwnMessage", "Packet", "Splitter"]

NO_CALL = 0
"""The number of a call that is never made."""


class Message(Protocol):
    """A message on its way, as far as rules look at it."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def kind(self) -> int: ...

    @property
    def call_id(self) -> int: ...

    @property
    def function(self) -> bytes: ...

    @property
    def notes(self) -> bytes: ...

    @property
    def repeatable(self) -> bool:
        """May it arrive twice?"""


class Packet:
    """One frame, as bytes, with the descriptors that ride along."""

    __slots__ = (
        "call_id",
        "carries_descriptor",
        "data",
        "descriptors",
        "function",
        "kind",
        "names",
        "notes",
        "tickets",
    )

    def __init__(
        self,
        data: bytes,
        kind: int,
        flags: int,
        call_id: int,
        function: bytes,
        notes: bytes,
        payload: memoryview,
        tickets: Sequence[Ticket],
    ) -> None:
        self.data: bytes = data
        self.kind: int = kind
        self.call_id: int = call_id
        self.function: bytes = function
        self.notes: bytes = notes
        self.tickets: Sequence[Ticket] = tickets
        self.names: frozenset[str] = names_of(kind, flags, function, payload)
        self.carries_descriptor: bool = kind == CONTROL and not self.names and offers_segment(payload)
        self.descriptors: list[int] = []

    @property
    def repeatable(self) -> bool:
        # Its receiver would give the same lease back twice, or answer for the same tensors twice in a backward pass.
        return not self.tickets and not _is_recorded(self.notes)

    def remains(self) -> Packet | None:
        """What still has to arrive if the message itself does not: something always, as both ends count frames."""
        notes = without_creation(self.notes)
        data = remains_of(self.notes, self.tickets)
        return Packet(data, RESPONSE, 0, NO_CALL, b"", notes, memoryview(b""), self.tickets)


class OwnMessage:
    """A message of a node to itself; no frame is ever made of it."""

    __slots__ = ("function", "kind", "message", "names")

    def __init__(self, message: Frame) -> None:
        self.message: Frame = message
        self.kind: int = message.kind
        self.function: bytes = message.function
        self.names: frozenset[str] = names_of(message.kind, message.flags, message.function, message.payload)

    @property
    def call_id(self) -> int:
        return self.message.call_id

    @property
    def notes(self) -> bytes:
        return self.message.notes

    @property
    def repeatable(self) -> bool:
        # The first reader empties the list of buffers; for the other condition see Packet.
        return not self.message.buffers and not _is_recorded(self.notes)

    def remains(self) -> OwnMessage | None:
        notes = without_creation(self.notes)
        return OwnMessage(Frame(RESPONSE, 0, NO_CALL, notes=notes)) if notes else None


def _is_recorded(notes: bytes) -> bool:
    """Does distributed autograd expect gradients for what is in the message?"""
    return bool(notes) and decode_notes(notes).message_id != 0


class Splitter:
    """Cuts a stream of bytes into its frames."""

    __slots__ = ("_buffer", "_needed")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = HEADER.size

    def feed(self, chunk: bytes | memoryview) -> list[Packet]:
        """Take bytes; the frames that are complete now."""
        self._buffer += chunk
        packets = []
        while len(self._buffer) >= self._needed:
            packet = self._next()
            if packet is not None:
                packets.append(packet)
        return packets

    def _next(self) -> Packet | None:
        """The frame at the beginning, or None; then ``_needed`` says how much of it must be there to say more."""
        buffer = self._buffer
        magic, version, kind, flags, call_id, payload_len, function_len, notes_len, buffer_count, _ = (
            HEADER.unpack_from(buffer)
        )
        if magic != MAGIC or version != VERSION or not REQUEST <= kind <= LETTER:
            raise FrameError(f"{bytes(buffer[:8])!r} starts no frame")
        table_end = HEADER.size + buffer_count * BUFFER_ENTRY.size
        if len(buffer) < table_end:
            self._needed = table_end
            return None
        entries = list(BUFFER_ENTRY.iter_unpack(buffer[HEADER.size : table_end]))
        inline_len = sum(size for size, segment_id, _ in entries if not segment_id)
        end = table_end + function_len + notes_len + payload_len + inline_len
        if len(buffer) < end:
            self._needed = end
            return None
        self._needed = HEADER.size
        data = bytes(buffer[:end])
        del buffer[:end]
        notes_at = table_end + function_len
        payload_at = notes_at + notes_len
        return Packet(
            data,
            kind,
            flags,
            call_id,
            data[table_end:notes_at],
            data[notes_at:payload_at],
            memoryview(data)[payload_at : payload_at + payload_len],
            [Ticket(size, segment_id, offset) for size, segment_id, offset in entries if segment_id],
        )
