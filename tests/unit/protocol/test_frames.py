"""The wire layout, as this package writes it: the core's decoder reads it."""

from __future__ import annotations

import pytest

from farcall.core.frames import Decoder
from farcall.protocol.frames import CONTROL, FAILURE, LARGE_BYTES, REQUEST, RESPONSE, Ticket, encode_frame, encode_small


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE, FAILURE, CONTROL])
def test_a_small_frame(kind: int) -> None:
    [frame] = Decoder().feed(encode_small(kind, 5, 2**63, b"function", b"notes", b"payload"))
    assert (frame.kind, frame.flags, frame.number) == (kind, 5, 2**63)
    assert (frame.function, frame.notes, frame.payload) == (b"function", b"notes", b"payload")


def test_large_pieces_are_not_joined_and_small_neighbours_are() -> None:
    large = memoryview(bytes(LARGE_BYTES))
    pieces = encode_frame(REQUEST, 0, 1, b"f", b"", b"payload", [memoryview(b"small"), large, memoryview(b"tail")])
    assert pieces[1] is large
    assert [bytes(piece)[-4:] for piece in (pieces[0], pieces[2])] == [b"mall", b"tail"]


def test_tickets_keep_their_places_among_inline_buffers() -> None:
    ticket = Ticket(100, 2, 300)
    data = b"".join(encode_frame(REQUEST, 0, 1, b"", b"", b"", [memoryview(b"one"), ticket, memoryview(b"two")]))
    [frame] = Decoder().feed(data)
    assert [one if isinstance(one, tuple) else bytes(one) for one in frame.buffers] == [b"one", (100, 2, 300), b"two"]
