"""Links that break and come back: which of them may, who dials, and when a member is given up.

One `Bond` per member that was ever connected. It outlives connections, not the link: where the link is dead, whoever
comes back to its session is refused, and so learns it.

    the link is          event                                              then
    up                   its connection broke, without a Goodbye            down: redial (`redial.py`) until it is back
    down                 we dialled, and were let in                        up again
    up or down           the member comes back through our door, proven     up again, over that connection
    up, for longer       the member asks through our door                   down: we dial (it lost what we did not)
    up                   `remind`: nothing comes, and it dialled us         it is asked to dial: up again
    not made yet         the member asks through our door                   nothing: we are dialling anyhow
    down                 gone, refused, or ``reconnect_s`` over             dead

A connection that breaks before a frame has come over it is no news: time runs on, and pauses grow.

For the failure detector: `interrupt` gives up a silent connection and not the member; `condemn` and
`give_up` give up the member; ``on_lost`` and ``on_vanished`` tell what goes on. Everything here runs on the I/O thread,
but for `begin` (while the node starts), `interrupt`, `condemn` and `stop`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from farcall.errors import HandshakeRefused
from farcall.ids import WorkerInfo
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, RefusalReason, Remind, Resume, refuse, resumed
from farcall.protocol.session import SessionError
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.redial import FIRST_PAUSE_S, Finding, Redial
from farcall.runtime.peers.peer import RemotePeer
from farcall.transport.interface import Transport

logger: logging.Logger = logging.getLogger("farcall")

STOP_S = 1.5
"""How long `stop` waits for a thread that may be inside a connect."""


class Bond:
    """What joins this node to one member over all connections."""

    __slots__ = ("arriving", "dialled", "lost_at", "pause_s", "peer", "received", "redial", "session_id", "since")

    def __init__(self, peer: RemotePeer, session_id: str, dialled: bool) -> None:
        self.peer: RemotePeer = peer
        self.session_id: str = session_id
        self.dialled: bool = dialled
        self.redial: Redial | None = None
        self.arriving: Transport | None = None  # dialled, and not attached yet
        self.since: float = monotonic()  # when the present connection was made
        self.received: int = -1  # frames that had come before it
        self.lost_at: float = 0.0
        self.pause_s: float = 0.0


class Reconnecting:
    """This node's part in keeping its links."""

    def __init__(
        self,
        me: Hello,
        secret: bytes,
        reconnect_s: float,
        ways_to: Callable[[RemotePeer], Sequence[str]],
        loop: Loop,
        wrap: Callable[[Transport, WorkerInfo], Transport],
    ) -> None:
        """``ways_to(peer)`` gives a member's addresses; ``wrap`` what a link uses instead of a transport."""
        self._me = me
        self._secret = secret
        self._reconnect_s = reconnect_s
        self._ways_to = ways_to
        self._loop = loop
        self._wrap = wrap
        self._bonds: dict[int, Bond] = {}  # by incarnation
        self._stopped = False
        self.starting: bool = True
        """Are there members that this node has yet to connect to for the first time?"""
        self.frames_sent_again: int = 0
        """Over new connections, because the old ones may have lost them."""
        self._lock = threading.Lock()  # between dialling, attaching and stopping
        self.lost_hooks: list[Callable[[WorkerInfo, str], None]] = []
        self.back_hooks: list[Callable[[WorkerInfo], None]] = []
        self.on_lost: Callable[[RemotePeer], None] = lambda peer: None
        """Told, on the I/O thread, that a connection broke without a Goodbye."""
        self.on_vanished: Callable[[RemotePeer], None] = lambda peer: None
        """Told, on the I/O thread, that a member's process is not there any more."""
        self.is_trusted: Callable[[RemotePeer], bool] = lambda peer: False
        """Is a member heard by others, although not by us? From any thread."""
        self.is_dialling: Callable[[int], bool] = lambda incarnation: False
        """Is that incarnation being connected to for the first time, after the start?"""

    def begin(self, peer: RemotePeer, established: Established, dialled: bool) -> None:
        """A member is connected for the first time."""
        before = self._bonds.get(peer.incarnation)
        if before is not None:
            self._end_redial(before)
        self._bonds[peer.incarnation] = Bond(peer, established.session_id, dialled)

    def dialled(self, peer: RemotePeer) -> bool:
        """Did we dial this member?"""
        bond = self._bonds.get(peer.incarnation)
        return bond is not None and bond.peer is peer and bond.dialled

    def forget(self, peer: RemotePeer) -> None:
        """The link to ``peer`` is dead."""
        bond = self._bonds.get(peer.incarnation)
        if bond is not None and bond.peer is peer:
            self._end_redial(bond)
            del self._bonds[peer.incarnation]

    # ------------------------------------------------------------------ a connection broke

    def on_interrupted(self, peer: RemotePeer, reason: str) -> bool:
        """The connection to ``peer`` broke: may there be another one? Then it is being brought about."""
        bond = self._bonds.get(peer.incarnation)
        link = peer.link
        if bond is None or bond.peer is not peer or self._stopped:
            return False
        if not peer.leaving:
            self.on_lost(peer)
        if peer.leaving or not self._reconnect_s or not link.transport.resumable:
            return False
        self._note_loss(bond)
        logger.warning("%s: the connection to %s broke: %s", self._me.member.name, peer.info.name, reason)
        if bond.dialled:
            me = self._me.wanting(Resume(bond.session_id, link.session.resume()))
        else:
            me = self._me.wanting(Remind(bond.session_id))
        if not self._redial(bond, me, bond.lost_at + self._reconnect_s, bond.pause_s, reason):
            return False
        for hook in self.lost_hooks:
            hook(peer.info, reason)
        return True

    def remind(self, peer: RemotePeer) -> None:
        """On the I/O thread: the connection is up, and silent. If the member made it, ask it to make another one.

        Where it was us, and the member lives, it finds the same, and asks.
        """
        bond = self._bonds.get(peer.incarnation)
        if bond is None or bond.peer is not peer or bond.dialled or bond.redial is not None or not self._reconnect_s:
            return
        if peer.link.up and not peer.leaving and peer.link.transport.resumable:
            logger.warning(
                "%s: nothing comes from %s: asking it to connect again", self._me.member.name, peer.info.name
            )
            me = self._me.wanting(Remind(bond.session_id))
            self._redial(bond, me, monotonic() + self._reconnect_s, 0.0, "nothing came")

    def _redial(self, bond: Bond, me: Hello, until: float, pause_s: float, reason: str) -> bool:
        """Begin to get through to a member, because of ``reason``; False: the node ends."""
        peer = bond.peer
        self._end_redial(bond)
        redial = Redial(
            peer.info.name,
            peer.incarnation,
            self._ways_to(peer),
            peer.link.transport,
            me,
            self._secret,
            bond.dialled,
            until,
            pause_s,
            lambda redial, transport, established: self._on_dialled(bond, redial, transport, established),
            lambda redial, why, finding: self._loop.call_soon(
                lambda: self._on_gone(bond, redial, f"{reason}; {why}", finding)
            ),
            lambda: not self._stopped and not peer.link.up and self.is_trusted(peer),
        )
        with self._lock:
            if self._stopped:
                return False
            bond.redial = redial  # where `stop` finds it
            redial.start()
        return True

    def _note_loss(self, bond: Bond) -> None:
        """A connection broke: is that news, or the same trouble as before?"""
        now = monotonic()
        if bond.peer.link.session.received > bond.received or now - bond.since > self._reconnect_s:
            bond.lost_at = now
            bond.pause_s = 0.0 if bond.dialled else FIRST_PAUSE_S  # the other one dials at once, and needs no reminder

    def _on_dialled(self, bond: Bond, redial: Redial, transport: Transport, established: Established) -> None:
        """On the redial's thread: we were let in."""
        with self._lock:
            if self._stopped:
                transport.close()
                return
            bond.arriving = transport
        self._loop.call_soon(lambda: self._arrive(bond, redial, established))

    def _arrive(self, bond: Bond, redial: Redial, established: Established) -> None:
        with self._lock:
            transport, bond.arriving = bond.arriving, None
        if transport is None:
            return  # stopped meanwhile
        if bond.redial is not redial or bond.peer.link.broken is not None:
            transport.close()
            return
        self._attach(bond, transport, established, established.peer_received)

    def _on_gone(self, bond: Bond, redial: Redial, why: str, finding: Finding) -> None:
        if bond.redial is redial:
            self._end_redial(bond)
            if finding is Finding.OUT_OF_TIME and bond.peer.link.up:
                return  # it was only reminded, and whether it lives is found out by others
            bond.peer.link.die(why)
            if finding is Finding.VANISHED:
                self.on_vanished(bond.peer)

    # ------------------------------------------------------------------ the member comes back by itself

    def admit(self, peer: Hello, arrived_at: float) -> bytes:
        """A proven member at our door speaks of a session: what to answer behind our proof, or ``Refused``.

        ``arrived_at``: when it connected.
        """
        purpose, name, incarnation = peer.purpose, peer.member.name, peer.member.incarnation
        assert isinstance(purpose, Resume | Remind)
        bond = self._bonds.get(incarnation)
        dialling = self.starting or self.is_dialling(incarnation)
        if bond is None and isinstance(purpose, Remind) and dialling and not self._stopped:
            return b""  # it has our proof, and we gave up waiting for its own: we are about to dial again
        if bond is None or bond.session_id != purpose.session_id or bond.peer.link.broken is not None or self._stopped:
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} comes back to a session that has ended")
        link = bond.peer.link
        if isinstance(purpose, Remind):
            if not bond.dialled:
                raise refuse(RefusalReason.NOT_ADMITTED, f"{name} asks for what is its own to do")
            if bond.redial is not None:
                bond.redial.hasten()
            elif arrived_at > bond.since:  # else it asked for the connection that we have made since
                link.interrupt("the other end has lost it")
            return b""
        if bond.dialled:
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} was dialled by us, and does not dial back")
        if purpose.received < link.session.acknowledged:
            raise HandshakeRefused("an attempt that its dialler has given up")
        if bond.redial is None or link.up:
            self._note_loss(bond)  # it may be that we hear of the break from the other end first
        link.break_off("the other end has made a new one")
        return resumed(link.session.resume())

    def on_resumed(self, transport: Transport, established: Established) -> None:
        """What `admit` answered is on its way."""
        purpose = established.peer.purpose
        if not isinstance(purpose, Resume):
            transport.close()  # it only asked
            return
        self._attach(self._bonds[established.peer.member.incarnation], transport, established, purpose.received)

    def _attach(self, bond: Bond, transport: Transport, established: Established, received: int) -> None:
        peer = bond.peer
        self._end_redial(bond)
        bond.since = monotonic()
        bond.received = peer.link.session.received
        with self._lock:
            if self._stopped:
                transport.close()
                return
            wrapped = self._wrap(transport, peer.info)
            try:
                peer.link.attach(wrapped, established.leftover, received)
            except SessionError as error:
                peer.link.die(str(error))
                return
            self.frames_sent_again += peer.link.session.sent_again
        logger.warning("%s: connected to %s again, over %s", self._me.member.name, peer.info.name, transport.describe())
        for hook in self.back_hooks:
            hook(peer.info)

    def _end_redial(self, bond: Bond) -> None:
        if bond.redial is not None:
            bond.pause_s = bond.redial.pause_s
            bond.redial.stop()
            bond.redial = None

    # ------------------------------------------------------------------ verdicts, and the end

    def interrupt(self, rank: int, reason: str) -> None:
        """Give up a member's connection, and make another one. From any thread."""
        for bond in list(self._bonds.values()):
            if bond.peer.info.id == rank:
                bond.peer.link.interrupt(reason)

    def condemn(self, rank: int, reason: str) -> None:
        """Give up a member. From any thread; if it lives, it is refused when it comes back."""
        for bond in list(self._bonds.values()):
            if bond.peer.info.id == rank:
                self._loop.call_soon(lambda peer=bond.peer: self.give_up(peer, reason))  # type: ignore[misc]

    def give_up(self, peer: RemotePeer, reason: str) -> None:
        """The same, on the I/O thread."""
        self.forget(peer)
        peer.link.die(reason)

    def stop(self) -> None:
        """The node ends: let nobody in, stop dialling. From any thread but the I/O thread."""
        with self._lock:
            self._stopped = True
            redials = []
            for bond in list(self._bonds.values()):
                if bond.redial is not None:
                    bond.redial.stop()
                    redials.append(bond.redial)
                if bond.arriving is not None:
                    bond.arriving.close()
                    bond.arriving = None
        until = monotonic() + STOP_S
        for redial in redials:
            redial.join(max(0.0, until - monotonic()))
