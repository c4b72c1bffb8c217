"""Frames whose bytes are not kept, and what comes in their place if the connection loses them.

    frame                lost: the peer has not got all of it
    large request        its call fails, "not_sent"; its remains go
    large answer         its caller gets a failure, "executed"; its remains go
    either of them       device memory that was lent for it is free again: only the message named it
    large letter         goes again: its memory is a gradient's, which nobody changes while we hold it
    offer of a segment   is forgotten, and made again when the segment is next wanted

Remains are what both ends count (`remains_of`). All of this runs on the I/O thread, when a link is attached to a new
connection, and only gives bytes or leaves word; it must neither block nor call user code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farcall.errors import AnswerLost
from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, LETTER, REQUEST, RESPONSE, Frame, Piece, Ticket, encode_small
from farcall.protocol.session import Kept, Unkept, remains_of
from farcall.serialize import encode_failure

__all__ = ["NOBODYS", "LostOffer", "unkept_for"]


class _Nobodys:
    """A large frame that nobody misses."""

    __slots__ = ()

    def lost(self) -> Sequence[Kept]:
        return ()

    def pieces(self) -> Sequence[Piece]:
        return ()


NOBODYS: Unkept = _Nobodys()


class _LargeRequest:
    __slots__ = ("_call_id", "_fail_call", "_notes", "_tickets", "_withdraw")

    def __init__(
        self,
        call_id: int,
        notes: bytes,
        tickets: Sequence[Ticket],
        fail_call: Callable[[int, str], None],
        withdraw: Callable[[], None],
    ) -> None:
        self._withdraw = withdraw
        self._call_id = call_id
        self._notes = notes
        self._tickets = tickets
        self._fail_call = fail_call

    def lost(self) -> Sequence[Kept]:
        self._withdraw()
        self._fail_call(self._call_id, "the connection broke before all of the request had arrived: it did not run")
        return (remains_of(self._notes, self._tickets),)

    def pieces(self) -> Sequence[Piece]:
        raise AssertionError("a request is never sent twice")


class _LargeAnswer:
    __slots__ = ("_call_id", "_here", "_notes", "_size_bytes", "_tickets", "_withdraw")

    def __init__(
        self,
        call_id: int,
        notes: bytes,
        tickets: Sequence[Ticket],
        size_bytes: int,
        here: WorkerInfo,
        withdraw: Callable[[], None],
    ) -> None:
        self._withdraw = withdraw
        self._call_id = call_id
        self._notes = notes
        self._tickets = tickets
        self._size_bytes = size_bytes
        self._here = here

    def lost(self) -> Sequence[Kept]:
        self._withdraw()
        error = AnswerLost(
            f"{self._here.name} executed the function, but the connection broke before all of its answer, "
            f"{self._size_bytes} bytes, had arrived, and it is not kept"
        )
        payload = bytes(encode_failure(error, self._here).payload)
        # First what came with the answer, then its caller learns that nothing else comes.
        remains = remains_of(self._notes, self._tickets)
        return remains, encode_small(FAILURE, 0, self._call_id, b"", b"", payload)

    def pieces(self) -> Sequence[Piece]:
        raise AssertionError("an answer's memory is the user's again")


class _LargeLetter:
    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def lost(self) -> Sequence[Kept]:
        return (self,)

    def pieces(self) -> Sequence[Piece]:
        return self._pieces


class LostOffer:
    """A frame with which a descriptor went."""

    __slots__ = ("_withdraw",)

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self._withdraw = withdraw

    def lost(self) -> Sequence[Kept]:
        self._withdraw()
        return ()

    def pieces(self) -> Sequence[Piece]:
        raise AssertionError("an offer is made anew")


def unkept_for(
    frame: Frame,
    placed: Sequence[memoryview | Ticket],
    pieces: Sequence[Piece],
    here: WorkerInfo,
    fail_call: Callable[[int, str], None],
    withdraw: Callable[[], None],
) -> Unkept:
    """What to keep in the place of a large frame. ``withdraw`` takes back what only its payload names."""
    kind, call_id, notes = frame.kind, frame.call_id, frame.notes
    if kind == LETTER:
        return _LargeLetter(pieces)
    tickets = [ticket for ticket in placed if isinstance(ticket, Ticket)]
    if kind == REQUEST:
        return _LargeRequest(call_id, notes, tickets, fail_call, withdraw)
    assert kind in (RESPONSE, FAILURE)
    return _LargeAnswer(call_id, notes, tickets, sum(map(len, pieces)), here, withdraw)
