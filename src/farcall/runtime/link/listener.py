"""The listening end of connections: diallers prove themselves here, and their connections are handed on.

Owns listeners and half-open connections. Nothing that a stranger sends is unpickled or kept: until it has passed the
handshake, a connection holds at most 64 KiB, for at most HANDSHAKE_S, and at most MAX_GUESTS connections do so; when
all places are taken, those who say nothing lose theirs. Runs on the I/O thread.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

from farcall.errors import HandshakeRefused
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import NONCE_BYTES, Hello, Observe, RefusalReason, Refused, Remind, Resume, Side, refuse
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.dialler import check_name
from farcall.secret import Secret
from farcall.transport.address import listen
from farcall.transport.interface import (
    AcceptPostponed,
    DialFailed,
    Listener,
    ListenFailed,
    NotEncrypted,
    Transport,
    TransportError,
)
from farcall.transport.tls import Tls

logger: logging.Logger = logging.getLogger("farcall")

HANDSHAKE_S = 10.0
POSTPONED_S = 0.5
"""How long this node accepts no connections after descriptors ran out."""
MAX_GUESTS = 256
MAX_TOLD = 100
"""How many different refusals are logged and remembered. Bounded, since strangers choose the words in some of them."""


class _Guest:
    """A connection whose dialler has not proved itself yet."""

    __slots__ = ("arrived_at", "deadline", "handshake", "me", "transport", "wire")

    def __init__(
        self, wire: Transport, transport: Transport, me: Hello, handshake: Handshake, arrived_at: float
    ) -> None:
        """``transport``: ``wire``, or TLS over it."""
        self.wire = wire
        self.transport = transport
        self.me = me
        self.handshake = handshake
        self.arrived_at = arrived_at
        self.deadline = arrived_at + HANDSHAKE_S

    @property
    def has_greeted(self) -> bool:
        return self.handshake.peer_claim is not None


class Returning(Protocol):
    """The decision about members that come back to a session (`connector.py`)."""

    def admit(self, peer: Hello, arrived_at: float) -> int | None:
        """The count of frames to send the peer, if any; raises ``HandshakeRefused``."""

    def on_resumed(self, transport: Transport, established: Established) -> None:
        """The answer of `admit` is on its way; takes over the connection."""

    def yield_to(self, peer: Hello) -> None:
        """A member connects for the first time; raises ``HandshakeRefused`` if it is about to let our own dial in."""


class PeerListener:
    """The addresses that a node listens on. Mutable: the guests, the paused listeners, and what was logged."""

    def __init__(self, addresses: Sequence[str], loop: Loop, observers: Secret | None = None) -> None:
        """``observers``: the secret of which observers prove a key; None: that of the members."""
        self._loop = loop
        self._observers = observers
        self._timer = loop.timer(self._show_out_late)
        self._listeners: list[Listener] = []
        self._guests: set[_Guest] = set()
        self._postponed: list[int] = []  # descriptors of listeners that the poller ignores for now
        self._was_short = False
        self._told: set[tuple[str, str]] = set()
        self.refusals: dict[str, str] = {}
        """Why members were refused, by the names that they claimed: for the error that names missing members."""
        self.refused_hosts: dict[str, str] = {}
        """Why connections of no name were, by the addresses of their hosts."""
        self.on_observer: Callable[[Transport, Established], None] = lambda transport, established: transport.close()
        """Takes over the connections of proven observers."""
        failure: ListenFailed | None = None
        for address in addresses:
            try:
                self._listeners.append(listen(address))
            except ListenFailed as error:
                # A node can start without one of its addresses (a sandbox without unix sockets).
                failure = error
                logger.warning("this node cannot be reached over %s: %s", address.partition(":")[0], error)
            except BaseException:
                self.close()
                raise
        if failure is not None and not self._listeners:
            raise failure
        self.addresses: list[str] = [listener.address for listener in self._listeners]

    def open(
        self,
        me: Hello,
        secret: Secret,
        *,
        why_not: Callable[[Hello], str | None],
        on_member: Callable[[Transport, Established], object],
        returning: Returning | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Begin to accept. ``why_not`` says why a proven member is refused; if None, ``on_member`` gets the connection.

        ``returning`` gets members that come back to a session. ``tls`` protects connections over a network.
        """
        self._me = me
        self._secret = secret
        self._why_not = why_not
        self._on_member = on_member
        self._returning = returning
        self._tls = tls
        for listener in self._listeners:
            descriptor = listener.fileno()
            if descriptor is None:
                listener.watch(lambda listener=listener: self._loop.call_soon(lambda: self._accept(listener)))  # type: ignore[misc]
            else:
                self._loop.watch(descriptor, lambda _, listener=listener: self._accept(listener))  # type: ignore[misc]

    def become(self, me: Hello) -> None:
        """Greet diallers with ``me`` from now on."""
        self._me = me

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                wire = listener.accept()
            except AcceptPostponed as error:
                self._postpone(listener, error)
                return
            except TransportError as error:
                logger.error("cannot accept connections any more: %s", error)
                return
            if wire is None:
                return
            if len(self._guests) >= MAX_GUESTS and not self._make_room(wire.peer_host):
                self._tell("too many connections that prove nothing", wire)
                wire.close()
                continue
            try:
                transport = wire if self._tls is None or not wire.needs_encryption else self._tls.accepted(wire)
            except AcceptPostponed as error:
                wire.close()
                self._postpone(listener, error)
                return
            nonce, binding = secrets.token_bytes(NONCE_BYTES), partial(getattr, transport, "binding")
            first, *others = self._secret.values
            me = self._me
            watching = () if self._observers is None else self._observers.values
            handshake = Handshake(Side.LISTENER, me, first, nonce, also=others, observers=watching, binding=binding)
            guest = _Guest(wire, transport, me, handshake, monotonic())
            self._guests.add(guest)
            self._timer.at(guest.deadline)
            descriptor = transport.fileno()
            if descriptor is None:
                transport.watch(lambda guest=guest: self._loop.call_soon(lambda: self._hear(guest)), None)  # type: ignore[misc]
            else:
                self._loop.watch(descriptor, lambda _, guest=guest: self._hear(guest))  # type: ignore[misc]

    def _make_room(self, host: str) -> bool:
        """Dismiss a guest in favour of one from ``host``; False: nobody has to go.

        The host with the most guests loses one, the longest silent first. If that is ``host`` itself, only a silent one
        goes: in a rush of members that start together, who has greeted is about to prove itself.
        """
        counts = Counter(guest.transport.peer_host for guest in self._guests)
        fullest = max(counts, key=lambda each: (counts[each], each == host))
        candidates = [guest for guest in self._guests if guest.transport.peer_host == fullest]
        leaving = min(candidates, key=lambda guest: (guest.has_greeted, guest.arrived_at))
        if leaving.has_greeted and fullest == host:
            return False
        self._dismiss(leaving, "it had proved nothing, and another connection needed its place")
        return True

    def _postpone(self, listener: Listener, error: AcceptPostponed) -> None:
        """Ignore the listener for POSTPONED_S: the poller would report its waiting connections without end."""
        descriptor = listener.fileno()
        if not self._was_short:
            self._was_short = True
            logger.warning("%s: new connections wait; if too many files are open, raise their limit (ulimit -n)", error)
        if descriptor is not None:
            self._loop.silence(descriptor)
            self._postponed.append(descriptor)
            self._timer.at(monotonic() + POSTPONED_S)

    def _hear(self, guest: _Guest) -> None:
        """On the I/O thread: a guest has sent bytes, or ended its stream."""
        if guest not in self._guests:
            return
        buffer = bytearray(16 * 1024)
        established: Established | None = None
        try:
            count = guest.transport.receive_bytes_into(memoryview(buffer))
            if count is None:
                return
            if count == 0 and guest.handshake.peer_claim is None:
                # A mere knock: a member that looks whether this node listens, or a health check.
                self._let_out(guest)
                return
            if count == 0:
                raise DialFailed("the peer closed the connection during the handshake")
            reply, established = guest.handshake.receive(memoryview(buffer)[:count])
            if established is not None:
                check_name(guest.transport, established.peer)
                _check_way(guest.transport, established.peer)
                reply += self._welcome(guest, established.peer)
            if reply and guest.transport.send((reply,)) < len(reply):
                raise DialFailed("the peer does not read")
        except NotEncrypted as error:
            guest.transport = guest.wire
            self._refuse(guest, guest.handshake.unencrypted(error.first_bytes))
            return
        except (HandshakeRefused, TransportError) as error:
            self._refuse(guest, error)
            return
        if established is not None:
            self._guests.discard(guest)
            self._let_go(guest.transport)
            if isinstance(established.peer.purpose, Observe):
                self.on_observer(guest.transport, established)
            elif not isinstance(established.peer.purpose, (Resume, Remind)):
                self._on_member(guest.transport, established)
            elif self._returning is not None:
                self._returning.on_resumed(guest.transport, established)
        elif guest.transport.buffered:
            self._loop.call_soon(lambda: self._hear(guest))  # a poll does not report buffered bytes

    def _refuse(self, guest: _Guest, error: HandshakeRefused | TransportError) -> None:
        if isinstance(error, Refused) and error.farewell:
            try:
                guest.transport.send((error.farewell,))
            except TransportError:
                pass
        if isinstance(error, Refused) and error.reason is RefusalReason.CROSSED:
            self._let_out(guest)  # without a log line: the two are about to be connected by the other dial
            return
        claim = guest.handshake.peer_claim
        if claim is not None and len(self.refusals) < MAX_TOLD:
            self.refusals[claim.member.name] = str(error)
        elif claim is None and len(self.refused_hosts) < MAX_TOLD:
            self.refused_hosts[guest.wire.peer_host] = str(error)
        self._dismiss(guest, str(error))

    def _welcome(self, guest: _Guest, peer: Hello) -> bytes:
        """The bytes to send to a proven ``peer`` behind our proof; raises ``HandshakeRefused``."""
        if isinstance(peer.purpose, Observe):
            return b""
        if not isinstance(peer.purpose, (Resume, Remind)):
            why_not = self._why_not(peer)
            if why_not is not None:
                raise HandshakeRefused(why_not)
            if guest.me is not self._me and peer.is_newcomer:
                # It may have read in our greeting that we are no member, and found a group of its own beside ours.
                raise refuse(RefusalReason.CROSSED, f"{peer.member.name} was greeted before this node became a member")
            if self._returning is not None:
                self._returning.yield_to(peer)
            return b""
        if self._returning is None:
            raise refuse(RefusalReason.NOT_ADMITTED, f"{peer.member.name} comes back, and nobody is expected to")
        received = self._returning.admit(peer, guest.arrived_at)
        return b"" if received is None else guest.handshake.resumed(received)

    def _let_go(self, transport: Transport) -> None:
        descriptor = transport.fileno()
        if descriptor is None:
            transport.watch(None, None)
        else:
            self._loop.forget(descriptor)

    def _dismiss(self, guest: _Guest, reason: str) -> None:
        self._tell(reason, guest.transport)
        self._let_out(guest)

    def _let_out(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._let_go(guest.transport)
        guest.transport.close()

    def _tell(self, reason: str, transport: Transport) -> None:
        """Log a refusal, once for each reason and host: a port scanner must not fill the disk."""
        host = transport.peer_host  # known when the connection is not there any more
        level, known = logging.DEBUG, (reason, host)
        if known not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(known)
            level = logging.WARNING
        logger.log(level, "refused a connection from %s: %s", host or transport.describe(), reason)

    def _show_out_late(self, now: float) -> float:
        """Dismiss guests that are late with their proof, listen again; returns the next guest's deadline."""
        nearest = NEVER
        while self._postponed:
            self._loop.listen(self._postponed.pop())
        for guest in list(self._guests):
            if guest.deadline <= now:
                self._dismiss(guest, f"it did not prove itself within {HANDSHAKE_S:g} s")
            else:
                nearest = min(nearest, guest.deadline)
        return nearest

    def close(self) -> None:
        """Stop listening, and close the connections whose diallers have not proved themselves."""
        for guest in list(self._guests):
            self._guests.discard(guest)
            self._let_go(guest.transport)
            guest.transport.close()
        for listener in self._listeners:
            descriptor = listener.fileno()
            if descriptor is not None and descriptor >= 0:
                self._loop.forget(descriptor)
            listener.close()


def _check_way(transport: Transport, peer: Hello) -> None:
    """Raise if a peer dialled a unix address, which no TLS is over, but came over a network: through a relay."""
    if peer.dialled.startswith("unix:") and transport.kind != "unix":
        raise refuse(
            RefusalReason.WRONG_ADDRESS,
            f"{peer.member.name!r} dialled {peer.dialled!r}, and came over {transport.kind}: somebody relays it",
        )
