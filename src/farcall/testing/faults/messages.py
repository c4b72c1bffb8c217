"""Messages on their way, as rules see them: whole frames cut out of a stream of bytes, or messages to oneself.

A message has the name of its frame's kind and one or more of its own; a rule that gives any of them means it.

    frame      further names
    request    "call", "create" (of a reference, by `remote`), "fetch" (of its value, by `to_here`)
    response, failure
    letter     "Gradient", and the class of each message in it: "StartPass", "PassDone", "PassFailed", "AbortPass",
               "ReleaseContext"
    control    the class of the message, of `protocol/messages.py` or `protocol/references`: "CallCancelled", "Release"

Messages about shared memory have no name: both ends count descriptors and leases, so losing or repeating one would
corrupt memory, which no network does. Only faults of whole connections touch them.

A lost message must not take along its leases of shared memory, references and recorded gradients: both ends count
those, and over a real connection they never get lost alone. So its `remains` still arrive, as an answer to a call that
nobody makes. The receiver reads nothing, runs nothing, and gives up whatever came along.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from farcall.protocol import gradients, messages
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
    Kind,
    Ticket,
)
from farcall.protocol.notes import KEEP, decode_notes, without_creation
from farcall.protocol.session import remains_of
from farcall.rpc import owner_methods
from farcall.serialize import encode_function

__all__ = ["CALLS", "KINDS", "Message", "OwnMessage", "Packet", "Splitter", "check_kinds"]

_FETCH: Final = encode_function(owner_methods.fetch)
_MEMORY: Final = (
    messages.SegmentOffered,
    messages.SegmentAccepted,
    messages.SegmentRefused,
    messages.SegmentRetired,
    messages.BlocksReleased,
)
CALLS: Final = frozenset({"request", "response", "failure"})
"""The kinds of a rule that gives none: messages of the user's calls."""

_FRAMES: Final = {int(kind): kind.name.lower() for kind in Kind}
_REQUESTS: Final = frozenset({"call", "create", "fetch"})
_LETTERS: Final = frozenset(kind.__name__ for kind in typing.get_args(gradients.Message)) | {"Gradient"}
_MEMORY_NAMES: Final = frozenset(kind.__name__ for kind in _MEMORY)
_CONTROLS: Final = frozenset(kind.__name__ for kind in typing.get_args(messages.Message)) - _MEMORY_NAMES
KINDS: Final = frozenset(_FRAMES.values()) | _REQUESTS | _LETTERS | _CONTROLS
"""Every name that a rule may give."""

NO_CALL: Final = 0
"""The number of a call that is never made."""

_steering = msgspec.msgpack.Decoder()


def check_kinds(kinds: str | Iterable[str] | None) -> frozenset[str]:
    """The kinds of a rule, checked; None means the messages of calls."""
    if kinds is None:
        return CALLS
    given = frozenset({kinds} if isinstance(kinds, str) else kinds)
    if not given:
        raise ValueError("kind names no message at all: leave it out to mean those of calls")
    if memory := given & _MEMORY_NAMES:
        raise ValueError(
            f"{', '.join(sorted(memory))}: messages about shared memory cannot be lost or repeated without corrupting "
            "memory; cut the connection instead, or give the workers shared_memory=False"
        )
    if unknown := given - KINDS:
        raise ValueError(
            f"there is no message called {', '.join(sorted(unknown))}; there are {', '.join(sorted(KINDS))}"
        )
    return given


def names_of(kind: int, flags: int, function: bytes, payload: bytes | memoryview) -> frozenset[str]:
    """The names of a frame's message; no name at all: rules must leave it alone."""
    frame = _FRAMES[kind]
    if kind == REQUEST:
        return frozenset({frame, "create" if flags & KEEP else "fetch" if function == _FETCH else "call"})
    if kind == LETTER:
        # A letter with gradients is pickled, and a tool that looks on must not unpickle anything.
        inside = ["Gradient"] if flags else [letter["type"] for letter in _steering.decode(payload)]
        return frozenset({frame, *inside})
    if kind == CONTROL:
        message = messages.decode_message(payload)
        return frozenset() if isinstance(message, _MEMORY) else frozenset({frame, type(message).__name__})
    return frozenset({frame})


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
        """Whether it may arrive twice."""


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
        self.carries_descriptor: bool = (
            kind == CONTROL and not self.names and isinstance(messages.decode_message(payload), messages.SegmentOffered)
        )
        self.descriptors: list[int] = []

    @property
    def repeatable(self) -> bool:
        # The receiver would return one lease twice, or answer for the same tensors twice in a backward pass.
        return not self.tickets and not _is_recorded(self.notes)

    def remains(self) -> Packet | None:
        """The frame that arrives in the place of a lost one: always one, since both ends count frames."""
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
        # The first reader empties the list of buffers; Packet explains the other condition.
        return not self.message.buffers and not _is_recorded(self.notes)

    def remains(self) -> OwnMessage | None:
        notes = without_creation(self.notes)
        return OwnMessage(Frame(RESPONSE, 0, NO_CALL, notes=notes)) if notes else None


def _is_recorded(notes: bytes) -> bool:
    """Whether distributed autograd expects gradients for tensors of the message."""
    return bool(notes) and decode_notes(notes).message_id != 0


class Splitter:
    """The frames in a stream of bytes.

    Reads the head of each and copies the rest, so that a frame passes unchanged, and whole or not at all.
    """

    __slots__ = ("_buffer", "_needed")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = HEADER.size

    def feed(self, chunk: bytes | memoryview) -> list[Packet]:
        """Take bytes; return the frames that are complete now."""
        self._buffer += chunk
        packets = []
        while len(self._buffer) >= self._needed:
            packet = self._next()
            if packet is not None:
                packets.append(packet)
        return packets

    def _next(self) -> Packet | None:
        """The first frame of the buffer; None if it is incomplete: ``_needed`` bytes tell more."""
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
