"""The decoder of the Python core: how the bytes are cut does not matter, and what is no frame is refused."""

from __future__ import annotations

import struct
import sys

import pytest

from farcall.core.contract import CHUNK, CONTROL, LARGE_BYTES, LETTER, REQUEST, RESPONSE
from farcall.core.frames import (
    ABANDONED,
    ENTRY,
    HEADER,
    MAX_BUFFERS,
    MAX_FUNCTION_BYTES,
    MAX_NOTES_BYTES,
    MAX_PART_BYTES,
    MAX_SLOTS,
    VERSION,
    Decoder,
    Message,
    WireError,
    bare_frame,
    with_number,
)


def frame(
    kind: int = REQUEST,
    payload: bytes = b"",
    *,
    call: int = 0,
    flags: int = 0,
    function: bytes = b"",
    notes: bytes = b"",
    buffers: tuple[bytes | tuple[int, int, int], ...] = (),
) -> bytes:
    header = HEADER.pack(b"fc", VERSION, kind, flags, call, len(payload), len(function), len(notes), len(buffers), 0)
    table = b"".join(
        ENTRY.pack(*buffer) if isinstance(buffer, tuple) else ENTRY.pack(len(buffer), 0, 0) for buffer in buffers
    )
    inline = b"".join(buffer for buffer in buffers if isinstance(buffer, bytes))
    return header + table + function + notes + payload + inline


def numbered(*frames: bytes) -> bytes:
    return b"".join(with_number(one, count) for count, one in enumerate(frames))


def content(message: Message) -> tuple[object, ...]:
    buffers = [one if isinstance(one, tuple) else bytes(one) for one in message.buffers]
    return message.kind, message.number, message.function, message.notes, bytes(message.payload), buffers


def decoded(decoder: Decoder, *parts: bytes) -> list[tuple[object, ...]]:
    return [content(message) for part in parts for message in decoder.feed(part)]


CHUNKED = frame(RESPONSE, b"in chunks", call=3, buffers=(b"0123456789", b""))
MIXED = numbered(
    frame(REQUEST, b"payload", call=1, function=b"name", notes=b"notes"),
    bare_frame(CHUNK, 2, 0, 50) + CHUNKED[:50],
    frame(CONTROL),
    frame(LETTER, call=7, buffers=(b"abc", b"", (5, 6, 7), b"z")),
    bare_frame(CHUNK, 2, 50, len(CHUNKED) - 50) + CHUNKED[50:],
    frame(REQUEST, b"last", call=2),
)
EXPECTED = [
    (REQUEST, 1, b"name", b"notes", b"payload", []),
    (CONTROL, 0, b"", b"", b"", []),
    (LETTER, 7, b"", b"", b"", [b"abc", b"", (5, 6, 7), b"z"]),
    (RESPONSE, 3, b"", b"", b"in chunks", [b"0123456789", b""]),
    (REQUEST, 2, b"", b"", b"last", []),
]


def test_messages_come_whole_whatever_two_parts_their_bytes_come_in() -> None:
    for at in range(len(MIXED) + 1):
        decoder = Decoder()
        assert decoded(decoder, MIXED[:at], MIXED[at:]) == EXPECTED
        assert decoder.count == 6


@pytest.mark.parametrize("size", [1, 2, 3, 7, 39, 40, 41, 64])
def test_messages_come_whole_in_parts_of_one_size(size: int) -> None:
    assert decoded(Decoder(), *(MIXED[at : at + size] for at in range(0, len(MIXED), size))) == EXPECTED


def test_large_parts_come_in_writable_memory() -> None:
    payload, buffer = b"p" * LARGE_BYTES, b"b" * (LARGE_BYTES + 1)
    [message] = Decoder().feed(frame(payload=payload, buffers=(buffer,)))
    assert isinstance(message.payload, memoryview)
    assert not message.payload.readonly
    assert content(message)[4:] == (payload, [buffer])
    [small] = Decoder().feed(frame(payload=payload[:-1]))
    assert isinstance(small.payload, bytes)


def test_after_a_broken_connection_incomplete_frames_come_again() -> None:
    for at in range(len(MIXED)):
        decoder = Decoder()
        before = decoded(decoder, MIXED[:at])
        decoder.restart()
        starts, here = [], 0
        for size in (56, 90, 40, 140, 40 + len(CHUNKED) - 50, 44):
            starts.append(here)
            here += size
        assert here == len(MIXED)
        assert before + decoded(decoder, MIXED[[*starts, here][decoder.count] :]) == EXPECTED


def test_the_rest_of_an_abandoned_message_does_not_come() -> None:
    stream = numbered(
        bare_frame(CHUNK, 0, 0, 50) + CHUNKED[:50],
        bare_frame(CHUNK, 0 | ABANDONED),
        bare_frame(CHUNK, 0, 0, len(CHUNKED)) + CHUNKED,
    )
    assert decoded(Decoder(), stream) == [EXPECTED[3]]


def header(**fields: int) -> bytes:
    names = ("version", "kind", "flags", "call", "payload", "function", "notes", "buffers", "number")
    values = dict.fromkeys(names, 0) | {"version": VERSION, "kind": REQUEST} | fields
    return HEADER.pack(b"fc", *(values[name] for name in names))


@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\n".ljust(HEADER.size),
        header(version=VERSION - 1),
        header(kind=0),
        header(kind=9),
        header(number=1),
        header(function=MAX_FUNCTION_BYTES + 1),
        header(notes=MAX_NOTES_BYTES + 1),
        header(buffers=MAX_BUFFERS + 1),
        header(payload=MAX_PART_BYTES + 1),
        header(buffers=1) + ENTRY.pack(MAX_PART_BYTES + 1, 0, 0),
        header(kind=CHUNK, flags=MAX_SLOTS, payload=1),
        header(kind=CHUNK, payload=0),
        header(kind=CHUNK, call=1, payload=1),
        header(kind=CHUNK, payload=80) + bare_frame(CHUNK, payload_bytes=40) + bytes(40),
        header(kind=CHUNK, payload=41) + header() + b"x",
    ],
)
def test_what_is_not_a_frame_is_refused(wrong: bytes) -> None:
    with pytest.raises(WireError, match="the peer"):
        list(Decoder().feed(wrong))


def test_what_came_before_what_is_no_frame_counts() -> None:
    decoder = Decoder()
    came = decoder.feed(frame(CONTROL) + bytes(40))
    assert next(came).kind == CONTROL
    with pytest.raises(WireError):
        next(came)
    assert decoder.count == 1


def test_an_announcement_alone_takes_no_memory() -> None:
    decoder = Decoder()
    assert not list(decoder.feed(header(payload=MAX_PART_BYTES, notes=MAX_NOTES_BYTES, buffers=MAX_BUFFERS) + b"x"))
    single = decoder._single
    assert single is not None
    assert sys.getsizeof(single._part) < 1000


def test_the_number_of_a_frame_is_that_of_its_low_bits() -> None:
    decoder = Decoder()
    decoder.count = (1 << 32) + 5
    assert len(list(decoder.feed(with_number(frame(), (1 << 32) + 5)))) == 1
    assert struct.unpack_from("<I", with_number(frame(), (1 << 32) + 5), 36) == (5,)
