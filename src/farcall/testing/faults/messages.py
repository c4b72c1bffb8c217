"""Messages in transit, as rules see them: whole frames cut out of a stream of bytes, or a node's messages to itself.

A message has the name of its frame's kind and further names of its own; a rule that gives any of them matches it.

    frame      further names
    request    "call", "create" (of a reference, by `remote`), "fetch" (of its value, by `to_here`)
    response, failure
    letter     "Gradient", and the class of each message in it: "StartPass", "PassDone", "PassFailed", "AbortPass",
               "ReleaseContext"; "Part", of a stream
    control    the class of the message, of `protocol/messages.py` or `protocol/references`: "CallCancelled", "Release"

Messages about shared memory have no name: both ends count descriptors and leases, so a lost or repeated one would
corrupt memory, which no network does. Only faults of whole connections affect them. A chunk of a large message has no
name either: while there are rules about messages, large messages are sent whole.

A lost message must not lose its leases of shared memory, references and recorded gradients: both ends count those, and
a real connection never loses them alone. So its `remains` still arrive, as an answer to a call that nobody made. The
receiver reads nothing, runs nothing, and releases whatever came along. Likewise it would end a link whose frames have
other numbers than it expects: so each frame gets its number anew, in the order in which they leave.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Final

import msgspec

from farcall.protocol import gradients, messages
from farcall.protocol.frame_decoder import FrameError
from farcall.protocol.frames import (
    BUFFER_ENTRY,
    CHUNK,
    CONTROL,
    FAILURE,
    HEADER,
    LETTER,
    MAGIC,
    REQUEST,
    RESPONSE,
    VERSION,
    Frame,
    Ticket,
)
from farcall.protocol.notes import KEEP, decode_notes, without_creation
from farcall.protocol.session import remains_of
from farcall.rpc import owned_values
from farcall.rpc.stream_writing import STREAMS
from farcall.serialize import encode_function

_FETCH: Final = encode_function(owned_values.fetch)
_MEMORY: Final = (
    messages.SegmentOffered,
    messages.SegmentAccepted,
    messages.SegmentRefused,
    messages.SegmentRetired,
    messages.BlocksReleased,
)
CALLS: Final = frozenset({"request", "response", "failure"})
"""The default kinds of a rule: messages of the user's calls."""

_FRAMES: Final = {REQUEST: "request", RESPONSE: "response", FAILURE: "failure", CONTROL: "control", LETTER: "letter"}
_REQUESTS: Final = frozenset({"call", "create", "fetch"})
_LETTERS: Final = frozenset(kind.__name__ for kind in typing.get_args(gradients.Message)) | {"Gradient", "Part"}
_MEMORY_NAMES: Final = frozenset(kind.__name__ for kind in _MEMORY)
_CONTROLS: Final = frozenset(kind.__name__ for kind in typing.get_args(messages.Message)) - _MEMORY_NAMES
KINDS: Final = frozenset(_FRAMES.values()) | _REQUESTS | _LETTERS | _CONTROLS
"""Every name that a rule may give."""

NO_CALL: Final = 0
"""The number of a call that is never made."""

_steering = msgspec.msgpack.Decoder()


def check_kinds(kinds: str | Iterable[str] | None) -> frozenset[str]:
    """Validate the kinds of a rule; None means the messages of calls."""
    if kinds is None:
        return CALLS
    given = frozenset({kinds} if isinstance(kinds, str) else kinds)
    if not given:
        raise ValueError("kind is empty: leave it out for the messages of calls")
    if memory := given & _MEMORY_NAMES:
        raise ValueError(
            f"{', '.join(sorted(memory))}: messages about shared memory cannot be lost or repeated without corrupting "
            "memory; cut the connection instead, or give the workers shared_memory=False"
        )
    if unknown := given - KINDS:
        raise ValueError(f"unknown messages: {', '.join(sorted(unknown))}; choose from {', '.join(sorted(KINDS))}")
    return given


class Message:
    """A message in transit: a frame of a connection, or a message of a node to itself."""

    __slots__ = ("data", "descriptors", "frame", "names")

    def __init__(self, frame: Frame, data: bytes = b"") -> None:
        self.frame: Frame = frame
        """For a frame of a connection, its ``buffers`` hold only the tickets."""
        self.data: bytes = data
        """The whole frame as bytes; empty for a message to the node itself, which is never encoded."""
        self.descriptors: list[int] = []
        self.names: frozenset[str] = _names_of(frame)

    @property
    def number(self) -> int:
        """The number of this frame of a connection, as its sender counts."""
        return int(HEADER.unpack_from(self.data)[-1])

    @property
    def carries_descriptor(self) -> bool:
        """Does a descriptor ride along? Only with an offer of memory."""
        if self.names or self.frame.kind != CONTROL:
            return False
        return isinstance(messages.decode_message(self.frame.payload), messages.SegmentOffered)

    @property
    def repeatable(self) -> bool:
        """May it arrive twice?"""
        # Not with buffers or recorded tensors: the receiver would return one lease twice, or answer for the same
        # tensors twice in a backward pass; and the first reader of a message to the node itself empties its buffers.
        notes = self.frame.notes
        return not self.frame.buffers and not (notes and decode_notes(notes).message_id != 0)

    def remains(self) -> Message | None:
        """The message that arrives in place of this one, if it is lost."""
        frame = Frame(RESPONSE, 0, NO_CALL, notes=without_creation(self.frame.notes))
        if not self.data:
            return Message(frame) if frame.notes else None
        frame.buffers = self.frame.buffers
        return Message(frame, remains_of(self.frame.notes, self.frame.buffers))  # always: both ends count frames


def _names_of(message: Frame) -> frozenset[str]:
    """The names of a message; none at all if rules must leave it alone."""
    if message.kind == CHUNK:
        return frozenset()
    kind = _FRAMES[message.kind]
    if message.kind == REQUEST:
        narrower = "create" if message.flags & KEEP else "fetch" if message.function == _FETCH else "call"
        return frozenset({kind, narrower})
    if message.kind == LETTER and message.call_id == STREAMS:
        return frozenset({kind, "Part"})
    if message.kind == LETTER:
        # A letter with gradients is pickled, and an interceptor must not unpickle anything.
        inside = ["Gradient"] if message.flags else [letter["type"] for letter in _steering.decode(message.payload)]
        return frozenset({kind, *inside})
    if message.kind == CONTROL:
        control = messages.decode_message(message.payload)
        return frozenset() if isinstance(control, _MEMORY) else frozenset({kind, type(control).__name__})
    return frozenset({kind})


class Splitter:
    """Splits a stream of bytes into frames. Mutable: the bytes of the incomplete frame.

    Reads the head of each frame and copies the rest, so that a frame passes unchanged, and whole or not at all.
    """

    __slots__ = ("_buffer", "_needed")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = HEADER.size

    def feed(self, chunk: bytes | memoryview) -> list[Message]:
        """Take bytes; return the frames that they complete."""
        self._buffer += chunk
        found = []
        while len(self._buffer) >= self._needed:
            message = self._next()
            if message is not None:
                found.append(message)
        return found

    def _next(self) -> Message | None:
        """Take the first frame out of the buffer; None if it is incomplete: then wait for ``_needed`` bytes."""
        buffer = self._buffer
        magic, version, kind, flags, call_id, payload_len, function_len, notes_len, buffer_count, _ = (
            HEADER.unpack_from(buffer)
        )
        if magic != MAGIC or version != VERSION or not REQUEST <= kind <= CHUNK:
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
        frame = Frame(
            kind,
            flags,
            call_id,
            function=data[table_end:notes_at],
            notes=data[notes_at:payload_at],
            payload=memoryview(data)[payload_at : payload_at + payload_len],
            buffers=[Ticket(size, segment_id, offset) for size, segment_id, offset in entries if segment_id],
        )
        return Message(frame, data)
