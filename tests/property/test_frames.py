"""Frames under arbitrary splits of the stream, and under garbage: the core's decoder in Python.

The compiled one has a fuzzer of its own (`tests/core/native/decoder_fuzz.cc`).
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from farcall.core.frames import Decoder, WireError, with_number
from farcall.protocol.frames import (
    CONTROL,
    HEADER,
    LARGE_BYTES,
    MAGIC,
    REQUEST,
    VERSION,
    Ticket,
    encode_frame,
    encode_small,
    encode_small_in_python,
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


def plain(kind: int, flags: int, call: int, function: bytes, notes: bytes, payload: Any, parts: Any) -> Any:
    return kind, flags, call, function, notes, bytes(payload), [_plain(part) for part in parts]


def _plain(part: Any) -> Any:
    if isinstance(part, Ticket):
        return (part.size_bytes, part.segment_id, part.offset)
    return part if isinstance(part, tuple) else bytes(part)


def feed(data: bytes, cuts: list[int]) -> list[Any]:
    decoder, found, at, turn = Decoder(), [], 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        for one in decoder.feed(data[at : at + step]):
            found.append(plain(one.kind, one.flags, one.number, one.function, one.notes, one.payload, one.buffers))
        at += step
        turn += 1
    return found


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_the_same_frames_come_out_whatever_the_split(sent: list[Any], cuts: list[int]) -> None:
    stream = b"".join(with_number(b"".join(encode_frame(*message)), number) for number, message in enumerate(sent))
    assert feed(stream, cuts) == [plain(*message) for message in sent]


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


# Lengths stay below a megabyte: what a lying length costs is a unit test's matter.
garbage_headers = st.builds(
    lambda kind, payload, function, notes, count: HEADER.pack(
        MAGIC, VERSION, kind, 0, 1, payload, function, notes, count, 0
    ),
    st.integers(0, 9),
    st.integers(0, 2**20),
    st.integers(0, 2**17),
    st.integers(0, 2**17),
    st.integers(0, 1000),
)


@given(st.one_of(st.just(b""), garbage_headers), st.binary(max_size=3000), st.lists(st.integers(1, 500), min_size=1))
def test_garbage_raises_wire_errors_or_nothing(head: bytes, tail: bytes, cuts: list[int]) -> None:
    try:
        feed(head + tail, cuts)
    except WireError:
        pass


@given(messages, st.data())
def test_one_flipped_bit_raises_wire_errors_or_nothing(message: Any, data: st.DataObject) -> None:
    stream = bytearray(b"".join(encode_frame(*message)))
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        feed(bytes(stream), [70_000])
    except WireError:
        pass
