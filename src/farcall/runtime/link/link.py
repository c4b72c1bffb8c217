"""The link to one peer, over successive connections: a link of the core, and what becomes of it when a connection breaks.

The core moves the frames, counts them, and sends again what a peer lacks (docs/design/CORE.md). Here is what it does not
know: which transport it has, whether another connection may follow, and who asks for one.

    state          event                                         becomes
    down           `start`, `connect`: the first connection      up
    up             the stream ends, or breaks; `interrupt`       down: ``on_interrupted`` says whether another may follow
    up             the peer comes back already (`break_off`)     down
    down           `attach`: another connection                  up: goes on where the peer's count says
    down           ``on_interrupted`` says False                 dead: calls ``on_broken``
    down           nobody makes a connection (`sleep`)           down, and asleep
    down, asleep   something is to be sent                       down: calls ``on_wanted``
    any            `die`; an invalid frame; `abort`              dead
    any            `close`                                       dead, without a call of ``on_broken``

The I/O thread makes all changes but `interrupt`, `abort` and `wake`, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from farcall.core.contract import Core, CoreError, Piece, Traffic
from farcall.errors import Delivery, NetworkError, PeerDead, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.transport.interface import Absent, Transport

LOOK_S = 0.02


def peer_dead(peer: WorkerInfo, how: str, delivery: Delivery, incarnation: str) -> PeerDead:
    """The error for a call to a member that is not there any more; ``how`` follows its name."""
    fate = "the call was not sent" if delivery is Delivery.NOT_SENT else "whether the call ran there is unknown"
    return PeerDead(f"{peer.name} {how}; {fate}", delivery, peer, incarnation)


class SessionError(NetworkError):
    """The two ends disagree about the session: it cannot go on."""


class Link:
    """The link to one peer. Mutable: its transport, whether it is up or asleep, why it died; changed as above."""

    __slots__ = (
        "__weakref__",
        "_core",
        "_instead",
        "_loop",
        "_on_broken",
        "_on_interrupted",
        "_on_wanted",
        "_reason",
        "_told",
        "_closed",
        "_final",
        "_forget_end",
        "acknowledged",
        "asleep",
        "broken",
        "incarnation",
        "number",
        "peer",
        "received",
        "sent_again",
        "transport",
        "up",
    )

    def __init__(
        self,
        core: Core,
        peer: WorkerInfo,
        transport: Transport,
        loop: Loop,
        on_broken: Callable[[str], None],
        *,
        instead: Callable[[bytes], bytes | None],
        on_interrupted: Callable[[str], bool] = lambda reason: False,
        on_wanted: Callable[[], None] = lambda: None,
        forget_end: Callable[[int], None] = lambda link: None,
        incarnation: str = "",
    ) -> None:
        """``instead(head)`` makes what is sent in the place of a large message that a connection has lost.

        ``on_interrupted(reason)``, called on the I/O thread when a connection broke, says whether another may follow.
        ``on_wanted()`` is called, from any thread, when something is to be sent over a link that is asleep.
        """
        self._core = core
        self.number: int = core.open_link()
        """The core's name for it."""
        self.peer: WorkerInfo = peer
        self.incarnation: str = incarnation
        self.transport: Transport = transport
        self.up: bool = False
        """Is there a connection that works, as far as is known?"""
        self.asleep: bool = False
        """Is it down, with nobody dialling? """
        self.broken: str | None = None
        """Why the link will not work any more, or None."""
        self.received: int = 0
        """How many of the peer's frames came in full; final while it is down."""
        self.acknowledged: int = 0
        self.sent_again: int = 0
        self._loop = loop
        self._instead = instead
        self._forget_end = forget_end
        self._on_broken = on_broken
        self._on_interrupted = on_interrupted
        self._on_wanted = on_wanted
        self._reason = ""
        self._final = False
        self._told = False
        self._closed = Gate()

    @property
    def has_heard(self) -> bool:
        """Has anything come from the peer?"""
        return self.heard > 0

    @property
    def heard(self) -> float:
        """When bytes came last, over any connection: the sign of life."""
        return self._core.traffic(self.number).heard

    @property
    def traffic(self) -> Traffic:
        """Its bytes and frames so far."""
        return self._core.traffic(self.number)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()

    # ------------------------------------------------------------------ sending

    def post(
        self,
        head: bytes,
        pieces: Sequence[Piece] = (),
        deadline: float = NEVER,
        *,
        more: bool = False,
        patient: bool = False,
        descriptor: int = -1,
    ) -> None:
        """Send one frame. Raises where the link is dead, or has no room before ``deadline``."""
        try:
            self._core.post(self.number, head, pieces, deadline, more=more, patient=patient, descriptor=descriptor)
        except CoreError as error:
            if self.broken is not None:
                raise self.dead(Delivery.NOT_SENT) from None
            raise RpcTimeout(
                f"{self.peer.name} {'does not read' if self.up else 'cannot be reached'}: {error}", Delivery.NOT_SENT
            ) from None

    def sleep(self) -> None:
        """On the I/O thread: nobody dials before something is to be sent."""
        self.asleep = True
        self._core.sleep(self.number)

    def on_wanted(self) -> None:
        """On the I/O thread: something is to be sent over a link that is asleep."""
        if self.asleep and self.broken is None:
            self.asleep = False
            self._on_wanted()

    def send_last(self, frame: bytes, received: int = -1) -> bool:
        """Send ``frame``, and nothing behind it until `go_on` or another connection. See `Core.send_last`."""
        return self.up and self._core.send_last(self.number, frame, received)

    def go_on(self) -> None:
        """Send what has waited behind `send_last`."""
        self._core.go_on(self.number)

    # ------------------------------------------------------------------ connections

    def start(self, first_bytes: bytes = b"") -> None:
        """Begin to read. ``first_bytes`` came behind the handshake and are frames already."""
        if not isinstance(self.transport, Absent):
            self._attach(self.transport, first_bytes, 0)

    def connect(self, transport: Transport, first_bytes: bytes) -> None:
        """On the I/O thread: the first connection, or the first that the peer knows of. No frame has come before."""
        self.break_off("a first connection took its place")
        try:
            self._attach(transport, first_bytes, 0)
        except SessionError as error:  # also where the node ends, and closes the link, at this very moment
            why = str(error)
            self._loop.call_soon(lambda: self.die(why))

    def attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        """On the I/O thread: go on over another connection to the same member, which has ``received`` frames.

        Closes ``transport`` and raises ``SessionError`` if the session cannot go on.
        """
        self._attach(transport, first_bytes, received)

    def _attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        core = self._core
        try:
            instead = [self._instead(head) for head in core.lost(self.number, received)]
            connection, first_bytes = transport.connection(first_bytes)
            # Before the core reads: what it finds may be answered at once.
            self.transport, self.up, self.asleep, self._reason = transport, True, False, ""
            self.sent_again = core.attach(self.number, connection, received, instead, first_bytes)
            self.acknowledged = received
        except CoreError as error:
            self.up = False
            transport.close()
            raise SessionError(str(error)) from error

    def on_ended(self, why: str, final: bool) -> None:
        """On the I/O thread: the core has met the end of the connection."""
        if self.broken is not None or not self.up:
            return
        reason = self._reason or why or "the peer closed the connection"
        self._detach()
        if self._final or final:
            self.die(reason)
            return
        returns = False
        try:
            returns = self._on_interrupted(reason)
        finally:
            if not returns:
                self.die(reason)  # also if no thread can be started to dial: no caller may wait for ever

    def _detach(self) -> None:
        self.up = False
        self._closed.open()
        self.received = self._core.detach(self.number)
        self._forget_end(self.number)
        self.transport.close()

    def interrupt(self, reason: str) -> None:
        """Give up the connection, not the link: it is silent, or the peer has lost it. From any thread."""
        self._reason = self._reason or reason
        self.transport.interrupt()  # the core meets the end

    def break_off(self, reason: str) -> None:
        """On the I/O thread: like ``interrupt``, but on return every frame that came is counted."""
        if self.broken is None and self.up:
            self._detach()

    # ------------------------------------------------------------------ ending

    def die(self, reason: str) -> None:
        """On the I/O thread: no other connection will follow. Calls ``on_broken``, once."""
        if self._told or self.broken is not None:
            return
        self._told = True
        self.close(reason)
        self._on_broken(reason)

    def abort(self, reason: str) -> None:
        """End the link because of what the peer sent. From any thread."""
        self._loop.call_soon(lambda: self.die(reason))

    def end_sending(self) -> None:
        """Send what waits, then end this direction of the stream; reading goes on."""
        if self.up:
            self._core.end_sending(self.number)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing earlier could destroy the bytes that we sent last."""
        if self.up:
            self._closed.wait(max(0.0, deadline - monotonic()))

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this dead link."""
        return peer_dead(self.peer, f"is gone: {self.broken}", delivery, self.incarnation)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close the link, for ever. Idempotent."""
        if self.broken is None:
            self.broken = reason
        self.up = False
        self._closed.open()
        try:
            self._core.end(self.number)
        except CoreError:
            pass  # it has stopped
        self.transport.close()
