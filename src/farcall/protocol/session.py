"""A conversation of two members that outlives its connections: which frames are retransmitted, and which never.

Each end counts the frames it received in full, and keeps the frames it wrote until the other end acknowledges them.
After a break each end reports its count over a new connection and retransmits the frames that the other lacks. So every
frame arrives once, in order, whatever the byte at which a connection broke. Each carries its number in this count
(`frames.py`), given when it leaves: what leaves in place of a lost frame may be several frames, or none, which
shifts the numbers of those behind it.

    state      event                                          becomes
    connected  the connection broke (``broke``)               broken: no reads or writes, ``received`` is final
    broken     a new connection to the same member            resuming: reports our ``received`` (``resume``)
    resuming   that connection broke, too (``broke``)         broken
    resuming   the peer's count came (``resumed``)            connected: retransmits the frames that the peer lacks
    any        the peer is gone, is another incarnation, or
               counts frames never written (``end``)          dead for ever; keeps nothing

The writer of a frame appends it to ``kept`` and counts it, in wire order and before its first byte leaves: that, and
its number, is the whole cost to a call. ``kept`` holds the bytes of a small frame, and an `Unkept` for a large one,
whose memory the sender gets back as soon as the kernel has it. A lost `Unkept` names its own replacement.

The receiver acknowledges every ACKNOWLEDGE_FRAMES frames or ACKNOWLEDGE_BYTES bytes, whichever comes first; that, and
the capacity of the connection, bound ``kept``. No timers, I/O or threads in here: the writer holds the link's write
lock, the link's reader counts, and `deque` is safe for both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeAlias

from farcall.errors import NetworkError
from farcall.protocol.frames import RESPONSE, Piece, Ticket, encode_frame, numbered
from farcall.protocol.notes import without_creation

ACKNOWLEDGE_FRAMES = 64
ACKNOWLEDGE_BYTES = 256 * 1024


class SessionError(NetworkError):
    """The two ends disagree about the session: it cannot go on."""


class State(Enum):
    """The states of the table above."""

    CONNECTED = "connected"
    BROKEN = "broken"
    RESUMING = "resuming"
    DEAD = "dead"


class Unkept(Protocol):
    """A written frame whose bytes are not kept."""

    def lost(self) -> Sequence[Kept]:
        """The frames to write in its place, since the peer lacks it. Must neither block nor raise."""

    def pieces(self, number: int) -> Sequence[Piece]:
        """The bytes of a frame that ``lost`` returned, with this number."""


Kept: TypeAlias = bytes | Unkept


class Session:
    """One end of a session."""

    __slots__ = ("acknowledged", "due_at", "due_at_bytes", "kept", "received", "sent_again", "state", "written")

    def __init__(self) -> None:
        # All fields are mutable: the writer appends to ``kept`` and counts, the reader counts and acknowledges.
        self.state: State = State.CONNECTED
        self.kept: deque[Kept] = deque()
        """Frames written and not yet acknowledged, oldest first."""
        self.written: int = 0
        """How many frames we have written: the number of the next one."""
        self.acknowledged: int = 0
        """How many of our frames the peer has acknowledged."""
        self.received: int = 0
        """How many of the peer's frames came in full. Counted by the reader."""
        self.sent_again: int = 0
        """How many of our frames the last resumption retransmitted."""
        self.due_at: int = ACKNOWLEDGE_FRAMES
        self.due_at_bytes: int = ACKNOWLEDGE_BYTES
        """An acknowledgement is due once this many frames or bytes have come."""

    def keep_nothing(self) -> None:
        """For a conversation over a single connection: keep no frame, and never let an acknowledgement become due."""
        self.kept = deque(maxlen=0)
        self.due_at = self.due_at_bytes = 1 << 62

    def acknowledgement(self, bytes_received: int) -> int:
        """The count to acknowledge now; sets when the next acknowledgement is due."""
        self.due_at = self.received + ACKNOWLEDGE_FRAMES
        self.due_at_bytes = bytes_received + ACKNOWLEDGE_BYTES
        return self.received

    def on_acknowledged(self, count: int) -> None:
        """The peer has received ``count`` frames; an old acknowledgement changes nothing."""
        more = count - self.acknowledged
        if more > 0:
            kept = self.kept
            self.acknowledged = count
            # No more than are kept: the peer counts a frame twice if a test's transport duplicates it.
            for _ in range(min(more, len(kept))):
                kept.popleft()

    def write(self, frame: Kept) -> int:
        """Count a frame as written, before its first byte leaves. Returns its number. Needs the write lock."""
        number = self.written
        self.kept.append(frame)
        self.written = number + 1
        return number

    def unwrite(self) -> None:
        """The frame of the last `write` has not left, not a byte of it. Needs the write lock."""
        if self.kept:  # it keeps nothing of a conversation over a single connection
            self.kept.pop()
        self.written -= 1

    def has_all(self, received: int) -> bool:
        """Does the peer, which reports ``received`` frames, have all that were written? Needs the write lock."""
        return self.written == received

    def broke(self) -> None:
        """The connection is gone; its reader and its writers have stopped."""
        if self.state is not State.DEAD:
            self.state = State.BROKEN

    def resume(self) -> int:
        """A new connection to the same member stands: the count to report over it."""
        if self.state is not State.BROKEN:
            raise SessionError(f"a session that is {self.state.value} cannot be resumed")
        self.state = State.RESUMING
        return self.received

    def resumed(self, received: int) -> list[Piece]:
        """The peer has ``received`` frames: the pieces of all later ones, to write before anything else; kept anew."""
        if self.state is not State.RESUMING:
            raise SessionError(f"a session that is {self.state.value} was not to be resumed")
        counts = f"the peer counts {received} frames, of {self.written} and not under {self.acknowledged}"
        if not self.acknowledged <= received <= self.written:
            self.end()
            raise SessionError(counts)
        if self.acknowledged + len(self.kept) != self.written:
            counts += f", but {len(self.kept)} are kept: please report this"
            self.end()
            raise SessionError(counts)
        self.on_acknowledged(received)
        lost = list(self.kept)
        self.kept.clear()
        self.written = received
        pieces: list[Piece] = []
        try:
            for frame in lost:
                for again in (frame,) if isinstance(frame, bytes) else frame.lost():
                    number = self.write(again)
                    if isinstance(again, bytes):
                        pieces.append(numbered(again, number))
                    else:
                        pieces.extend(again.pieces(number))
        except Exception as error:  # no memory, for one. A second attempt would lose frames twice.
            self.end()
            raise SessionError(f"what was lost cannot be sent again: {error!r}") from error
        self.state = State.CONNECTED
        self.sent_again = len(self.kept)
        return pieces

    def end(self) -> None:
        """The peer is dead, or disagrees about this session."""
        self.state = State.DEAD
        self.kept.clear()


def remains_of(notes: bytes, tickets: Sequence[Ticket]) -> bytes:
    """The frame that replaces a lost message: a response to call 0, which nobody makes.

    Both ends count leases of shared memory, references and recorded gradients, so these must not get lost with the
    message: the receiver of this frame reads no body, runs nothing, and releases what the notes and tickets carry.
    """
    return b"".join(encode_frame(RESPONSE, 0, 0, b"", without_creation(notes), b"", tickets))
