"""Frames under arbitrary splits of the stream, and under garbage; compiled code and Python must agree."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol import frame_decoder
from farcall.protocol.frame_decoder import Allocate, FrameDecoder, FrameError, allocate_plainly
from farcall.protocol.frames import (
    CONTROL,
    HEADER,
    LARGE_BYTES,
    MAGIC,
    REQUEST,
    VERSION,
    Frame,
    Ticket,
    encode_frame,
    encode_small,
    encode_small_in_python,
    numbered,
)

sizes = st.one_of(st.integers(0, 200), st.sampled_from([LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 300_000]))
buffers = st.one_of(
    st.builds(lambda size, fill: memoryview(bytearray([fill]) * size), sizes, st.integers(0, 255)),
    st.builds(Ticket, st.integers(1, 2**40), st.integers(1, 2**64 - 1), st.integers(0, 2**40)),
)
messages = st.tuples(
    st.integers(REQUEST, CONTROL),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
    st.binary(max_size=50),
    st.builds(lambda size: b"p" * size, sizes),
    st.lists(buffers, max_size=4),
)


def plain(frame: Any) -> Any:
    *head, payload, buffers = frame if isinstance(frame, tuple) else msgspec.structs.astuple(frame)[:7]
    return (*head, bytes(payload), [part if isinstance(part, Ticket) else bytes(part) for part in buffers])


def feed(data: bytes, cuts: list[int], allocate: Allocate = allocate_plainly) -> list[Any]:
    """The frames of ``data``, by each road: both find the same ones, and the same error."""
    outcomes = []
    for take_whole in (None, frame_decoder.take_whole):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frame_decoder, "take_whole", take_whole)
            frames: list[Any] = []
            try:
                frames += map(plain, feed_one(FrameDecoder(allocate), data, cuts))
            except FrameError as error:
                frames.append(error)
            outcomes.append(frames)
    first, *others = outcomes
    assert all(repr(other) == repr(first) for other in others)
    if first and isinstance(first[-1], FrameError):
        raise first[-1]
    return first


def feed_one(decoder: FrameDecoder, data: bytes, cuts: list[int]) -> list[Frame]:
    frames: list[Frame] = []
    position = turn = 0
    while position < len(data):
        view = decoder.writable()
        assert len(view), "there is always room"
        step = min(len(view), len(data) - position, cuts[turn % len(cuts)])
        view[:step] = data[position : position + step]
        frames += decoder.received(step)
        position += step
        turn += 1
    return frames


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_the_same_frames_come_out_whatever_the_split(sent: list[Any], cuts: list[int]) -> None:
    stream = numbered([b"".join(encode_frame(*message)) for message in sent], 0)
    assert feed(stream, cuts) == [plain(message) for message in sent]


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5))
def test_byte_by_byte(payloads: list[bytes]) -> None:
    stream = numbered([encode_small(REQUEST, 0, n, b"f", b"n", payload) for n, payload in enumerate(payloads)], 0)
    assert [payload for *_, payload, _ in feed(stream, [1])] == payloads


small_messages = st.tuples(
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
    st.binary(max_size=50),
    st.binary(max_size=300),
)


@given(small_messages)
def test_both_roads_write_the_same_bytes(message: Any) -> None:
    assert encode_small(*message) == encode_small_in_python(*message) == b"".join(encode_frame(*message, []))


@given(small_messages, st.lists(st.integers(0, 2**64 - 1), max_size=6), st.integers(0, 40))
def test_a_frame_cut_anywhere_is_not_taken_before_it_is_whole(message: Any, table: list[int], more: int) -> None:
    head = bytearray(encode_small(REQUEST, *message[1:]))
    head[32:36] = (len(table) // 3).to_bytes(4, "little")
    entries = b"".join(number.to_bytes(8, "little") for number in table[: len(table) // 3 * 3])
    stream = bytes(head[:40]) + entries + bytes(head[40:]) + numbered([encode_small(REQUEST, *message[1:])], 1)[:more]
    for cut in range(1, len(stream)):
        try:
            feed(stream, [cut, len(stream)], refuse)
        except FrameError:
            pass


# Lengths stay below a megabyte: what a lying length costs is a unit test's matter.
garbage_headers = st.builds(
    lambda kind, payload, function, notes, count: HEADER.pack(
        MAGIC, VERSION, kind, 0, 1, payload, function, notes, count, 0
    ),
    st.integers(0, 6),
    st.integers(0, 2**20),
    st.integers(0, 2**17),
    st.integers(0, 2**17),
    st.integers(0, 1000),
)
# A buffer table of garbage may name any size, so the memory for one is refused here instead of taken.


def refuse(size: int) -> memoryview:
    if size > 1 << 20:
        raise FrameError("too large for this test")
    return memoryview(bytearray(size))


@given(st.one_of(st.just(b""), garbage_headers), st.binary(max_size=3000), st.lists(st.integers(1, 500), min_size=1))
def test_garbage_raises_frame_error_or_nothing(head: bytes, tail: bytes, cuts: list[int]) -> None:
    try:
        feed(head + tail, cuts, refuse)
    except FrameError:
        pass


@given(messages, st.data())
def test_one_flipped_bit_raises_frame_error_or_nothing(message: Any, data: st.DataObject) -> None:
    stream = bytearray(b"".join(encode_frame(*message)))
    # Not in the lengths of the header, see above.
    position = data.draw(st.one_of(st.integers(0, 15), st.integers(HEADER.size, len(stream))))
    if position < len(stream):
        stream[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        feed(bytes(stream), [70_000], refuse)
    except FrameError:
        pass
