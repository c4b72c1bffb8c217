"""The connections of one node to the other members: made, and made again after they break.

Drives `protocol/connector.py`: a `Bond` for each member that was ever connected, a `Dialler` for each dial under way. A
bond outlives connections, not the link: once the link is dead, a member that comes back to its session is refused, and
so learns of the death.

    the link is          event                                              then
    not made yet         `dial`: neighbours, of which the later one dials   up, when we are let in
    asleep               something is to be sent to the member (`wake`)     we dial: up, when we are let in
    not up, we dial      the member dials, too, and may have let us in      the lower incarnation's dial counts
    not up, we dial      the member dials, too, and has not let us in       we stop: up, over its connection
    not made yet         the member asks through our listener               nothing: we are dialling anyhow
    up                   nothing was said for long, both agree to part      asleep: the session stays (`parting.py`)
    up                   its connection broke, without a Goodbye            down: redial until it is back
    down                 we dialled, and were let in                        up again
    up or down           the member comes back through our listener         up again, over that connection
    up, for longer       the member asks through our listener               down: we dial (it lost what we did not)
    up                   its host leaves all unanswered                     down: it may be this connection only
    down                 its host refuses us                                down: the members hear of it; redial
    down                 vanished; it has given us up; the members did      dead

Everything here runs on the I/O thread, except `begin` (while the node starts), `stop` and the functions that diallers
call. The `Owner` decides who is a member, and what becomes of a new connection.

Over 400 lines: the rows of this table, one after the other.
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
from farcall.protocol.connector import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    REFUSED_PAUSE_S,
    Answer,
    Bond,
    Dial,
    Ended,
    Goal,
    Parting,
    Step,
)
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Connect, Hello, RefusalReason, Remind, Resume, refuse
from farcall.protocol.member import PROCESS_ENDED, Member
from farcall.protocol.membership.events import Heard, LinkLost, LinkRefused
from farcall.protocol.membership.messages import Message
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.dialler import WITHIN_THE_HOST, Dialler, Found, Target, is_near
from farcall.runtime.link.link import SessionError
from farcall.runtime.peers.host import Watcher
from farcall.runtime.peers.peer import RemotePeer
from farcall.secret import Secret
from farcall.transport.interface import Transport
from farcall.transport.tls import tls_for

logger: logging.Logger = logging.getLogger("farcall")

MAX_WAITING_NEWS = 8
RETRY_S = 0.5
STOP_S = 1.5
"""How long `stop` waits for a thread that may be inside a connect."""
_RANDOM = SystemRandom()  # not the generator that programs seed: its sequence is theirs


class Owner(Protocol):
    """The table of peers, which the connections belong to. Called on the I/O thread."""

    watcher: Watcher

    def hello(self) -> Hello:
        """How this node introduces itself."""

    def member_of(self, incarnation: int) -> Member | None:
        """The member, present or past, with this incarnation, if known."""

    def ways_to(self, incarnation: int) -> Sequence[str]:
        """The addresses of a member that may work from here."""

    def is_wanted(self, incarnation: int) -> bool:
        """Should this node dial again after the member did not let it in?"""

    def is_needed(self, incarnation: int) -> bool:
        """Should this node dial again even though nobody listens at the member's addresses?"""

    def look_later(self, incarnation: int) -> None:
        """This node stopped dialling a member that dials us, or cannot dial yet: call `look_after` in a while."""

    def on_dialled(self, transport: Transport, established: Established, news: Sequence[Message]) -> None:
        """A member that was dialled for the first time let us in; send it ``news``."""

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """The transport that a link uses in place of ``transport``."""


class Watch(Protocol):
    """The failure detector."""

    def feed(self, event: Heard | LinkLost | LinkRefused) -> None:
        """A member proved that it lives, a connection broke without a Goodbye, or a dial was refused."""

    def is_member(self, incarnation: int) -> bool:
        """Is this incarnation neither dead nor gone, as far as is known? From any thread."""


class _First(msgspec.Struct, eq=False):
    """A first connection in the making, and the messages to send over it."""

    news: list[Message]
    dialler: Dialler | None = None
    why: str = ""
    """What became of the last dial that has ended."""


class _Tie(msgspec.Struct, eq=False):
    """A member that was connected: its bond, its peer, and the dial that is to repair the link."""

    bond: Bond
    peer: RemotePeer
    was_reached: bool
    """Has the member ever let in a dial from here? If not, its addresses may lead elsewhere from here."""
    dialler: Dialler | None = None
    sleeps: bool = False
    """Have both ends parted, and has this end read all that came over the connection?"""
    silent_since: float | None = None
    """When the member's host fell silent, if that is why the connection was given up."""
    why: str = ""
    """What became of the last dial that has ended."""


class Connector:
    """The dials and bonds of one node.

    Mutable: the first connections under way, the ties to members that were connected, the diallers of both. The lock
    orders the I/O thread, which begins dials and takes their results, and `stop`, which must find every dial begun.
    """

    def __init__(self, owner: Owner, watch: Watch, loop: Loop, options: RpcBackendOptions, *, secret: Secret) -> None:
        self._owner = owner
        self._watch = watch
        self._loop = loop
        self._allowed = options.allowed_transports
        self._reconnect_s = options.membership.reconnect_s
        self._secret = secret
        self._tls = tls_for(options)
        self._firsts: dict[int, _First] = {}  # by incarnation
        self._ties: dict[int, _Tie] = {}  # by incarnation
        self._diallers: dict[Dialler, Transport | None] = {}  # each with its connection, until that is taken
        self._stopped = False
        self._lock = threading.Lock()
        self.joining: Dialler | None = None
        """The dial by which this node asks to be let in, until the dialled member is in the peer table."""
        self.starting: bool = True
        """Are there members that this node has yet to connect to for the first time?"""
        self.frames_sent_again: int = 0
        """Frames sent again over new connections, because the old ones may have lost them."""
        self.awake: dict[int, RemotePeer] = {}
        """The peers with a connection, or about to have one again after a break, by incarnation."""
        self.joined: int = 0
        """How many dials began because something was to be sent."""
        self.parted: int = 0
        """How many connections were given up because nothing was."""

    # ------------------------------------------------------------------ dials under way

    def _begin(self, dial: Dial, target: Target, me: Hello, then: Callable[[Dialler, Ended, Found], None]) -> Dialler:
        """Under the lock: start a dial on its own thread; ``then`` gets the result on the I/O thread."""

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
                    return  # `stop` has closed its connection meanwhile
                del self._diallers[dialler]
            if dialler.is_wanted():
                then(dialler, ended, found)
            else:
                found.close()

        is_member = partial(self._is_member, target.incarnation)
        dialler = Dialler(dial, target, me, self._secret, tls=self._tls, on_end=on_end, is_member=is_member)
        dialler.start()
        self._diallers[dialler] = None
        return dialler

    def _is_member(self, incarnation: int) -> bool:
        return not self._stopped and self._watch.is_member(incarnation)

    # ------------------------------------------------------------------ first connections

    def dial(self, member: Member, message: Message | None = None) -> None:
        """Connect to ``member``, then send ``message``, which is lost if the dial fails."""
        first = self._firsts.get(member.incarnation)
        if first is None:
            first = _First([])
            try:
                if not self._dial_first(first, member, 0.0):
                    return
            except RuntimeError as error:
                self._put_off(member.name, member.incarnation, error)
                return
            self._firsts[member.incarnation] = first
        if message is not None and len(first.news) < MAX_WAITING_NEWS:
            first.news.append(message)

    def is_dialling(self, incarnation: int) -> bool:
        """Is this incarnation being dialled for the first time?"""
        return incarnation in self._firsts

    def look_after(self, peer: RemotePeer) -> None:
        """This peer should have connected to us by now. If it has not, dial, or sleep until there is need."""
        tie = self._tie_of(peer)
        if peer.broken or peer.link.up or self.is_dialling(peer.incarnation):
            return
        if tie is None or tie.sleeps:
            peer.link.sleep()  # a sender then calls `wake`
        elif tie.dialler is None:  # it was refused, and no thread could be started for the next one
            self._dial_on(tie)
        elif not tie.dialler.is_wanted():  # our dial yielded to the peer's
            tie.sleeps = True
            self.wake(peer)

    def abandon(self, incarnation: int) -> None:
        """Stop the first dial to a member that nobody wants any more."""
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
            me = self._owner.hello().wanting(Connect(is_first=member.incarnation not in self._ties))
            target = Target.of(member, self._allowed, me.member.host_token)
            first.dialler = self._begin(dial, target, me, partial(self._on_first, first, member))
        return True

    def wake(self, peer: RemotePeer) -> None:
        """Something is to be sent to a member that has no connection: dial it."""
        tie, link = self._tie_of(peer), peer.link
        if link.broken is not None or link.up or self._stopped:
            return
        if tie is None:
            member = self._owner.member_of(peer.incarnation)
            if member is not None:
                self.joined += not self.is_dialling(peer.incarnation)
                self.dial(member)
        elif tie.sleeps:  # else a connection is on its way, or the link is about to sleep: `sleep` looks at the queue
            tie.sleeps = False
            self.joined += 1
            try:
                self._redial(tie, tie.bond.rejoin(monotonic(), self._reconnect_s), "both had parted")
            except RuntimeError as error:
                tie.sleeps = True
                self._put_off(peer.info.name, peer.incarnation, error)

    def _put_off(self, name: str, incarnation: int, error: RuntimeError) -> None:
        """No thread can be started for a dial now: try later, since other threads may end soon."""
        logger.warning("%s cannot be dialled now, and will be later: %s", name, error)
        self._owner.look_later(incarnation)

    def yield_to(self, peer: Hello) -> None:
        """A member that we dial dials us, too: of the two connections, both ends must drop the same one.

        While its listener may have let us in, our dial stands if we have the lower incarnation: the other end yields.
        Otherwise our dial ends: the member has not let us in, and will not.
        """
        incarnation = peer.member.incarnation
        first, joining = self._firsts.get(incarnation), self.joining
        if joining is not None and joining.may_lead_to(incarnation):
            self._yield(joining, peer)  # this node then asks over the member's connection
        elif first is not None and first.dialler is not None and self._owner.is_wanted(incarnation):
            self._yield(first.dialler, peer)
            del self._firsts[incarnation]
            self._owner.look_later(incarnation)

    def _yield(self, dialler: Dialler, peer: Hello) -> None:
        is_lower = self._owner.hello().member.incarnation < peer.member.incarnation
        if not dialler.withdraw(even_if_proving=not is_lower):
            raise refuse(RefusalReason.CROSSED, f"{peer.member.name} is being dialled from here")

    def _on_first(self, first: _First, member: Member, dialler: Dialler, ended: Ended, found: Found) -> None:
        incarnation = member.incarnation
        if self._firsts.get(incarnation) is not first or first.dialler is not dialler:
            found.close()
            return
        if found.transport is not None and found.established is not None:
            del self._firsts[incarnation]
            self._owner.on_dialled(found.transport, found.established, first.news)
            return
        first.why = ended.why
        is_refused = ended.step in (Step.VANISHED, Step.REFUSED)
        if is_refused:
            # Other members may still reach it, so the members decide whether it is dead; this link lives until then.
            self._watch.feed(LinkRefused(incarnation, ended.step is Step.VANISHED, ended.why))
        if self._firsts.get(incarnation) is not first:
            return  # the report above has abandoned this dial
        try:
            is_wanted = self._owner.is_needed if is_refused else self._owner.is_wanted
            pause_s = REFUSED_PAUSE_S if is_refused else RETRY_S
            if is_wanted(incarnation) and self._dial_first(first, member, pause_s):
                return
        except RuntimeError as error:
            self._put_off(member.name, incarnation, error)
        del self._firsts[incarnation]

    # ------------------------------------------------------------------ a connection broke

    def begin(self, peer: RemotePeer, established: Established, dialled: bool) -> None:
        """A member is connected for the first time: tie it to this node."""
        before = self._ties.get(peer.incarnation)
        if before is not None:
            self._end_redial(before)
        bond = Bond(established.session_id, dialled=dialled, now=monotonic(), jitter=_RANDOM)
        self._ties[peer.incarnation] = _Tie(bond, peer, dialled)
        self.awake[peer.incarnation] = peer

    def _tie_of(self, peer: RemotePeer) -> _Tie | None:
        tie = self._ties.get(peer.incarnation)
        return tie if tie is not None and tie.peer is peer else None

    def bond_of(self, peer: RemotePeer) -> Bond | None:
        """The bond to a member that was connected; None: none is left."""
        tie = None if self._stopped else self._tie_of(peer)
        return None if tie is None else tie.bond

    def dialled(self, peer: RemotePeer) -> bool:
        """Did we dial this member?"""
        tie = self._tie_of(peer)
        return tie is not None and tie.bond.dialled

    def forget(self, peer: RemotePeer) -> None:
        """The link to ``peer`` is dead: drop its tie."""
        tie = self._tie_of(peer)
        if tie is not None:
            self._end_redial(tie)
            del self._ties[peer.incarnation]
            self.awake.pop(peer.incarnation, None)

    def on_interrupted(self, peer: RemotePeer, reason: str) -> bool:
        """The connection to ``peer`` broke. True: a dial for the next one is under way, or the link sleeps."""
        tie = self._tie_of(peer)
        if tie is None or self._stopped:
            return False
        if tie.bond.parting is Parting.AGREED and not peer.leaving:
            self.awake.pop(peer.incarnation, None)
            self.parted += 1
            tie.sleeps = True
            peer.link.sleep()
            return True
        if not peer.leaving:
            self._watch.feed(LinkLost(peer.incarnation))
        link, bond = peer.link, tie.bond
        if peer.leaving or not self._reconnect_s or not link.transport.resumable:
            return False
        now = monotonic()
        bond.lose(link.received, now, self._reconnect_s)
        # No warning yet: later, one line reports either the new connection or the end of the link.
        logger.info("%s: the connection to %s broke: %s", self._owner.hello().member.name, peer.info.name, reason)
        dial = bond.redial(now, self._reconnect_s, within_host=link.transport.kind in WITHIN_THE_HOST)
        if not self._redial(tie, dial, reason):
            return False
        self._owner.watcher.on_interrupted(peer.info, reason)
        return True

    def host_silent_s(self, incarnation: int) -> float:
        """How long the host of a member has left every attempt of this node unanswered; 0: it answers."""
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

    def why_not_reached(self, incarnation: int) -> str:
        """What became of the latest attempt to connect to a member; empty if none has failed."""
        holder = self._ties.get(incarnation) or self._firsts.get(incarnation)
        if holder is None:
            return ""
        return (holder.dialler.why if holder.dialler is not None else "") or holder.why

    def mend_silence(self, peer: RemotePeer, silent_s: float) -> None:
        """The host leaves a connection that is up unanswered: redial, since routers drop connections silently."""
        tie = self._tie_of(peer)
        if tie is not None and self._reconnect_s and peer.link.transport.resumable:
            tie.silent_since = monotonic() - silent_s
            peer.link.interrupt("nothing sent over it is acknowledged")

    def _redial(self, tie: _Tie, dial: Dial, reason: str) -> bool:
        """Begin to dial a member again, because of ``reason``; False: the node ends."""
        self._end_redial(tie)
        peer, link, lost = tie.peer, tie.peer.link, tie.peer.link.transport
        resumes = dial.goal is Goal.RESUME
        if resumes:
            # Even if the link is down already: nobody may have settled the break yet; or the session is resuming,
            # since the member got our count before, and did not come.
            peer.link.break_off(reason)
        ways = self._owner.ways_to(peer.incarnation)
        member, me = self._owner.member_of(peer.incarnation), self._owner.hello().member
        near = member is not None and is_near(member, me.host_token)
        target = Target(peer.info.name, peer.incarnation, ways, lost.kind, lost.peer_host, near, tie.was_reached)
        with self._lock:
            if self._stopped:
                return False  # its session may have ended: who stops us closes the links next
            session_id = tie.bond.session_id
            hello = self._owner.hello().wanting(Resume(session_id, link.received) if resumes else Remind(session_id))
            tie.dialler = self._begin(dial, target, hello, partial(self._on_redialled, tie))
        return True

    def _end_redial(self, tie: _Tie) -> None:
        if tie.dialler is not None:
            if tie.dialler.is_wanted():  # a dial that yielded ends by itself; stopped, the other end would log it
                tie.dialler.stop()
            tie.dialler = None

    def _on_redialled(self, tie: _Tie, dialler: Dialler, ended: Ended, found: Found) -> None:
        if tie.dialler is not dialler or tie.peer.link.broken is not None:
            found.close()
            return
        if found.transport is not None and found.established is not None:
            tie.was_reached = True
            self._attach(tie, found.transport, found.established, found.established.peer_received)
            return
        self._end_redial(tie)
        tie.why = ended.why
        if ended.step is Step.REFUSED:
            tie.silent_since = None
            self._watch.feed(LinkRefused(tie.peer.incarnation, why=ended.why))
            self._dial_on(tie)
            return
        late = "it could not be reached again in time: " if ended.step is Step.OUT_OF_TIME else ""
        if ended.step is Step.VANISHED:
            logger.info("%s: %s has ended: %s", self._owner.hello().member.name, tie.peer.info.name, ended.why)
            tie.peer.link.die(PROCESS_ENDED)
            self._watch.feed(LinkRefused(tie.peer.incarnation, is_certain=True))
        else:
            tie.peer.link.die(f"{late}{ended.why}")

    def _dial_on(self, tie: _Tie) -> None:
        """The last dial was refused. Unless the members have given a verdict meanwhile, dial again."""
        peer = tie.peer
        if tie.dialler is not None or peer.link.broken is not None or peer.link.up or self._tie_of(peer) is not tie:
            return
        try:
            self._redial(tie, tie.bond.redial(monotonic(), self._reconnect_s, refused=True), "refused")
        except RuntimeError as error:
            self._put_off(peer.info.name, peer.incarnation, error)

    # ------------------------------------------------------------------ the member comes back by itself

    def admit(self, peer: Hello, arrived_at: float) -> int | None:
        """Decide about a proven member at our listener that names a session: the count to send it, if any.

        Raises ``Refused``. ``arrived_at``: when the member connected.
        """
        purpose, name, incarnation = peer.purpose, peer.member.name, peer.member.incarnation
        assert isinstance(purpose, Resume | Remind)
        tie = self._ties.get(incarnation)
        dialling = self.starting or self.is_dialling(incarnation)
        if tie is None and isinstance(purpose, Remind) and dialling and not self._stopped:
            return None  # the member has our proof, and we gave up waiting for its own: we will dial again
        if tie is None or tie.bond.session_id != purpose.session_id or tie.peer.broken or self._stopped:
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} comes back to a session that has ended")
        self._watch.feed(Heard(incarnation))  # it lives, whatever the way from here to it refuses
        link, bond = tie.peer.link, tie.bond
        answer = bond.answer(type(purpose), is_lower=incarnation < self._owner.hello().member.incarnation)
        if answer is Answer.DIAL:
            if tie.sleeps:
                link.asleep = False
                self.wake(tie.peer)
            elif not link.up and not bond.dialled:  # each end waited for the other's dial
                bond.dialled = True
                try:
                    self._redial(tie, bond.redial(monotonic(), self._reconnect_s), "the other end has lost it")
                except RuntimeError as error:
                    bond.dialled = False  # the member will ask again
                    self._put_off(name, incarnation, error)
            elif tie.dialler is not None:
                tie.dialler.hasten()
            elif arrived_at > bond.since:  # else it asked before we made this connection
                link.interrupt("the other end has lost it")
            return None
        if answer is Answer.CROSSED:
            raise refuse(RefusalReason.CROSSED, f"{name} {answer.value}")
        if answer is not Answer.RESUME or not isinstance(purpose, Resume):
            raise refuse(RefusalReason.NOT_ADMITTED, f"{name} {answer.value}")
        if purpose.received < link.acknowledged:
            raise HandshakeRefused("an attempt that its dialler has given up")
        if bond.dialled:  # else our dial, if any, only reminds the member
            if tie.dialler is not None:
                self._yield(tie.dialler, peer)
                self._owner.look_later(incarnation)
            bond.dialled = False
        if tie.dialler is None or link.up:
            # This end may learn of the break from the other end first.
            bond.lose(link.received, monotonic(), self._reconnect_s)
        link.break_off("the other end has made a new one")
        with self._lock:
            if self._stopped:  # meanwhile; who stops us closes the links next
                raise refuse(RefusalReason.NOT_ADMITTED, f"{name} comes back to a session that has ended")
            return link.received

    def on_resumed(self, transport: Transport, established: Established) -> None:
        """The answer of `admit` is on its way: go on over this connection."""
        purpose = established.peer.purpose
        if not isinstance(purpose, Resume):
            transport.close()  # a Remind: the member only asked us to dial
            return
        self._attach(self._ties[established.peer.member.incarnation], transport, established, purpose.received)

    def _attach(self, tie: _Tie, transport: Transport, established: Established, received: int) -> None:
        peer, had_parted = tie.peer, tie.bond.parting is Parting.AGREED
        self._end_redial(tie)
        self.awake[peer.incarnation] = peer
        tie.sleeps = False
        tie.silent_since = None
        tie.bond.restore(peer.link.received, monotonic())
        with self._lock:
            if self._stopped:
                transport.close()
                return
            try:
                peer.link.attach(self._owner.wrap(transport, peer.info), established.leftover, received)
            except SessionError as error:
                peer.link.die(str(error))
                return
            if had_parted:
                return  # a parting loses nothing: no frame is sent again, and nothing is to be reported
            self.frames_sent_again += peer.link.sent_again
        self._watch.feed(Heard(peer.incarnation))
        name = self._owner.hello().member.name
        logger.warning("%s: connected to %s again, over %s", name, peer.info.name, transport.describe())
        self._owner.watcher.on_reconnected(peer.info)

    # ------------------------------------------------------------------ verdicts, and the end

    def give_up(self, peer: RemotePeer, reason: str) -> None:
        """Give up a member; if it is alive, it is refused when it comes back."""
        self.forget(peer)
        peer.link.die(reason)

    def stop(self) -> None:
        """The node ends: let nobody in, and stop all dials. From any thread but the I/O thread."""
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
