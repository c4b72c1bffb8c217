"""The session by itself: what is kept, what is written again, and what its states allow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import RESPONSE, Piece, Ticket, encode_small
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


class Large:
    """A large frame; in its place comes ``instead``, or itself if that is None."""

    def __init__(self, *instead: bytes, again: Sequence[Piece] = ()) -> None:
        self._instead: Sequence[Kept] = (self,) if again else instead
        self._again = again

    def lost(self) -> Sequence[Kept]:
        return self._instead

    def pieces(self) -> Sequence[Piece]:
        return self._again


def broken(*kept: Kept) -> Session:
    session = Session()
    session.kept.extend(kept)
    session.broke()
    return session


def test_what_the_peer_has_is_not_written_again() -> None:
    session = broken(b"a", b"b", b"c")
    assert session.resume() == 0
    assert session.resumed(2) == [b"c"]
    assert list(session.kept) == [b"c"]
    assert session.state is State.CONNECTED


def test_what_was_lost_twice_is_written_twice() -> None:
    session = broken(b"a", b"b")
    session.resume()
    assert session.resumed(0) == [b"a", b"b"]
    session.broke()
    session.resume()
    assert session.resumed(1) == [b"b"]


def test_a_connection_that_breaks_while_it_is_resumed_changes_nothing() -> None:
    session = broken(b"a")
    session.resume()
    session.broke()
    assert session.resume() == 0
    assert session.resumed(0) == [b"a"]


def test_a_large_frame_that_is_lost_says_what_comes_instead() -> None:
    session = broken(b"a", Large(b"sorry", b"remains"), Large(), b"z")
    session.resume()
    assert session.resumed(1) == [b"sorry", b"remains", b"z"]
    session.on_acknowledged(4)  # as the peer counts: 1 before, 3 since
    assert not session.kept


def test_a_large_frame_that_can_be_written_again_is() -> None:
    large = Large(again=[b"head", b"tail"])
    session = broken(large)
    session.resume()
    assert session.resumed(0) == [b"head", b"tail"]
    assert list(session.kept) == [large]


def test_a_large_frame_that_arrived_is_forgotten() -> None:
    session = broken(Large(b"sorry"))
    session.resume()
    assert session.resumed(1) == []


def test_an_old_acknowledgement_changes_nothing() -> None:
    session = Session()
    session.kept.extend((b"a", b"b", b"c"))
    for count in (2, 1, 2):
        session.on_acknowledged(count)
        assert list(session.kept) == [b"c"]


def test_an_acknowledgement_of_more_than_there_is_leaves_nothing_below_zero() -> None:
    session = Session()
    session.kept.append(b"a")
    session.on_acknowledged(5)
    assert (list(session.kept), session.acknowledged) == ([], 5)


@pytest.mark.parametrize("count", [-1, 1, 4])
def test_a_peer_that_counts_what_cannot_be_ends_the_session(count: int) -> None:
    session = Session()
    session.kept.extend((b"a", b"b", b"c"))
    session.on_acknowledged(2)
    session.broke()
    session.resume()
    with pytest.raises(SessionError, match=str(count)):
        session.resumed(count)
    assert session.state is State.DEAD
    assert not session.kept


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
