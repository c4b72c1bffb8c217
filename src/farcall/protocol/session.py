"""A conversation of two members that outlives its connections: which frames are sent again, and which never.

Each end counts the frames it received in full, and keeps those it wrote until the other end has counted them. After a
break both ends say their count over a new connection, and each writes again what the other has not got: so every
frame arrives once, in order, whatever the byte at which a connection broke.

    state      event                                          becomes
    connected  the connection broke (``broke``)               broken: nothing is read or written, ``received`` is final
    broken     a new connection to the same member            resuming: our ``received`` is told (``resume``)
    resuming   that connection broke, too (``broke``)         broken
    resuming   the peer's count came (``resumed``)            connected: what the peer lacks is written again
    any        the peer is gone, is another incarnation, or
               counts what was never written (``end``)        dead, for good; nothing is kept

Who writes a frame appends it to ``kept``, in the order of the wire and before its first byte leaves: that is all that
a call pays. ``kept`` holds the bytes of a small frame, and an `Unkept` for a large one, whose memory is its sender's
again as soon as the kernel has it. What comes in the place of an `Unkept` that is lost, it says itself.

The receiver acknowledges every ACKNOWLEDGE_FRAMES frames or ACKNOWLEDGE_BYTES bytes, whichever comes first, so what is
kept is bounded by that and by what the connection holds. No timers, no bytes, no threads in here: whoever writes holds
the link's write lock, whoever counts is the link's reader, and `deque` bears both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from farcall.errors import NetworkError
from farcall.protocol.frames import RESPONSE, Piece, Ticket, encode_frame
from farcall.protocol.notes import without_creation

ACKNOWLEDGE_FRAMES = 64
ACKNOWLEDGE_BYTES = 256 * 1024


class SessionError(NetworkError):
    """The two ends do not speak of the same conversation: it cannot go on."""


class State(Enum):
    """See the table above."""

    CONNECTED = "connected"
    BROKEN = "broken"
    RESUMING = "resuming"
    DEAD = "dead"


class Unkept(Protocol):
    """A frame that was written and whose bytes are not kept."""

    def lost(self) -> Sequence[Kept]:
        """The peer has not got it: what is written in its place. Must neither block nor raise."""

    def pieces(self) -> Sequence[Piece]:
        """The bytes of one that ``lost`` gave again."""


Kept: TypeAlias = bytes | Unkept


class Session:
    """One end of a session."""

    __slots__ = ("acknowledged", "due_at", "due_at_bytes", "kept", "received", "sent_again", "state")

    def __init__(self) -> None:
        self.state: State = State.CONNECTED
        self.kept: deque[Kept] = deque()
        """What was written and not acknowledged, oldest first."""
        self.acknowledged: int = 0
        """How many of our frames the peer has, as far as it said so."""
        self.received: int = 0
        """How many of the peer's frames came in full. Counted by the reader."""
        self.sent_again: int = 0
        """How many of our frames the last resumption wrote again."""
        self.due_at: int = ACKNOWLEDGE_FRAMES
        self.due_at_bytes: int = ACKNOWLEDGE_BYTES
        """An acknowledgement is due once so many frames or bytes have come."""

    def keep_nothing(self) -> None:
        """For a conversation that has one connection only: nothing is kept, and no acknowledgement becomes due."""
        self.kept = deque(maxlen=0)
        self.due_at = self.due_at_bytes = 1 << 62

    def acknowledgement(self, bytes_received: int) -> int:
        """What to tell the peer now."""
        self.due_at = self.received + ACKNOWLEDGE_FRAMES
        self.due_at_bytes = bytes_received + ACKNOWLEDGE_BYTES
        return self.received

    def on_acknowledged(self, count: int) -> None:
        """The peer has received ``count`` frames; an old acknowledgement changes nothing."""
        more = count - self.acknowledged
        if more > 0:
            kept = self.kept
            # No more than there are: one that was repeated on its way (a test's doing) may have been counted twice.
            for _ in range(min(more, len(kept))):
                kept.popleft()
            self.acknowledged = count

    def broke(self) -> None:
        """The connection is gone, and nobody reads from it or writes to it any more."""
        if self.state is not State.DEAD:
            self.state = State.BROKEN

    def resume(self) -> int:
        """There is a new connection to the same member: the count to tell it."""
        if self.state is not State.BROKEN:
            raise SessionError(f"a session that is {self.state.value} cannot be resumed")
        self.state = State.RESUMING
        return self.received

    def resumed(self, received: int) -> list[Piece]:
        """The peer has ``received`` frames: the pieces of all others, to be written first of all, and kept anew."""
        if self.state is not State.RESUMING:
            raise SessionError(f"a session that is {self.state.value} was not to be resumed")
        missing = received - self.acknowledged
        if not 0 <= missing <= len(self.kept):
            written = self.acknowledged + len(self.kept)
            self.end()
            raise SessionError(f"the peer counts {received} frames, of {written} and not under {self.acknowledged}")
        self.on_acknowledged(received)
        self.state = State.CONNECTED
        # In place: the writer has a reference to it.
        lost = list(self.kept)
        self.kept.clear()
        pieces: list[Piece] = []
        for frame in lost:
            for again in (frame,) if isinstance(frame, bytes) else frame.lost():
                self.kept.append(again)
                if isinstance(again, bytes):
                    pieces.append(again)
                else:
                    pieces.extend(again.pieces())
        self.sent_again = len(self.kept)
        return pieces

    def end(self) -> None:
        """The peer is dead, or does not speak of this session."""
        self.state = State.DEAD
        self.kept.clear()


def remains_of(notes: bytes, tickets: Sequence[Ticket]) -> bytes:
    """What is left of a message that is lost: an answer to a call that nobody makes.

    Leases of shared memory, references and recorded gradients are counted by both ends, and must not get lost alone:
    the receiver of this reads nothing, runs nothing, and gives up what came with it.
    """
    return b"".join(encode_frame(RESPONSE, 0, 0, b"", without_creation(notes), b"", tickets))
