"""Messages in transit, as rules see them: whole frames cut out of a stream of bytes.

A message has the name of its frame's kind and further names of its own; a rule that gives any of them matches it.

    frame      further names
    request    "call", "create" (of a reference, by `remote`), "fetch" (of its value, by `to_here`)
    response, failure
    letter     "Gradient", and the class of each message in it: "StartPass", "PassDone", "PassFailed", "AbortPass",
               "ReleaseContext"; "Part", of a stream
    control    the class of the message, of `protocol/messages.py` or `protocol/references`: "Release";
               "CallCancelled", the core's own

Messages about shared memory have no name: both ends count descriptors and leases, so a lost or repeated one would
corrupt memory, which no network does. Only faults of whole connections affect them. Acknowledgements have none either.

A large message comes in chunks. While there are rules about messages it is put together, and leaves as one chunk, in
the place of its last; in the places of the others leave frames without meaning, since both ends count frames. What came
behind its first chunk waits for its last one: so frames keep their places, and a connection may break between any two.

A lost message must not lose its leases of shared memory, references and recorded gradients: both ends count those, and
a real connection never loses them alone. So its `remains` still arrive, as an answer to a call that nobody made. The
receiver reads nothing, runs nothing, and releases whatever came along. Likewise it would end a link whose frames have
other numbers than it expects: so each frame gets its number anew, in the order in which they leave.
"""

from __future__ import annotations

import typing
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from farcall.core.contract import ACKNOWLEDGE, CANCEL, CARRIES, CHUNK
from farcall.core.frames import ABANDONED, CALL_AT, bare_frame, with_number
from farcall.protocol import gradients, messages
from farcall.protocol.frames import (
    BUFFER_ENTRY,
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
from farcall.rpc import owned_values
from farcall.rpc.stream_writing import STREAMS
from farcall.runtime.link.resend import remains_of
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
_CANCELLED: Final = "CallCancelled"
_REQUESTS: Final = frozenset({"call", "create", "fetch"})
_LETTERS: Final = frozenset(kind.__name__ for kind in typing.get_args(gradients.Message)) | {"Gradient", "Part"}
_MEMORY_NAMES: Final = frozenset(kind.__name__ for kind in _MEMORY)
_CONTROLS: Final = frozenset(kind.__name__ for kind in typing.get_args(messages.Message)) - _MEMORY_NAMES | {_CANCELLED}
KINDS: Final = frozenset(_FRAMES.values()) | _REQUESTS | _LETTERS | _CONTROLS
"""Every name that a rule may give."""

KIND_AT: Final = 3
NO_CALL: Final = 0
"""The number of a call that is never made."""

FLAGS: Final = (1 << 24) - 1
"""Those of a frame that are not the core's."""

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


class SplitError(ValueError):
    """These bytes are no frames."""


class Message:
    """A message in transit: a frame of a connection."""

    __slots__ = ("carries_descriptor", "data", "descriptors", "frame", "is_part", "names", "number")

    def __init__(self, frame: Frame, data: bytes = b"", number: int = 0) -> None:
        self.frame: Frame = frame
        """Its ``buffers`` hold only the tickets."""
        self.data: bytes = data
        """The whole frame as bytes."""
        self.number: int = number
        """The number of this frame of a connection, as its sender counts."""
        self.descriptors: list[int] = []
        self.carries_descriptor: bool = bool(frame.kind == CONTROL and frame.flags & CARRIES)
        """Does a descriptor ride along? Only with an offer of memory."""
        self.is_part: bool = False
        """Is it a part of a large message whose last part has not come?"""
        frame.flags &= FLAGS
        self.names: frozenset[str] = _names_of(frame)

    @property
    def repeatable(self) -> bool:
        """May it arrive twice?"""
        # Not with leases or recorded tensors: the receiver would return one lease twice, or answer for the same tensors
        # twice in a backward pass.
        notes = self.frame.notes
        return not self.frame.buffers and not (notes and decode_notes(notes).message_id != 0)

    def copy(self, number: int) -> Message:
        """The same once more. A request is a call of its own, which nobody waits for, or its callee would take it for
        the one that it has."""
        if self.frame.kind != REQUEST:
            return self
        at = CALL_AT + (HEADER.size if self.data[KIND_AT] == CHUNK else 0)
        call_id = (self.frame.call_id + (number << 48)).to_bytes(8, "little")
        return Message(self.frame, self.data[:at] + call_id + self.data[at + 8 :], self.number)

    def remains(self) -> Message:
        """The message that arrives in place of this one, if it is lost: always one, since both ends count frames."""
        notes, tickets = self.frame.notes, self.frame.buffers
        frame = Frame(RESPONSE, 0, NO_CALL, notes=without_creation(notes), buffers=tickets)
        return Message(frame, remains_of(notes, tickets))


def _names_of(message: Frame) -> frozenset[str]:
    """The names of a message; none at all if rules must leave it alone."""
    if message.kind in (CHUNK, ACKNOWLEDGE):
        return frozenset()
    if message.kind == CANCEL:
        return frozenset({"control", _CANCELLED})
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
    """Splits a stream of bytes into frames. Mutable: the bytes of the incomplete frame, and what waits for a chunk.

    Reads the head of each frame and copies the rest, so that a frame passes unchanged, and whole or not at all.
    """

    __slots__ = ("_buffer", "_inspects", "_large", "_line", "_needed")

    def __init__(self, inspects: Callable[[], bool] = lambda: True) -> None:
        """``inspects``: are there rules about messages, so that large ones are to be put together?"""
        self._buffer = bytearray()
        self._needed = HEADER.size
        self._inspects = inspects
        self._line: deque[Message] = deque()  # in order; at its front, a part of a large message that is not whole yet
        self._large: dict[int, tuple[bytearray, list[Message]]] = {}  # by slot: those, and their bytes

    def feed(self, chunk: bytes | memoryview) -> list[Message]:
        """Take bytes; return the frames that they complete."""
        self._buffer += chunk
        found = []
        while len(self._buffer) >= self._needed:
            size = _size_of(self._buffer)
            self._needed = abs(size)
            if len(self._buffer) < self._needed or size < 0:
                continue
            message = _message(bytes(self._buffer[:size]))
            del self._buffer[:size]
            self._needed = HEADER.size
            if message.frame.kind == CHUNK:
                self._on_chunk(message)
            self._line.append(message)
        while self._line and not self._line[0].is_part:
            found.append(self._line.popleft())
        return found

    def _on_chunk(self, chunk: Message) -> None:
        """Put a large message together, if its beginning was seen here."""
        _, _, _, flags, offset, size, *_ = HEADER.unpack_from(chunk.data)
        slot = flags & ~ABANDONED
        known = self._large.get(slot)
        if known is None:
            if flags & ABANDONED or offset or not self._inspects():
                return
            known = self._large[slot] = (bytearray(), [])
        data, parts = known
        if not flags & ABANDONED:
            if offset != len(data):
                raise SplitError(f"a chunk of {size} bytes at {offset} of a message that has {len(data)}")
            data += chunk.data[HEADER.size :]
            if len(data) < HEADER.size or (total := _size_of(data)) < 0 or len(data) < total:
                chunk.is_part = True
                parts.append(chunk)
                return
            if parts:
                chunk.data = with_number(bare_frame(CHUNK, slot, 0, len(data)), chunk.number) + data
            whole = _message(bytes(data))
            chunk.frame, chunk.names = whole.frame, whole.names
        del self._large[slot]
        for part in parts:
            part.data = bare_frame(CHUNK, slot | ABANDONED)
            part.is_part = False


def _size_of(data: bytes | bytearray) -> int:
    """The size of the frame that begins with ``data``; negative: how many bytes are needed to tell."""
    magic, version, kind, _, _, payload_len, function_len, notes_len, buffer_count, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or not REQUEST <= kind <= CANCEL:
        raise SplitError(f"{bytes(data[:8])!r} starts no frame")
    table_end: int = HEADER.size + buffer_count * BUFFER_ENTRY.size
    if len(data) < table_end:
        return -table_end
    entries = BUFFER_ENTRY.iter_unpack(data[HEADER.size : table_end])
    inline_len = sum(length for length, segment_id, _ in entries if not segment_id)
    size: int = table_end + function_len + notes_len + payload_len + inline_len
    return size


def _message(data: bytes) -> Message:
    """The message of a whole frame."""
    _, _, kind, flags, call_id, payload_len, function_len, notes_len, buffer_count, number = HEADER.unpack_from(data)
    function_at = HEADER.size + buffer_count * BUFFER_ENTRY.size
    entries = BUFFER_ENTRY.iter_unpack(data[HEADER.size : function_at])
    notes_at = function_at + function_len
    payload_at = notes_at + notes_len
    frame = Frame(
        kind,
        flags,
        call_id,
        function=data[function_at:notes_at],
        notes=data[notes_at:payload_at],
        payload=memoryview(data)[payload_at : payload_at + (payload_len if kind <= LETTER else 0)],
        buffers=[Ticket(size, segment_id, offset) for size, segment_id, offset in entries if segment_id],
    )
    return Message(frame, data, number)
