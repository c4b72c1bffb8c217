"""The wire layout: what is written is read again, and what is no frame is refused."""

from __future__ import annotations

import tracemalloc

import pytest

from farcall.protocol import frame_decoder
from farcall.protocol.frame_decoder import (
    FIRST_STAGING_BYTES,
    MAX_BUFFERS,
    MAX_NOTES_BYTES,
    MAX_PART_BYTES,
    STAGING_BYTES,
    FrameDecoder,
    FrameError,
)
from farcall.protocol.frames import (
    BUFFER_ENTRY,
    CHUNK,
    CONTROL,
    FAILURE,
    HEADER,
    LARGE_BYTES,
    MAGIC,
    MAX_FUNCTION_BYTES,
    REQUEST,
    RESPONSE,
    VERSION,
    Frame,
    Ticket,
    encode_frame,
    encode_small,
    numbered,
    numbered_in_python,
)


@pytest.fixture(autouse=True, params=["compiled", "python"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole frames are taken by compiled code, or by Python."""
    if request.param == "python":
        monkeypatch.setattr(frame_decoder, "take_whole", None)
    elif frame_decoder.take_whole is None:
        pytest.skip("there is no compiled code here")
    return str(request.param)


def feed(decoder: FrameDecoder, data: bytes) -> list[Frame]:
    frames: list[Frame] = []
    while data:
        view = decoder.writable()
        chunk = data[: len(view)]
        view[: len(chunk)] = chunk
        frames += decoder.received(len(chunk))
        data = data[len(chunk) :]
    return frames


def header(kind: int = REQUEST, payload: int = 0, function: int = 0, notes: int = 0, buffers: int = 0) -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, 0, 1, payload, function, notes, buffers, 0)


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE, FAILURE, CONTROL])
def test_a_small_frame(kind: int) -> None:
    data = encode_small(kind, 3, 2**64 - 1, b"function", b"notes", b"payload")
    assert feed(FrameDecoder(), data) == [Frame(kind, 3, 2**64 - 1, b"function", b"notes", b"payload")]


def test_large_pieces_are_not_joined_and_small_neighbours_are() -> None:
    large = memoryview(bytearray(LARGE_BYTES))
    small = memoryview(bytearray(10))
    pieces = encode_frame(REQUEST, 0, 1, b"f", b"", b"p", [small, large, small, small])
    assert [len(piece) for piece in pieces] == [HEADER.size + 4 * BUFFER_ENTRY.size + 2 + 10, LARGE_BYTES, 20]
    assert pieces[1] is large


def test_large_buffers_are_received_into_the_memory_given() -> None:
    given: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        given.append(memoryview(bytearray(size)))
        return given[-1]

    source = memoryview(bytes(range(256)) * (LARGE_BYTES // 64))
    data = b"".join(encode_frame(REQUEST, 0, 1, b"", b"", b"p", [source]))
    (frame,) = feed(FrameDecoder(allocate), data)
    assert frame.buffers[0] is given[0]
    assert given[0] == source


def test_tickets_keep_their_places_among_inline_buffers() -> None:
    ticket = Ticket(70, 3, 128)
    buffers = [memoryview(bytearray(b"one")), ticket, memoryview(bytearray(b"")), memoryview(bytearray(b"two"))]
    (frame,) = feed(FrameDecoder(), b"".join(encode_frame(RESPONSE, 0, 9, b"", b"", b"p", buffers)))
    assert list(frame.buffers) == buffers


def test_many_frames_longer_than_the_staging_memory() -> None:
    one = encode_small(REQUEST, 0, 5, b"f", b"", b"x" * 1000)
    count = 3 * STAGING_BYTES // len(one)
    assert len(feed(FrameDecoder(), numbered([one] * count, 0))) == count


def test_a_link_takes_little_memory_until_much_comes_at_once() -> None:
    decoder = FrameDecoder()
    one = encode_small(REQUEST, 0, 5, b"f", b"", b"x" * 1000)
    assert sum(len(feed(decoder, numbered([one], number))) for number in range(100)) == 100
    assert len(decoder.writable()) <= FIRST_STAGING_BYTES
    assert len(feed(decoder, numbered([one] * 100, 100))) == 100
    assert len(decoder.writable()) > FIRST_STAGING_BYTES


SMALL = encode_small(REQUEST, 0, 5, b"f", b"", b"x")
WITH_BUFFER = b"".join(encode_frame(REQUEST, 0, 5, b"f", b"", b"x", [memoryview(b"inline")]))
LARGE = b"".join(encode_frame(REQUEST, 0, 5, b"f", b"", b"x", [memoryview(bytes(STAGING_BYTES))]))
IN_CHUNKS = HEADER.pack(MAGIC, VERSION, CHUNK, 0, 0, len(SMALL), 0, 0, 0, 0) + SMALL


@pytest.mark.parametrize("frame", [SMALL, WITH_BUFFER, LARGE, IN_CHUNKS])
@pytest.mark.parametrize("number", [0, 1, 3, 2**32 - 1])
def test_a_frame_with_another_number_than_the_next_one_is_refused(frame: bytes, number: int) -> None:
    decoder = FrameDecoder()
    assert len(feed(decoder, numbered([frame, frame], 0))) == decoder.count == 2
    with pytest.raises(FrameError, match=f"frame {number} in the place of frame 2"):
        feed(decoder, numbered([frame], number))
    assert decoder.count == 2


@pytest.mark.parametrize("frame", [SMALL, WITH_BUFFER, LARGE, IN_CHUNKS])
def test_numbers_go_on_behind_the_last_of_32_bits(frame: bytes) -> None:
    decoder = FrameDecoder()
    decoder.count = 2**32 - 1
    assert len(feed(decoder, numbered([frame] * 3, 2**32 - 1))) == 3
    assert decoder.count == 2**32 + 2


def test_both_roads_write_the_same_numbers() -> None:
    frames = [SMALL, WITH_BUFFER]
    assert numbered(frames, 2**32 - 1) == numbered_in_python(frames, 2**32 - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n" + b"x" * HEADER.size,
        HEADER.pack(MAGIC, VERSION + 1, REQUEST, 0, 1, 0, 0, 0, 0, 0),
        header(kind=0),
        header(kind=CHUNK),
        header(kind=CHUNK + 1),
        header(payload=MAX_PART_BYTES + 1),
        header(function=MAX_FUNCTION_BYTES + 1, payload=1),
        header(notes=MAX_NOTES_BYTES + 1, payload=1),
        header(buffers=MAX_BUFFERS + 1),
        header(buffers=1) + BUFFER_ENTRY.pack(MAX_PART_BYTES + 1, 0, 0),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        feed(FrameDecoder(), data)


def test_a_lying_length_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        feed(FrameDecoder(), header(payload=256 << 20))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_length_beyond_all_memory_is_refused() -> None:
    def refuse(size_bytes: int) -> memoryview:
        raise MemoryError

    with pytest.raises(FrameError, match="no memory"):
        feed(FrameDecoder(refuse), header(buffers=1) + BUFFER_ENTRY.pack(MAX_PART_BYTES, 0, 0))


@pytest.mark.parametrize("excess", [0, 1])
def test_a_name_of_a_function_is_short(excess: int) -> None:
    """Also one that has come whole, with all behind it: each receiver keeps thousands of names."""
    data = encode_small(REQUEST, 0, 1, b"f" * (MAX_FUNCTION_BYTES + excess), b"", b"payload")
    if excess:
        with pytest.raises(FrameError, match="name"):
            feed(FrameDecoder(), data)
    else:
        (frame,) = feed(FrameDecoder(), data)
        assert len(frame.function) == MAX_FUNCTION_BYTES
