"""The connections of one node to the others: made, and made again where they break.

Drives `protocol/connector.py`: a `Bond` for each member that was ever connected, a `Dialler` for each dial under way. A
bond outlives connections, not the link: where the link is dead, a member that comes back to its session is refused, and
so learns it.

    the link is          event                                              then
    not made yet         `dial`: the later of two members dials             up, when we are let in
    not made yet         the member asks through our listener               nothing: we are dialling anyhow
    up                   its connection broke, without a Goodbye            down: redial until it is back
    down                 we dialled, and were let in                        up again
    up or down           the member comes back through our listener         up again, over that connection
    up, for longer       the member asks through our listener               down: we dial (it lost what we did not)
    up                   its host leaves all unanswered                     down: it may be this connection only
    down                 vanished; it has given us up; the members did      dead

Everything here runs on the I/O thread, but for `begin` (while the node starts), `stop` and what diallers call. Who
is a member, and what becomes of a new connection, is the `Owner`'s business.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import SystemRandom
from time import monotonic
from typing import Protocol

import msgspec

from farcall.errors import HandshakeRefused
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import ANSWERS, FIRST_PAUSE_S, LONGEST_PAUSE_S, Answer, Bond, Dial, Ended, Goal, Step
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, RefusalReason, Remind, Resume, refuse
from farcall.protocol.member import Member
from farcall.protocol.membership.events import LinkLost, LinkRefused
from farcall.protocol.membership.messages import Message
from farcall.protocol.session import SessionError
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.dialler import WITHIN_THE_HOST, Dialler, Found, Target, tls_for
from farcall.runtime.peers.host import Watcher
from farcall.runtime.peers.peer import RemotePeer
from farcall.secret import Secret
from farcall.transport.interface import Transport

logger: logging.Logger = logging.getLogger("farcall")

MAX_WAITING_NEWS = 8
RETRY_S = 0.5
STOP_S = 1.5
_RANDOM = SystemRandom()  # the generators that programs seed are theirs
"""How long `stop` waits for a thread that may be inside a connect."""


class Owner(Protocol):
    """The table of peers that the connections are for. On the I/O thread."""

    watcher: Watcher

    def hello(self) -> Hello:
        """What this node says of itself."""

    def ways_to(self, incarnation: int) -> Sequence[str]:
        """The addresses of a member that may work from here."""

    def is_wanted(self, incarnation: int) -> bool:
        """Is a member that was not there to be looked for again?"""

    def on_dialled(self, transport: Transport, established: Established, news: Sequence[Message]) -> None:
        """A member that was dialled for the first time let us in; ``news`` is to be said."""

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """What a link uses instead of a transport."""


class Watch(Protocol):
    """The failure detector."""

    def feed(self, event: LinkLost | LinkRefused) -> None:
        """A connection broke without a Goodbye, or a member's process is not there any more."""

    def is_member(self, incarnation: int) -> bool:
        """Is that one neither dead nor gone, as far as is known? From any thread."""


class _First(msgspec.Struct, eq=False):
    """A first connection on its way, and what to say over it."""

    news: list[Message]
    dialler: Dialler | None = None


class _Tie(msgspec.Struct, eq=False):
    """A member that was connected: its bond, its peer, and the dial that is to repair the link."""

    bond: Bond
    peer: RemotePeer
    dialler: Dialler | None = None
    silent_since: float | None = None
    """When its host fell silent, if that is why the connection was given up."""


class Connector:
    """The dials and bonds of one node.

    Mutable: the first connections under way, the ties to members that were connected, the diallers of both. The lock
    is between the I/O thread, which begins and takes, and `stop`, which must find all that has begun.
    """

    def __init__(self, owner: Owner, watch: Watch, loop: Loop, options: RpcBackendOptions, *, secret: Secret) -> None:
        self._owner = owner
        self._watch = watch
        self._loop = loop
        self._allowed = options.allowed_transports
        self._reconnect_s = options.membership.reconnect_s
        self._secret = secret
        self._tls = tls_for(options, secret)
        self._firsts: dict[int, _First] = {}  # by incarnation
        self._ties: dict[int, _Tie] = {}  # by incarnation
        self._diallers: dict[Dialler, Transport | None] = {}  # with the connection that nobody has taken yet
        self._stopped = False
        self._lock = threading.Lock()
        self.starting: bool = True
        """Are there members that this node has yet to connect to for the first time?"""
        self.frames_sent_again: int = 0
        """Over new connections, because the old ones may have lost them."""

    # ------------------------------------------------------------------ dials under way

    def _begin(self, dial: Dial, target: Target, me: Hello, then: Callable[[Dialler, Ended, Found], None]) -> Dialler:
        """A dial on a thread of its own, under the lock; ``then`` is called on the I/O thread with the result."""

        def on_end(dialler: Dialler, ended: Ended, found: Found) -> None:
            with self._lock:
                if self._stopped:
                    found.close()
                    return
                self._diallers[dialler] = found.transport
            self._loop.call_soon(lambda: take(dialler, ended, found))

        def take(dialler: Dialler, ended: Ended, found: Found) -> None:
            with self._lock:
                if dialler not in self._diallers:
                    return  # stopped meanwhile
                del self._diallers[dialler]
            if dialler.is_wanted():
                then(dialler, ended, found)
            else:
                found.close()

        is_member = partial(self._is_member, target.incarnation)
        dialler = Dialler(dial, target, me, self._secret, tls=self._tls, on_end=on_end, is_member=is_member)
        self._diallers[dialler] = None
        dialler.start()
        return dialler

    def _is_member(self, incarnation: int) -> bool:
        return not self._stopped and self._watch.is_member(incarnation)

    # ------------------------------------------------------------------ first connections

    def dial(self, member: Member, message: Message | None = None) -> None:
        """Connect to ``member``; ``message`` is to be said then, or is lost."""
        first = self._firsts.get(member.incarnation)
        if first is None:
            first = _First([])
            if not self._dial_first(first, member, 0.0):
                return
            self._firsts[member.incarnation] = first
        if message is not None and len(first.news) < MAX_WAITING_NEWS:
            first.news.append(message)

    def is_dialling(self, incarnation: int) -> bool:
        """Is that one being connected to for the first time?"""
        return incarnation in self._firsts

    def abandon(self, incarnation: int) -> None:
        """Nobody wants that one any more."""
        first = self._firsts.pop(incarnation, None)
        if first is not None and first.dialler is not None:
            first.dialler.stop()

    def _dial_first(self, first: _First, member: Member, pause_s: float) -> bool:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=_RANDOM)
        backoff.restart(pause_s)
        dial = Dial(Goal.CONNECT, until=NEVER, now=monotonic(), backoff=backoff, pauses_first=True)
        with self._lock:
            if self._stopped:
                return False
            target = Target.of(member, self._allowed)
            first.dialler = self._begin(dial, target, self._owner.hello(), partial(self._on_first, first, member))
        return True

    def _on_first(self, first: _First, member: Member, dialler: Dialler, ended: Ended, found: Found) -> None:
        incarnation = member.incarnation
        if self._firsts.get(incarnation) is not first or first.dialler is not dialler:
            found.close()
            return
        if found.transport is not None and found.established is not None:
            del self._firsts[incarnation]
            self._owner.on_dialled(found.transport, found.established, first.news)
            return
        if ended.step is Step.VANISHED:
            self._watch.feed(LinkRefused(incarnation))
        if self._firsts.get(incarnation) is not first:
            return  # that was the end of it
        if not self._owner.is_wanted(incarnation) or not self._dial_first(first, member, RETRY_S):
            del self._firsts[incarnation]

    # ------------------------------------------------------------------ a connection broke

    def begin(self, peer: RemotePeer, established: Established, dialled: bool) -> None:
        """A member is connected for the first time."""
        before = self._ties.get(peer.incarnation)
        if before is not None:
            self._end_redial(before)
        bond = Bond(established.session_id, dialled=dialled, now=monotonic(), jitter=_RANDOM)
        self._ties[peer.incarnation] = _Tie(bond, peer)

    def _tie_of(self, peer: RemotePeer) -> _Tie | None:
        tie = self._ties.get(peer.incarnation)
        return tie if tie is not None and tie.peer is peer else None

    def dialled(self, peer: RemotePeer) -> bool:
        """Did we dial this member?"""
        tie = self._tie_of(peer)
        return tie is not None and tie.bond.dialled

    def forget(self, peer: RemotePeer) -> None:
        """The link to ``peer`` is dead."""
        tie = self._tie_of(peer)
        if tie is not None:
            self._end_redial(tie)
            del self._ties[peer.incarnation]

    def on_interrupted(self, peer: RemotePeer, reason: str) -> bool:
        """The connection to ``peer`` broke: may there be another one? Then it is being brought about."""
        tie = self._tie_of(peer)
        if tie is None or self._stopped:
            return False
        if not peer.leaving:
            self._watch.feed(LinkLost(peer.incarnation))
        link, bond = peer.link, tie.bond
        if peer.leaving or not self._reconnect_s or not link.transport.resumable:
            return False
        now = monotonic()
        bond.lose(link.session.received, now, self._reconnect_s)
        # No warning yet: it is made again, or its end is told in one line.
        logger.info("%s: the connection to %s broke: %s", self._owner.hello().member.name, peer.info.name, reason)
        purpose = Resume(bond.session_id, link.session.resume()) if bond.dialled else Remind(bond.session_id)
        dial = bond.redial(now, self._reconnect_s, within_host=link.transport.kind in WITHIN_THE_HOST)
        if not self._redial(tie, dial, purpose, reason):
            return False
        self._owner.watcher.on_interrupted(peer.info, reason)
        return True

    def host_silent_s(self, incarnation: int) -> float:
        """How long the host of a member has left unanswered all that this node tried; 0: it answers."""
        now = monotonic()
        tie, first = self._ties.get(incarnation), self._firsts.get(incarnation)
        if tie is not None and tie.peer.link.up:
            return tie.peer.link.transport.silent_s()
        holder = tie or first
        if holder is None or holder.dialler is None or holder.dialler.unanswered_since is None:
            return 0.0
        since = holder.dialler.unanswered_since
        if tie is not None and tie.silent_since is not None and not holder.dialler.host_answered:
            since = tie.silent_since
        return now - since

    def mend_silence(self, peer: RemotePeer, silent_s: float) -> None:
        """The connection is up, and the host leaves it unanswered: routers forget connections, and tell nobody."""
        tie = self._tie_of(peer)
        if tie is not None and self._reconnect_s and peer.link.transport.resumable:
            tie.silent_since = monotonic() - silent_s
            peer.link.interrupt("nothing sent over it is acknowledged")

    def _redial(self, tie: _Tie, dial: Dial, purpose: Resume | Remind, reason: str) -> bool:
        """Begin to get through to a member, because of ``reason``; False: the node ends."""
        self._end_redial(tie)
        peer, lost = tie.peer, tie.peer.link.transport
        ways = self._owner.ways_to(peer.incarnation)
        target = Target(peer.info.name, peer.incarnation, ways, lost.kind, lost.peer_host)
        with self._lock:
            if self._stopped:
                return False
            me = self._owner.hello().wanting(purpose)
            tie.dialler = self._begin(dial, target, me, partial(self._on_redialled, tie, reason))
        return True

    def _end_redial(self, tie: _Tie) -> None:
        if tie.dialler is not None:
            tie.dialler.stop()
            tie.dialler = None

    def _on_redialled(self, tie: _Tie, reason: str, dialler: Dialler, ended: Ended, found: Found) -> None:
        if tie.dialler is not dialler or tie.peer.link.broken is not None:
            found.close()
            return
        if found.transport is not None and found.established is not None:
            self._attach(tie, found.transport, found.established, found.established.peer_received)
            return
        self._end_redial(tie)
        late = "it could not be reached again in time: " if ended.step is Step.OUT_OF_TIME else ""
        tie.peer.link.die(f"{reason}; {late}{ended.why}")
        if ended.step is Step.VANISHED:
            self._watch.feed(LinkRefused(tie.peer.incarnation))

    # ------------------------------------------------------------------ the member comes back by itself

    def admit(self, peer: Hello, arrived_at: float) -> int | None:
        """A proven member at our listener speaks of a session: the count to tell it, if any, or ``Refused``.

        ``arrived_at``: when it connected.
        """
        purpose, name, incarnation = peer.purpose, peer.member.name, peer.member.incarnation
        assert isinstance(purpose, Resume | Remind)
        tie = self._ties.get(incarnation)
        dialling = self.starting or self.is_dialling(incarnation)
        if tie is None and isinstance(purpose, Remind) and dialling and not self._stopped:
            return None  # it has our proof, and we gave up waiting for its own: we are about to dial again
        if tie is None or tie.bond.session_id != purpose.session_id or tie.peer.broken or self._stopped:
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} comes back to a session that has ended")
        link, bond = tie.peer.link, tie.bond
        answer = ANSWERS[type(purpose), bond.dialled]
        if answer is Answer.DIAL:
            if tie.dialler is not None:
                tie.dialler.hasten()
            elif arrived_at > bond.since:  # else it asked for the connection that we have made since
                link.interrupt("the other end has lost it")
            return None
        if answer is not Answer.RESUME or not isinstance(purpose, Resume):
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} {answer.value}")
        if purpose.received < link.session.acknowledged:
            raise HandshakeRefused("an attempt that its dialler has given up")
        if tie.dialler is None or link.up:
            # It may be that we hear of the break from the other end first.
            bond.lose(link.session.received, monotonic(), self._reconnect_s)
        link.break_off("the other end has made a new one")
        return link.session.resume()

    def on_resumed(self, transport: Transport, established: Established) -> None:
        """What `admit` answered is on its way."""
        purpose = established.peer.purpose
        if not isinstance(purpose, Resume):
            transport.close()  # it only asked
            return
        self._attach(self._ties[established.peer.member.incarnation], transport, established, purpose.received)

    def _attach(self, tie: _Tie, transport: Transport, established: Established, received: int) -> None:
        peer = tie.peer
        self._end_redial(tie)
        tie.silent_since = None
        tie.bond.restore(peer.link.session.received, monotonic())
        with self._lock:
            if self._stopped:
                transport.close()
                return
            try:
                peer.link.attach(self._owner.wrap(transport, peer.info), established.leftover, received)
            except SessionError as error:
                peer.link.die(str(error))
                return
            self.frames_sent_again += peer.link.session.sent_again
        name = self._owner.hello().member.name
        logger.warning("%s: connected to %s again, over %s", name, peer.info.name, transport.describe())
        self._owner.watcher.on_reconnected(peer.info)

    # ------------------------------------------------------------------ verdicts, and the end

    def give_up(self, peer: RemotePeer, reason: str) -> None:
        """Give up a member; if it lives, it is refused when it comes back."""
        self.forget(peer)
        peer.link.die(reason)

    def stop(self) -> None:
        """The node ends: let nobody in, stop dialling. From any thread but the I/O thread."""
        with self._lock:
            self._stopped = True
            diallers, self._diallers = self._diallers, {}
        for dialler, transport in diallers.items():
            dialler.stop()
            if transport is not None:
                transport.close()
        until = monotonic() + STOP_S
        for dialler in diallers:
            dialler.join(max(0.0, until - monotonic()))
