"""Frames whose bytes are not kept, and the frames sent in their place if the connection loses them.

    frame                lost: the peer has not got all of it
    large request        its call fails, "not_sent"; its remains go
    large answer         its caller gets a failure, "executed"; its remains go
    either of them       device memory that was lent for it is free again: only the message named it
    large letter         goes again: its memory is a gradient's, which nobody changes while we hold it, or a copy
    offer of a segment   is forgotten, and made again when the segment is next wanted

The remains of a message are what both ends count (`remains_of`). All of this runs on the I/O thread, when a link is
attached to a new connection. It only returns bytes or records a loss; it must neither block nor call user code. A large
message whose sender still waits goes on instead (`protocol/chunks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farcall.errors import AnswerLost
from farcall.ids import WorkerInfo
from farcall.protocol.chunks import Instead
from farcall.protocol.frames import FAILURE, LETTER, REQUEST, RESPONSE, Frame, Piece, Ticket, encode_small
from farcall.protocol.session import Kept, Unkept, remains_of
from farcall.serialize import encode_failure


class LostOffer:
    """A frame that carried a descriptor: if it is lost, ``withdraw`` forgets the offer."""

    __slots__ = ("_withdraw",)

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self._withdraw = withdraw

    def lost(self) -> Sequence[Kept]:
        self._withdraw()
        return ()

    def pieces(self, number: int) -> Sequence[Piece]:
        raise AssertionError("an offer is made anew")


NOBODYS: Unkept = LostOffer(lambda: None)
"""A frame whose loss has no consequences."""


def nothing_instead() -> Sequence[bytes]:
    """The replacement of a message whose loss has no consequences."""
    return ()


def instead_of(
    frame: Frame,
    placed: Sequence[memoryview | Ticket],
    size_bytes: int,
    *,
    here: WorkerInfo,
    fail_call: Callable[[int, str], None],
    withdraw: Callable[[], None],
) -> Instead | None:
    """What to send in the place of a lost large message; None: the message itself.

    ``withdraw`` takes back what only its payload names.
    """
    # The functions below must not hold the frame: its buffers are to be freed with the call.
    kind, call_id, notes = frame.kind, frame.call_id, frame.notes
    if kind == LETTER:
        return None
    tickets = [ticket for ticket in placed if isinstance(ticket, Ticket)]

    def instead_of_request() -> Sequence[bytes]:
        withdraw()
        fail_call(call_id, "the connection broke before all of the request had arrived: it did not run")
        return (remains_of(notes, tickets),)

    def instead_of_answer() -> Sequence[bytes]:
        withdraw()
        error = AnswerLost(
            f"{here.name} executed the function, but the connection broke before all of its answer, "
            f"{size_bytes} bytes, had arrived, and it is not kept"
        )
        payload = bytes(encode_failure(error, here).payload)
        # In this order: the caller gets what came with the answer before the failure ends its call.
        return remains_of(notes, tickets), encode_small(FAILURE, 0, call_id, b"", b"", payload)

    if kind == REQUEST:
        return instead_of_request
    assert kind in (RESPONSE, FAILURE)
    return instead_of_answer
