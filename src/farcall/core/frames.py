"""Bytes to messages: the frames of one link. No socket, thread or clock, and nothing of calls.

All integers are little-endian.

    offset  size  field
    0       2     magic, b"fc"
    2       1     version of this layout, 3
    3       1     kind, see `contract.py`
    4       4     flags
    8       8     call: the number of a call; of a letter, that of its slot
    16      8     payload length
    24      4     function length, at most MAX_FUNCTION_BYTES
    28      4     notes length
    32      4     number of buffers
    36      4     number: how many frames came before over this link, the low 32 bits
    40      24*n  buffer table: length (8), segment (8), offset (8); segment 0 means inline, others are tickets
    ...           function, notes, payload, then every inline buffer in order

A message with large pieces travels in chunks, and small frames pass between them. A chunk is a frame with a number of
its own. Its flags hold a slot, one of MAX_SLOTS; its call is the offset of its bytes within the message, and its
payload length is their number. The first chunk begins with the message's own header, whose number is 0. With ABANDONED,
and without bytes: the rest of the message in that slot does not come.

A broken connection may cut a frame anywhere. A small frame comes again as a whole. The bytes of a message in chunks
come again from the first chunk on that did not arrive in full, perhaps cut otherwise: those that are here are skipped.

Bytes may come from anybody: every length is compared with a bound, and memory grows as the bytes come.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from farcall.core.contract import CANCEL, CARRIES, CHUNK, LARGE_BYTES, LETTER, MARKED, REQUEST

MAGIC: Final = b"fc"
VERSION: Final = 3
HEADER: Final = Struct("<2sBBIQQIIII")
ENTRY: Final = Struct("<QQQ")
FLAGS_AT, CALL_AT, NUMBER_AT = 4, 8, 36

ABANDONED: Final = 1 << 31
"""The flag of a chunk without bytes: the rest of the message in its slot does not come."""
MAX_SLOTS: Final = 16
MAX_FUNCTION_BYTES: Final = 4096
MAX_NOTES_BYTES: Final = 16 << 20
MAX_BUFFERS: Final = 1 << 20
MAX_PART_BYTES: Final = 1 << 46


class WireError(Exception):
    """The peer sent what is not a frame: the link is unusable."""


class Header(NamedTuple):
    magic: bytes
    version: int
    kind: int
    flags: int
    call: int
    payload_bytes: int
    function_bytes: int
    notes_bytes: int
    buffers: int
    number: int

    @classmethod
    def of(cls, frame: bytes | bytearray) -> Header:
        return cls._make(HEADER.unpack_from(frame))

    def verify(self) -> None:
        if self.magic != MAGIC or self.version != VERSION or not REQUEST <= self.kind <= CANCEL:
            raise WireError("the peer sent what is not the start of a frame")
        if self.function_bytes > MAX_FUNCTION_BYTES:
            raise WireError(f"the peer sent a function's name of {self.function_bytes} bytes")
        if self.notes_bytes > MAX_NOTES_BYTES or self.buffers > MAX_BUFFERS:
            raise WireError("the peer sent a frame whose parts are larger than any real one")
        if self.payload_bytes > MAX_PART_BYTES:
            raise WireError(f"the peer announced a payload of {self.payload_bytes} bytes")


def whole_frame(head: bytes, size: int) -> Header:
    """The header of a frame of ``size`` bytes that begins with ``head``. Raises ValueError where that cannot be."""
    try:
        header = Header.of(head)
        header.verify()
        table = head[HEADER.size : HEADER.size + header.buffers * ENTRY.size]
        inline = sum(size for size, segment, _ in ENTRY.iter_unpack(table) if not segment)
        text = header.function_bytes + header.notes_bytes + header.payload_bytes
        if header.kind <= LETTER and size == HEADER.size + header.buffers * ENTRY.size + text + inline:
            return header
    except (WireError, StructError):
        pass
    raise ValueError("these bytes are not one whole frame")


def bare_frame(kind: int, flags: int = 0, call: int = 0, payload_bytes: int = 0) -> bytes:
    """A header alone: what the core itself says to its peer."""
    return HEADER.pack(MAGIC, VERSION, kind, flags, call, payload_bytes, 0, 0, 0, 0)


def with_call(frame: bytes, call: int) -> bytes:
    return frame[:CALL_AT] + call.to_bytes(8, "little") + frame[CALL_AT + 8 :]


def with_flags(frame: bytes, flags: int) -> bytes:
    return frame[:FLAGS_AT] + flags.to_bytes(4, "little") + frame[FLAGS_AT + 4 :]


def with_number(frame: bytes, count: int) -> bytes:
    return frame[:NUMBER_AT] + (count & 0xFFFFFFFF).to_bytes(4, "little") + frame[NUMBER_AT + 4 :]


class Descriptor:
    """A descriptor that closes with its last owner."""

    def __init__(self, number: int) -> None:
        self.number: int = number

    def release(self) -> int:
        number, self.number = self.number, -1
        return number

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


@dataclass(slots=True)
class Message:
    """A frame that has come whole, or news of the core's own."""

    kind: int
    flags: int = 0
    number: int = 0
    link: int = 0
    function: bytes = b""
    notes: bytes = b""
    payload: bytes | memoryview = b""
    buffers: list[memoryview | tuple[int, int, int]] = field(default_factory=list)
    descriptor: Descriptor | None = None
    at: float = 0.0
    refused: bool = False
    """A request that came where too many waited: it leaves the order for the event thread."""
    waited_for: bool = False
    """Of an answer: whoever waited for it has it, and its call is over."""

    @property
    def has_belongings(self) -> bool:
        """Is there something that must be declined if nobody takes it?"""
        return bool(self.flags & (MARKED | CARRIES)) or any(isinstance(buffer, tuple) for buffer in self.buffers)


class Assembler:
    """One message, from its bytes in order."""

    def __init__(self) -> None:
        self.taken: int = 0
        """Bytes of the message that have come."""
        self.message: Message | None = None
        """Is there when the last byte is."""
        self._part = bytearray()
        self._steps = self._parse()
        self._wanted = next(self._steps)

    def take(self, data: memoryview) -> int:
        """Take bytes from the start of ``data``, up to the end of the message. Returns how many."""
        at = 0
        while self.message is None:
            more = data[at : at + self._wanted - len(self._part)]
            self._part += more
            at += len(more)
            if len(self._part) < self._wanted:
                break
            part, self._part = self._part, bytearray()
            try:
                self._wanted = self._steps.send(part)
            except StopIteration as end:
                self.message = end.value
        self.taken += at
        return at

    def _parse(self) -> Generator[int, bytearray, Message]:
        """Yields how many bytes it wants next, and is sent them."""
        header = Header.of((yield HEADER.size))
        header.verify()
        if header.kind == CHUNK:
            raise WireError("the peer sent chunks of a chunk")
        table = list(ENTRY.iter_unpack((yield header.buffers * ENTRY.size)))
        payload_at = header.function_bytes + header.notes_bytes
        is_large = header.payload_bytes >= LARGE_BYTES
        text = bytes((yield payload_at + (0 if is_large else header.payload_bytes)))
        message = Message(
            header.kind,
            header.flags,
            header.call,
            function=text[: header.function_bytes],
            notes=text[header.function_bytes : payload_at],
            payload=text[payload_at:],
        )
        if is_large:
            message.payload = memoryview((yield header.payload_bytes))
        for size, segment, offset in table:
            if size > MAX_PART_BYTES:
                raise WireError(f"the peer announced a buffer of {size} bytes")
            message.buffers.append((size, segment, offset) if segment else memoryview((yield size)))
        return message


class Decoder:
    """The frames of a link, over all of its connections: bytes in, messages out.

    Between two calls it is inside of at most one frame: of ``_header``, of ``_single``, or of a chunk (``_left``).
    """

    def __init__(self) -> None:
        self.count: int = 0
        """Frames that came in full: the number of the next one."""
        self._slots: list[Assembler | None] = [None] * MAX_SLOTS
        self.restart()

    def restart(self) -> None:
        """Another connection: the peer sends the incomplete frame again; messages in chunks go on."""
        self._header = bytearray()
        self._single: Assembler | None = None
        self._chunk = 0
        """The slot whose chunk is being received."""
        self._left = 0
        """Bytes of that chunk which have not come."""
        self._known = 0
        """Of these, the bytes which had come before the connection broke."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take what was received; yield the messages that are whole now. Raises `WireError` behind the last one."""
        rest = memoryview(data)
        while rest:
            if self._left:
                taken, message = self._take_chunk(rest)
            elif self._single is not None:
                taken, message = self._take_single(self._single, rest)
            else:
                more = rest[: HEADER.size - len(self._header)]
                self._header += more
                taken, message = len(more), None
                if len(self._header) == HEADER.size:
                    header, self._header = self._header, bytearray()
                    message = self._begin(header)
            rest = rest[taken:]
            if message is not None:
                yield message

    def _begin(self, raw: bytearray) -> Message | None:
        header = Header.of(raw)
        header.verify()
        expected = self.count & 0xFFFFFFFF
        if header.number != expected:
            raise WireError(
                f"the peer sent frame {header.number} in the place of frame {expected}: one was lost or repeated, "
                "so nothing that follows can be trusted; please report this"
            )
        if header.kind == CHUNK:
            self._begin_chunk(header)
            return None
        self._single = Assembler()
        return self._take_single(self._single, memoryview(raw))[1]

    def _take_single(self, single: Assembler, data: memoryview) -> tuple[int, Message | None]:
        taken = single.take(data)
        if single.message is not None:
            self._single = None
            self.count += 1
        return taken, single.message

    def _begin_chunk(self, header: Header) -> None:
        slot = header.flags & ~ABANDONED
        if slot >= MAX_SLOTS:
            raise WireError(f"the peer sent a chunk for slot {slot}, of {MAX_SLOTS}")
        if header.flags & ABANDONED:
            self._slots[slot] = None
            self.count += 1
            return
        message = self._slots[slot]
        if message is None:
            message = self._slots[slot] = Assembler()
        offset, size, have = header.call, header.payload_bytes, message.taken
        if not size or offset > have:
            raise WireError(f"the peer sent {size} bytes from {offset} on of a message that has {have}")
        self._chunk, self._left, self._known = slot, size, min(have - offset, size)

    def _take_chunk(self, data: memoryview) -> tuple[int, Message | None]:
        assembler = self._slots[self._chunk]
        assert assembler is not None
        data = data[: self._left]
        known = min(len(data), self._known)
        self._known -= known
        self._left -= len(data)
        fresh = data[known:]
        if assembler.take(fresh) < len(fresh) or (assembler.message is not None and self._left):
            raise WireError("the peer sent more bytes of a message than it has")
        if assembler.message is not None:
            self._slots[self._chunk] = None
        if not self._left:
            self.count += 1
        return len(data), assembler.message
