"""A sealed transport with somebody in between, who changes, drops, repeats, reorders and adds: nothing gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.memory_transport import MemoryTransport, memory_pair

from farcall.transport.interface import TransportBroken, TransportForged
from farcall.transport.poly1305 import AVAILABLE
from farcall.transport.sealed import _USUAL_BODY_BYTES as USUAL_BYTES
from farcall.transport.sealed import MAX_BODY_BYTES, SealedTransport

THERE, BACK = b"t" * 32, b"b" * 32
CAPACITY = 1 << 20


class Between:
    """Two ends, and what is on its way from one to the other."""

    def __init__(self, capacity: int = CAPACITY, quick: bool = AVAILABLE) -> None:
        left, self.left_way = memory_pair(capacity)
        self.right_way, right = memory_pair(capacity)
        self.left = SealedTransport(left, send_key=THERE, receive_key=BACK, quick=quick)
        self.right = SealedTransport(right, send_key=BACK, receive_key=THERE, quick=quick)

    def take(self) -> bytes:
        return take(self.left_way)

    def give(self, data: bytes) -> bytes:
        """Let ``data`` arrive; what the right end makes of it."""
        assert self.right_way.send((data,)) == len(data)
        view = memoryview(bytearray(CAPACITY))
        count = self.right.receive_into(view)
        return bytes(view[: count or 0])

    def records(self, *bodies: bytes) -> list[bytes]:
        found = []
        for body in bodies:
            assert self.left.send((body,)) == len(body)
            found.append(self.take())
        return found


def take(transport: MemoryTransport) -> bytes:
    view = memoryview(bytearray(CAPACITY))
    count = transport.receive_into(view)
    return bytes(view[: count or 0])


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_sent_comes_through(quick: bool) -> None:
    between = Between(quick=quick)
    for size in (1, 100, 4095, 4096, 5000, USUAL_BYTES):
        (record,) = between.records(bytes([size % 251]) * size)
        assert between.give(record) == bytes([size % 251]) * size
    assert not between.right.buffered


def test_records_grow_while_they_are_taken_at_once() -> None:
    between = Between(quick=True)
    data = bytes(range(256)) * (4 * MAX_BODY_BYTES // 256)
    sizes = []
    for _ in range(4):
        sizes.append(between.left.send((data,)))
        assert between.give(between.take()) == data[: sizes[-1]]
    assert sizes == [USUAL_BYTES, 2 * USUAL_BYTES, MAX_BODY_BYTES, MAX_BODY_BYTES]
    assert between.left.send((b"small",)) == 5
    assert between.left.send((data,)) == USUAL_BYTES


def test_both_directions_have_keys_of_their_own() -> None:
    between = Between()
    (record,) = between.records(b"hello")
    assert between.left_way.send((record,)) == len(record)
    with pytest.raises(TransportForged):
        between.left.receive_into(memoryview(bytearray(100)))


def test_the_quick_seal_is_there() -> None:
    """It is asked for in a way that a Python may not have: where that is so, this says it."""
    assert AVAILABLE


def test_equal_records_have_different_seals() -> None:
    between = Between(quick=True)
    one, other = between.records(bytes(5000), bytes(5000))
    assert one[4:20] != other[4:20]


def test_large_records_are_proved_too() -> None:
    for quick in (False, True):
        between = Between(quick=quick)
        (record,) = between.records(bytes(100_000))
        with pytest.raises(TransportForged):
            between.give(record[:50_000] + b"x" + record[50_001:])


@pytest.mark.parametrize(
    "tamper",
    [
        lambda records: [records[1], records[2]],
        lambda records: [records[0], records[0]],
        lambda records: [records[1], records[0]],
        lambda records: [records[0], records[2]],
        lambda records: [records[0], b"\5\0\0\0" + bytes(16) + b"added", records[1]],
        lambda records: [records[0], records[1][:20] + b"x" + records[1][21:]],
        lambda records: [records[0], records[1][:4] + bytes(16) + records[1][20:]],
        lambda records: [records[0], b"\4" + records[1][1:24] + records[2]],
        lambda records: [records[0], b"\0\0\0\0" + bytes(16)],
        lambda records: [records[0], b"\0\0\0\1" + bytes(16)],
    ],
    ids=["drop", "repeat", "reorder", "drop later", "add", "change", "unseal", "shorten", "empty", "endless"],
)
def test_nothing_false_reaches_anybody(tamper: object) -> None:
    between = Between()
    bodies = [b"first", b"second", b"third"]
    got: list[bytes] = []

    def receive_all() -> None:
        got.extend(between.give(record) for record in tamper(between.records(*bodies)))  # type: ignore[operator]

    with pytest.raises(TransportForged):
        receive_all()
    assert b"".join(bodies).startswith(b"".join(got))


@given(st.lists(st.binary(min_size=1, max_size=9000), min_size=1, max_size=4), st.data())
def test_one_changed_bit_is_found(bodies: list[bytes], data: st.DataObject) -> None:
    between = Between()
    stream = bytearray(b"".join(between.records(*bodies)))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= 1 << data.draw(st.integers(0, 7))
    got = b""
    forged = False
    try:
        got = between.give(bytes(stream))
        while (more := between.give(b"")) != b"":
            got += more
    except TransportForged:
        forged = True
    expected = b"".join(bodies)
    assert expected.startswith(got)
    # A length that promises more than comes is not complete yet: nobody has seen a byte of it.
    assert forged or len(got) < len(expected)


@given(
    st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20), st.lists(st.integers(1, 400), min_size=1)
)
def test_any_split_gives_the_same_bytes(bodies: list[bytes], splits: list[int]) -> None:
    between = Between()
    stream = b"".join(between.records(*bodies))
    got, index = b"", 0
    while stream:
        size = splits[index % len(splits)]
        index += 1
        got += between.give(stream[:size])
        stream = stream[size:]
    while between.right.buffered:
        got += between.give(b"")
    assert got == b"".join(bodies)


def test_what_was_not_taken_is_offered_again_and_leaves_once() -> None:
    between = Between(capacity=50)
    body = bytes(range(100))
    assert between.left.send((body,)) == 0
    assert between.left.pending_bytes == 100
    body_changed_meanwhile = bytes(100)
    stream = b""
    while not (taken := between.left.send((body_changed_meanwhile, b"and more"))):
        stream += between.take()
    stream += between.take()
    assert taken == 100
    assert between.left.pending_bytes == 0
    receiving = Between()
    assert receiving.give(stream) == body


def test_a_small_view_leaves_the_rest_for_later() -> None:
    between = Between()
    (record,) = between.records(b"0123456789")
    between.right_way.send((record,))
    view = memoryview(bytearray(4))
    assert between.right.receive_into(view) == 4
    assert between.right.buffered
    assert between.right.wait_readable(0)
    assert between.right.receive_into(view) == 4
    assert between.right.receive_into(view) == 2
    assert not between.right.buffered
    assert between.right.receive_into(view) is None


def test_an_end_within_a_record_is_a_break() -> None:
    between = Between()
    (record,) = between.records(b"hello")
    assert between.give(record[:-1]) == b""
    assert between.right.held_bytes == len(record) - 1
    between.right_way.end_sending()
    with pytest.raises(TransportBroken, match="within a record"):
        between.right.receive_into(memoryview(bytearray(10)))
