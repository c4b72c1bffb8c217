"""The session by itself: what is kept, what is written again, and what its states allow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import REQUEST, RESPONSE, Piece, Ticket, encode_small, numbered
from farcall.protocol.notes import Notes, decode_notes, encode_notes
from farcall.protocol.session import (
    ACKNOWLEDGE_BYTES,
    ACKNOWLEDGE_FRAMES,
    Kept,
    Session,
    SessionError,
    State,
    remains_of,
)

A, B, C, Z, SORRY, REMAINS = (encode_small(REQUEST, 0, 1, b"", b"", word) for word in b"a b c z sorry remains".split())


class Large:
    """A large frame; in its place comes ``instead``, or itself if that is None."""

    def __init__(self, *instead: bytes, again: Sequence[Piece] = ()) -> None:
        self._instead: Sequence[Kept] = (self,) if again else instead
        self._again = again

    def lost(self) -> Sequence[Kept]:
        return self._instead

    def pieces(self, number: int) -> Sequence[Piece]:
        return [str(number).encode(), *self._again]


def broken(*kept: Kept) -> Session:
    session = connected(*kept)
    session.broke()
    return session


def connected(*kept: Kept) -> Session:
    session = Session()
    assert [session.write(frame) for frame in kept] == list(range(len(kept)))
    return session


def test_what_the_peer_has_is_not_written_again() -> None:
    session = broken(A, B, C)
    assert session.resume() == 0
    assert session.resumed(2) == [numbered([C], 2)]
    assert list(session.kept) == [C]
    assert session.state is State.CONNECTED


def test_what_was_lost_twice_is_written_twice() -> None:
    session = broken(A, B)
    session.resume()
    assert session.resumed(0) == [A, numbered([B], 1)]
    session.broke()
    session.resume()
    assert session.resumed(1) == [numbered([B], 1)]


def test_a_connection_that_breaks_while_it_is_resumed_changes_nothing() -> None:
    session = broken(A)
    session.resume()
    session.broke()
    assert session.resume() == 0
    assert session.resumed(0) == [A]


def test_a_large_frame_that_is_lost_says_what_comes_instead() -> None:
    session = broken(A, Large(SORRY, REMAINS), Large(), Z)
    session.resume()
    assert session.resumed(1) == [numbered([SORRY], 1), numbered([REMAINS], 2), numbered([Z], 3)]
    assert session.written == 4
    session.on_acknowledged(4)  # as the peer counts: 1 before, 3 since
    assert not session.kept


def test_a_large_frame_that_can_be_written_again_is() -> None:
    large = Large(again=[b"head", b"tail"])
    session = broken(A, large)
    session.resume()
    assert session.resumed(1) == [b"1", b"head", b"tail"]
    assert list(session.kept) == [large]


def test_a_large_frame_that_arrived_is_forgotten() -> None:
    session = broken(Large(SORRY))
    session.resume()
    assert session.resumed(1) == []


def test_an_old_acknowledgement_changes_nothing() -> None:
    session = connected(A, B, C)
    for count in (2, 1, 2):
        session.on_acknowledged(count)
        assert list(session.kept) == [C]


def test_an_acknowledgement_of_more_than_there_is_leaves_nothing_below_zero() -> None:
    session = connected(A)
    session.on_acknowledged(5)
    assert (list(session.kept), session.acknowledged) == ([], 5)


@pytest.mark.parametrize("count", [-1, 1, 4])
def test_a_peer_that_counts_what_cannot_be_ends_the_session(count: int) -> None:
    session = connected(A, B, C)
    session.on_acknowledged(2)
    session.broke()
    session.resume()
    with pytest.raises(SessionError, match=str(count)):
        session.resumed(count)
    assert session.state is State.DEAD
    assert not session.kept


def test_a_frame_that_has_not_left_is_not_counted() -> None:
    session = connected(A)
    session.write(B)
    session.unwrite()
    assert (session.write(C), list(session.kept)) == (1, [A, C])
    assert session.has_all(2)
    session.keep_nothing()
    session.write(B)
    session.unwrite()
    assert session.written == 2


def test_a_slip_in_the_count_of_what_is_kept_ends_the_session() -> None:
    session = connected(A, B)
    session.kept.pop()
    session.broke()
    session.resume()
    with pytest.raises(SessionError, match="1 are kept"):
        session.resumed(1)
    assert session.state is State.DEAD


def test_what_cannot_be_sent_again_ends_the_session() -> None:
    class Unlucky(Large):
        def lost(self) -> Sequence[Kept]:
            raise MemoryError("there is no more")

    session = broken(A, Unlucky(), Z)
    session.resume()
    with pytest.raises(SessionError, match="there is no more"):
        session.resumed(0)
    assert (session.state, list(session.kept)) == (State.DEAD, [])


def test_only_what_the_table_allows() -> None:
    session = Session()
    with pytest.raises(SessionError, match="connected"):
        session.resume()
    with pytest.raises(SessionError, match="connected"):
        session.resumed(0)
    session.end()
    session.broke()
    assert session.state is State.DEAD
    with pytest.raises(SessionError, match="dead"):
        session.resume()


def test_acknowledgements_become_due_by_frames_and_by_bytes() -> None:
    session = Session()
    session.received = ACKNOWLEDGE_FRAMES
    assert session.received >= session.due_at
    assert session.acknowledgement(1000) == ACKNOWLEDGE_FRAMES
    assert session.received < session.due_at == 2 * ACKNOWLEDGE_FRAMES
    assert session.due_at_bytes == 1000 + ACKNOWLEDGE_BYTES


def test_remains_carry_what_both_ends_count_and_create_nothing() -> None:
    notes = encode_notes(Notes(context_id=3, message_id=4, origin="here"))
    decoder = FrameDecoder()
    ticket = Ticket(5, 6, 7)
    data = remains_of(notes, [ticket])
    decoder.writable()[: len(data)] = data
    (frame,) = decoder.received(len(data))
    assert (frame.kind, frame.flags, frame.call_id, frame.function) == (RESPONSE, 0, 0, b"")
    assert decode_notes(frame.notes) == Notes(context_id=3, message_id=4)
    assert list(frame.buffers) == [ticket]
    assert remains_of(b"", []) == encode_small(RESPONSE, 0, 0, b"", b"", b"")
