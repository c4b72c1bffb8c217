"""A connection with faults in place, and no rule: bytes and ends pass as ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.kit.times import LONG_S
from tests.kit.transports import receive_exactly, send_all, wait_for_end

from farcall.core.frames import with_number
from farcall.protocol.frames import REQUEST, encode_small
from farcall.testing.faults import Faults
from farcall.transport.interface import Transport, TransportBroken
from farcall.transport.unix import UnixListener, dial_unix


@contextmanager
def wrapped_pair(faults: Faults) -> Iterator[tuple[Transport, Transport]]:
    """A connection with faults at its near end."""
    listener = UnixListener()
    dialled = dial_unix(listener.address, LONG_S)
    accepted = None
    while accepted is None:
        accepted = listener.accept()
    listener.close()
    near = faults.wrap_transport(dialled, "w0", "w1", lambda call_id, why: None)
    try:
        yield near, accepted
    finally:
        near.close()
        accepted.close()


FRAME = encode_small(REQUEST, 0, 1, b"pm\0f", b"", b"payload")
STREAM = b"".join(with_number(FRAME, number) for number in range(100))


def test_what_was_written_before_a_close_arrives():
    with wrapped_pair(Faults()) as (near, far):
        send_all(far, [b"never read"])
        send_all(near, [STREAM])
        near.close()
        assert receive_exactly(far, len(STREAM)) == STREAM
        with pytest.raises((AssertionError, TransportBroken)):
            receive_exactly(far, 1)  # its end, or a reset because something was not read


def test_what_the_peer_wrote_before_it_closed_arrives():
    with wrapped_pair(Faults()) as (near, far):
        send_all(far, [b"last words"])
        far.close()
        send_all(near, [FRAME])
        assert receive_exactly(near, 10) == b"last words"
        wait_for_end(near)


def test_ends_pass_one_by_one():
    with wrapped_pair(Faults()) as (near, far):
        send_all(near, [FRAME])
        near.end_sending()
        assert receive_exactly(far, len(FRAME)) == FRAME
        wait_for_end(far)
        send_all(far, [b"back"])
        assert receive_exactly(near, 4) == b"back"
        far.end_sending()
        wait_for_end(near)
