"""Large messages in chunks: cut, put together again, gone on with, given up; and what a peer may not send."""

from __future__ import annotations

import pytest

from farcall.protocol.chunks import CHUNK_S, LARGEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, ChunkSize, LargeMessage
from farcall.protocol.frame_decoder import BETWEEN_CHUNKS_BYTES, FrameDecoder, FrameError
from farcall.protocol.frames import (
    CHUNK,
    HEADER,
    LARGE_BYTES,
    MAGIC,
    MAX_SLOTS,
    REQUEST,
    VERSION,
    Frame,
    Piece,
    encode_frame,
    encode_small,
    numbered,
)

CONTENT = bytes(range(256)) * (LARGE_BYTES // 256) + b"and a little more"
SIZE = len(CONTENT)


def pieces(number: int = 1) -> list[Piece]:
    return encode_frame(REQUEST, 0, number, b"f", b"n", b"payload", [memoryview(CONTENT), memoryview(b"tail")])


def chunks(slot: int = 0, limit: int = 10_000, number: int = 1, first: int = 0) -> list[bytes]:
    message = LargeMessage(pieces(number), slot, None)
    found: list[bytes] = []
    while message.cut_bytes < message.size_bytes:
        found.append(b"".join(message.next_chunk(limit).pieces(first + len(found))))
    return found


def feed(decoder: FrameDecoder, data: bytes, step: int = 1 << 30) -> list[Frame]:
    frames: list[Frame] = []
    while data:
        view = decoder.writable()
        chunk = data[: min(len(view), step)]
        view[: len(chunk)] = chunk
        frames += decoder.received(len(chunk))
        data = data[len(chunk) :]
    return frames


def is_whole(frame: Frame) -> bool:
    return [bytes(buffer) for buffer in frame.buffers] == [CONTENT, b"tail"] and bytes(frame.payload) == b"payload"


def in_order(stream: list[bytes], first: int = 0) -> bytes:
    return numbered([frame for frame in stream if frame], first)


def chunk(slot: int, offset: int, size: int, flags: int = 0) -> bytes:
    return HEADER.pack(MAGIC, VERSION, CHUNK, slot | flags, offset, size, 0, 0, 0, 0)


@pytest.mark.parametrize("limit", [1000, 10_000, LARGE_BYTES, SIZE])
@pytest.mark.parametrize("step", [7, 4096, 1 << 30])
def test_chunks_become_the_message(limit: int, step: int) -> None:
    decoder = FrameDecoder()
    parts = chunks(limit=limit)
    (frame,) = feed(decoder, b"".join(parts), step)
    assert is_whole(frame)
    assert decoder.count == len(parts)


def test_a_message_that_fits_into_one_chunk_is_a_plain_frame() -> None:
    assert chunks(limit=1 << 30) == [b"".join(pieces())]
    assert chunks(limit=1 << 30, first=9) == [numbered([b"".join(pieces())], 9)]


def test_others_pass_between_the_chunks() -> None:
    first, second = chunks(0, number=1), chunks(1, 20_000, number=2)
    stream: list[bytes] = []
    for index in range(max(len(first), len(second))):
        stream.append(encode_small(REQUEST, 0, 100 + index, b"", b"", b""))
        stream += first[index : index + 1] + second[index : index + 1]
    frames = feed(FrameDecoder(), in_order(stream), 999)
    large = [frame for frame in frames if frame.call_id < 100]
    assert sorted(frame.call_id for frame in large) == [1, 2]
    assert all(map(is_whole, large))
    assert [frame.call_id for frame in frames if frame.call_id >= 100] == [100 + n for n in range(len(first))]
    assert [frame.call_id for frame in frames].index(101) < [frame.call_id for frame in frames].index(1)


def test_bytes_go_straight_to_their_memory() -> None:
    given: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        given.append(memoryview(bytearray(size)))
        return given[-1]

    decoder = FrameDecoder(allocate)
    copied = 0
    data = b"".join(chunks(limit=20_000))
    while data:
        view = decoder.writable()
        part = data[: len(view)]
        view[: len(part)] = part
        copied += len(part) if view.obj not in [memory.obj for memory in given] else 0
        decoder.received(len(part))
        data = data[len(part) :]
    assert given[0] == CONTENT
    # But for what came with the headers: the first read, and one at the beginning of each chunk.
    assert copied < 3 * 16 * 1024 + len(chunks(limit=20_000)) * BETWEEN_CHUNKS_BYTES


def test_a_connection_may_break_at_any_byte_of_a_chunk() -> None:
    parts = chunks(limit=30_000)
    for lost in range(len(parts)):
        for cut in (0, 1, 39, 40, 41, 5000, len(parts[lost]) - 1):
            decoder = FrameDecoder()
            assert not feed(decoder, b"".join(parts[:lost]) + parts[lost][:cut])
            assert decoder.count == lost
            decoder.restart()
            (frame,) = feed(decoder, b"".join(parts[lost:]))
            assert is_whole(frame)


def test_a_message_that_is_given_up_leaves_nothing_and_its_slot_is_free() -> None:
    message = LargeMessage(pieces(), 3, lambda: (b"never",))
    assert message.give_up() is None  # nothing has left
    message = LargeMessage(pieces(), 3, lambda: (b"never",))
    first = message.next_chunk(10_000)
    farewell = message.give_up()
    assert farewell is not None
    assert first.lost() == ()  # what the peer is told comes behind
    decoder = FrameDecoder()
    assert not feed(decoder, in_order([b"".join(first.pieces(0)), farewell]))
    assert decoder.count == 2
    (frame,) = feed(decoder, in_order(chunks(slot=3), 2))
    assert is_whole(frame)


def test_what_is_lost_while_its_sender_waits_is_written_again() -> None:
    message = LargeMessage(pieces(), 0, lambda: (b"instead",))
    first = message.next_chunk(10_000)
    assert first.lost() == (first,)
    last = message.next_chunk(None)
    message.written()
    farewell, instead = first.lost()
    assert isinstance(farewell, bytes)
    assert instead == b"instead"
    assert last.lost() == ()  # told once
    decoder = FrameDecoder()
    feed(decoder, b"".join(first.pieces(0)))
    assert not feed(decoder, in_order([farewell], 1))
    assert not decoder._assemblies


def test_a_repeatable_message_is_written_again_for_good() -> None:
    message = LargeMessage(pieces(), 0, None)
    only = message.next_chunk(None)
    message.written()
    assert only.lost() == (only,)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (chunk(MAX_SLOTS, 0, 10), "slot 16"),
        (chunk(0, 0, 0), "bytes 0 to 0"),
        (chunk(0, 5, 10), "bytes 5 to 15"),
        (chunk(0, 0, 50) + chunk(0, 0, 10), "slot 0, of 0"),
        (chunk(0, 0, 41) + encode_small(REQUEST, 0, 1, b"", b"", b"") + b"x", "more bytes"),
        (chunk(0, 0, 81) + in_order([encode_small(REQUEST, 0, 1, b"", b"", b"")] * 2), "more bytes"),
        (chunk(0, 0, 80) + in_order([encode_small(REQUEST, 0, 1, b"", b"", b"")] * 2), "more bytes"),
        (
            chunk(0, 0, 40) + in_order([encode_small(REQUEST, 0, 1, b"", b"", b"")], 1),
            "frame 1 in the place of frame 0",
        ),
        (chunks(first=1)[0], "frame 1 in the place of frame 0"),
    ],
)
def test_what_makes_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        feed(FrameDecoder(), data + bytes(100))


@pytest.mark.parametrize(
    ("bytes_per_s", "wanted"),
    [
        (1e6, SMALLEST_CHUNK_BYTES),
        (4 * SMALLEST_CHUNK_BYTES / CHUNK_S, 4 * SMALLEST_CHUNK_BYTES),
        (1e10, LARGEST_CHUNK_BYTES),
    ],
)
def test_chunks_are_as_large_as_they_leave_quickly(bytes_per_s: float, wanted: int) -> None:
    size = ChunkSize()
    size.took(SMALLEST_CHUNK_BYTES, 0.0)  # a clock may stand still for so long
    for _ in range(100):
        size.took(size.size_bytes, 0.999 * size.size_bytes / bytes_per_s)
        size.took(0, 0.0)  # nothing of it had to be written again
    assert size.size_bytes == wanted


def test_chunks_stay_small_on_a_slow_link_whose_kernel_takes_many_bytes_at_once() -> None:
    size = ChunkSize()
    for _ in range(100):
        size.took(size.size_bytes, 0.1 * CHUNK_S)  # there was room
        size.took(size.size_bytes, 2 * size.size_bytes / (SMALLEST_CHUNK_BYTES / CHUNK_S))
        assert size.size_bytes <= 4 * SMALLEST_CHUNK_BYTES
    assert size.size_bytes == SMALLEST_CHUNK_BYTES
