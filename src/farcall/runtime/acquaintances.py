"""Everybody this node knows: the peers by name, by rank and by incarnation, and how each gets its first connection.

Owns the tables of peers and the making of them; what becomes of a connection that breaks is `reconnect.py`'s
business, who is a member the watch's (`watch.py`). Everything here runs on the I/O thread, but for `connected` (also
while the node starts) and what says otherwise.

    who                       event                               then
    (unknown)                 connects to us, or is dialled       a stranger: heard about membership, nothing else
    (unknown), or stranger    joined                              a member; of two, the one that came later dials
    member, no connection     we dialled it, or it us             connected: what was sent to it meanwhile goes now
    member, connected         connects once more, anew            a stranger beside that: it has lost the session
    member                    left                                no calls any more; its link ends with its Goodbye
    member                    died, or its link is dead           gone: whoever waits for it learns it

A name or a rank stands for the last one that had it, so that calls to the dead say so; who comes next takes it over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic

from farcall.channel.recycled import ReceivePool
from farcall.channel.shared_memory import SegmentMap, SegmentPool
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.protocol.frames import Frame
from farcall.protocol.handshake import Established, Identity
from farcall.protocol.introduction import introduced, introduction_of
from farcall.protocol.membership import LinkRefused, Record
from farcall.protocol.membership.messages import Introduction
from farcall.protocol.membership.messages import Message as News
from farcall.runtime.link import Link
from farcall.runtime.loop import NEVER, Loop
from farcall.runtime.members import MemberRecord, incarnation_of, life_of
from farcall.runtime.mesh import usable_ways
from farcall.runtime.peers import Peer, RemotePeer, SelfPeer
from farcall.runtime.reconnect import Reconnecting
from farcall.runtime.redial import Redial
from farcall.runtime.watch import Watch, as_member
from farcall.transport.absent import Absent
from farcall.transport.interface import Transport

logger = logging.getLogger("farcall")

STRANGER_S = 30.0
"""How long a stranger's connection is kept: long enough for it to be told what it needs to know."""
MAX_STRANGERS = 256
LEFT_S = 10.0
"""How long one that has left may take to close its link."""
MAX_WAITING_NEWS = 8
RETRY_S = 0.5
MAX_HELD = 4096
STOP_S = 1.5


class _Dial:
    """A first connection on its way, and what to say over it."""

    __slots__ = ("news", "redial")

    def __init__(self) -> None:
        self.redial: Redial | None = None
        self.news: list[News] = []


class Acquaintances:
    """All peers of one node."""

    def __init__(
        self,
        myself: SelfPeer,
        is_static: bool,
        options: RpcBackendOptions,
        loop: Loop,
        pool: SegmentPool | None,
        memory: ReceivePool,
        reconnecting: Reconnecting,
        identity: Identity,
        secret: bytes,
        watch: Callable[[], Watch],
        write_later: Callable[[Callable[[], None]], None],
        fail_call: Callable[[int, str], None],
        on_frame: Callable[[RemotePeer, Frame], None],
        on_gone: Callable[[RemotePeer, str], None],
        on_release: Callable[[bool], None],
        wrap: Callable[[Transport, WorkerInfo], Transport],
    ) -> None:
        """``on_gone(peer, reason)`` is told once of each member whose link is dead."""
        self.named: dict[str | int, Peer] = {myself.info.name: myself, myself.info.id: myself}
        self.numbered: dict[int, Peer] = {myself.member: myself}
        """By ``Peer.member``."""
        self.remotes: dict[int, RemotePeer] = {}
        """The other members, also dead ones whose rank nobody else has, by rank."""
        self._by_life: dict[int, RemotePeer] = {}
        self._strangers: dict[int, RemotePeer] = {}
        self._ends: dict[RemotePeer, float] = {}  # when to close whose link
        self._introductions: dict[int, Record] = {}
        self._dials: dict[int, _Dial] = {}
        self._arriving: dict[Redial, Transport] = {}  # dialled, and not taken yet
        self._stopped = False
        self._lock = threading.Lock()  # between arriving and stopping
        self.on_expelled: Callable[[str], None] = lambda why: None
        """Told that the others hold this node for dead."""
        self.on_entered: Callable[[RemotePeer], None] = lambda peer: None
        """Told of each member that joined, before anything of it is read."""
        self.on_change: Callable[[str, Record, str], None] = lambda kind, record, why: None
        """Told of members that joined, left, died, are suspected or recovered."""
        self._me = myself
        self._is_static = is_static
        self._options = options
        self._loop = loop
        self._pool = pool
        self._memory = memory
        self._reconnecting = reconnecting
        self._identity = identity
        self._secret = secret
        self._watch = watch
        self._write_later = write_later
        self._fail_call = fail_call
        self._on_frame = on_frame
        self._on_gone = on_gone
        self._on_release = on_release
        self._wrap = wrap

    # ------------------------------------------------------------------ looking

    def links(self) -> Iterator[tuple[int, Link]]:
        """The members' links that are not dead."""
        for life, peer in list(self._by_life.items()):
            if peer.link.broken is None:
                yield life, peer.link

    def everyone(self) -> list[RemotePeer]:
        """All that have a link, strangers too. From any thread."""
        return [*self._by_life.values(), *self._strangers.values()]

    def workers(self) -> list[WorkerInfo]:
        """The members by rank; where members come and go, only those that are there. From any thread."""
        peers = set(self.named.values())
        if not self._is_static:
            peers = {peer for peer in peers if not peer.broken and not (isinstance(peer, RemotePeer) and peer.leaving)}
        return sorted((peer.info for peer in peers), key=lambda info: info.id)

    def knows_us(self, life: int) -> bool:
        """Has that member answered over its link, or is it gone? From any thread."""
        peer = self._by_life.get(life)
        return peer is None or peer.link.session.received > 0 or peer.broken

    # ------------------------------------------------------------------ peers and their links

    def _make(self, info: WorkerInfo, incarnation: str, transport: Transport) -> RemotePeer:
        peer = RemotePeer(
            info, incarnation, self._is_static, None, None, self._write_later, self._me.info, self._fail_call
        )
        peer.link = Link(
            info,
            transport,
            self._loop,
            partial(self._on_frame, peer),
            partial(self._on_broken, peer),
            self._options.send_backlog_limit_bytes,
            self._memory.take,
            self._options.busy_wait_s,
            lambda count, more: peer.control(messages.FramesReceived(count), more),
            lambda reason: peer.known and self._reconnecting.on_interrupted(peer, reason),
            incarnation,
        )
        self._use_shared_memory(peer, transport)
        return peer

    def _use_shared_memory(self, peer: RemotePeer, transport: Transport) -> None:
        if transport.carries_descriptors and self._pool is not None and peer.segments is None:
            peer.share(self._pool, SegmentMap(self._on_release))

    def _enter(self, peer: RemotePeer) -> None:
        """Make a member addressable."""
        before = self.remotes.get(peer.info.id)
        named = self.named.get(peer.info.name)
        for other in (before, named):
            if isinstance(other, RemotePeer) and other.incarnation != peer.incarnation and not other.broken:
                self._reconnecting.give_up(other, "another process has its name or rank")
        peer.known = True
        self._introductions.pop(peer.life, None)
        self._strangers.pop(peer.life, None)
        self._ends.pop(peer, None)
        self.numbered[peer.member] = peer
        self._by_life[peer.life] = peer
        self.remotes[peer.info.id] = peer
        self.named[peer.info.name] = self.named[peer.info.id] = peer

    def connected(self, transport: Transport, established: Established, dialled: bool) -> RemotePeer:
        """A proven peer has connected, or was dialled, anew: a member's first connection, or a stranger's."""
        identity = established.peer
        info = WorkerInfo(identity.name, identity.rank)
        transport = self._wrap(transport, info)
        life = life_of(identity.process_token)
        logger.info("%s is connected to %s over %s", self._me.info.name, info.name, transport.describe())
        if not self._is_static and not dialled and (record := introduction_of(identity, life)) is not None:
            self._introductions[life] = record
            self._watch().on_message(life, Introduction(record))
        peer = self._by_life.get(life)
        if peer is not None and self._is_first(peer):
            self._use_shared_memory(peer, transport)
            self._reconnecting.begin(peer, established, dialled)
            peer.link.connect(transport, established.leftover)
            return peer
        new = self._make(info, identity.process_token, transport)
        if peer is not None and self._is_static and peer.broken and not peer.link.session.received:
            peer = None  # while the node starts: its connection broke before anything had come over it
        if peer is None:
            self._reconnecting.begin(new, established, dialled)
        if peer is None and self._is_static:
            self._enter(new)
        else:
            self._add_stranger(life, new)
        new.link.start(established.leftover)
        return new

    def _is_first(self, peer: RemotePeer) -> bool:
        """Would a connection be this member's first, as far as it knows?"""
        link = peer.link
        return (
            link.broken is None and not link.session.received and (not link.up or not self._reconnecting.dialled(peer))
        )

    def _add_stranger(self, life: int, peer: RemotePeer) -> None:
        peer.known = False
        before = self._strangers.pop(life, None)
        if before is None and len(self._strangers) >= MAX_STRANGERS:
            before = self._strangers.pop(next(iter(self._strangers)))
        self._strangers[life] = peer
        self._ends[peer] = monotonic() + STRANGER_S
        self._loop.attend_by(self._ends[peer])
        if before is not None:
            self._reconnecting.give_up(before, "it has connected anew")

    def hold(self, peer: RemotePeer, frame: Frame) -> None:
        """A stranger has sent what is not about membership: perhaps it is a member not heard of yet."""
        peer.held.append(frame)
        if len(peer.held) > MAX_HELD:
            peer.link.abort("it is no member here, and talks on")

    def _on_broken(self, peer: RemotePeer, reason: str) -> None:
        """A link is dead."""
        self._reconnecting.forget(peer)
        self._ends.pop(peer, None)
        peer.held.clear()
        life = peer.life
        if not peer.known:
            peer.close()
            if self._strangers.get(life) is peer:
                del self._strangers[life]
                self._introductions.pop(life, None)
            return
        self._stop_dial(life)
        if not self._is_static:
            # The name stays, for those who ask for it; nothing else is kept of the many that come and go.
            self._by_life.pop(life, None)
            self.numbered.pop(peer.member, None)
            if self.remotes.get(peer.info.id) is peer:
                del self.remotes[peer.info.id]
        self._on_gone(peer, reason)

    # ------------------------------------------------------------------ what the watch says

    def send_news(self, life: int, message: News) -> None:
        """Send a membership message, dialling if need be; it may be lost."""
        peer = self._by_life.get(life)
        if peer is not None and peer.link.broken is None:
            if peer.link.up:
                peer.control(message)
            return  # else it is being dialled, or dials
        stranger = self._strangers.get(life)
        if stranger is not None and stranger.link.up:
            stranger.control(message)
            return
        record = self._watch().record_of(life)
        if record is not None:
            dial = self._dial(as_member(record))
            if dial is not None and len(dial.news) < MAX_WAITING_NEWS:
                dial.news.append(message)

    def on_joined(self, record: Record) -> None:
        """There is a new member."""
        life = record.life
        peer = self._by_life.get(life)
        if peer is not None or life == self._me.life:
            return
        peer = self._strangers.get(life)
        if peer is None or peer.link.broken is not None:
            peer = self._make(WorkerInfo(record.name, record.rank), incarnation_of(life), Absent())
        self._enter(peer)
        self.on_entered(peer)
        self.on_change("joined", record, "")
        if not peer.link.up and self._dials_it(record):
            self._dial(as_member(record))
        held, peer.held = peer.held, []
        for frame in held:
            self._on_frame(peer, frame)

    def _dials_it(self, record: Record) -> bool:
        """Of two members, the one that came later dials."""
        me = self._watch().me
        return (me.admission, me.rank, me.life) > (record.admission, record.rank, record.life)

    def on_admitted(self) -> None:
        """This node is a member: so those who said meanwhile that they are members, too, count."""
        for life, record in list(self._introductions.items()):
            if life in self._strangers:
                self._watch().on_message(life, Introduction(record))

    def on_suspected(self, record: Record, suspected: bool) -> None:
        """A member does not answer, or answers again."""
        self.on_change("suspected" if suspected else "recovered", record, "")

    def on_left(self, record: Record) -> None:
        """A member has left; it may still have answers to send."""
        self.on_change("left", record, "")
        peer = self._by_life.get(record.life)
        if peer is None or peer.broken:
            return
        peer.leaving = True
        if not peer.link.up:
            self._reconnecting.give_up(peer, "it has left")
            return
        self._ends[peer] = monotonic() + LEFT_S
        self._loop.attend_by(self._ends[peer])

    def on_died(self, record: Record, why: str) -> None:
        """A member is dead, by the verdict of those who looked for it."""
        self.on_change("dead", record, why)
        self._stop_dial(record.life)
        peer = self._by_life.get(record.life)
        if peer is not None:
            self._reconnecting.give_up(peer, why)

    # ------------------------------------------------------------------ dialling

    def _dial(self, member: MemberRecord) -> _Dial | None:
        """Connect to one that there is no link to, in the background."""
        life = life_of(member.incarnation)
        dial = self._dials.get(life)
        if dial is None and not self._stopped:
            dial = self._dials[life] = _Dial()
            self._begin_dial(dial, member, 0.0)
        return dial

    def _begin_dial(self, dial: _Dial, member: MemberRecord, pause_s: float) -> None:
        ways = usable_ways(member.addresses, member.host_token, self._options.allowed_transports)
        me = self._watch().me
        dial.redial = Redial(
            member.name,
            member.incarnation,
            ways,
            # A unix name may be of another network namespace: where there is another way, that one tells.
            Absent("absent" if any(not way.startswith("unix:") for way in ways) else "unix"),
            introduced(self._identity, me) if me.admission else self._identity,
            self._secret,
            True,
            NEVER,
            pause_s,
            lambda redial, transport, established: self._on_dialled(dial, redial, transport, established),
            lambda redial, why, vanished: self._loop.call_soon(
                lambda: self._on_undialled(dial, redial, member, vanished)
            ),
        )
        dial.redial.start()

    def _on_dialled(self, dial: _Dial, redial: Redial, transport: Transport, established: Established) -> None:
        """On the dial's thread."""
        with self._lock:
            if self._stopped:
                transport.close()
                return
            self._arriving[redial] = transport
        self._loop.call_soon(lambda: self._arrive(dial, redial, established))

    def _arrive(self, dial: _Dial, redial: Redial, established: Established) -> None:
        with self._lock:
            transport = self._arriving.pop(redial, None)
        if transport is None:
            return
        life = life_of(established.peer.process_token)
        if self._dials.get(life) is not dial:
            transport.close()
            return
        del self._dials[life]
        peer = self._by_life.get(life)
        if peer is not None and peer.link.up:
            transport.close()  # it was faster
        else:
            peer = self.connected(transport, established, True)
            peer.control(messages.Ping(0))  # it is answered by those who know us
        for message in dial.news:
            peer.control(message)

    def _on_undialled(self, dial: _Dial, redial: Redial, member: MemberRecord, vanished: bool) -> None:
        life = life_of(member.incarnation)
        if self._dials.get(life) is not dial or dial.redial is not redial:
            return
        if vanished:
            self._watch().feed(LinkRefused(life))
        peer = self._by_life.get(life)
        if peer is None or peer.broken or self._dials.get(life) is not dial:
            self._dials.pop(life, None)
        else:
            self._begin_dial(dial, member, RETRY_S)

    def _stop_dial(self, life: int) -> None:
        dial = self._dials.pop(life, None)
        if dial is not None and dial.redial is not None:
            dial.redial.stop()

    # ------------------------------------------------------------------ time, and the end

    def tick(self, now: float) -> float:
        """Close what nobody needs any more."""
        nearest = NEVER
        for peer, end in list(self._ends.items()):
            if end <= now:
                self._ends.pop(peer, None)
                self._reconnecting.give_up(peer, "it has left" if peer.known else "it is no member here")
            else:
                nearest = min(nearest, end)
        return nearest

    def stop(self) -> None:
        """The node ends: dial nobody any more. From any thread but the I/O thread."""
        with self._lock:
            self._stopped = True
            dials, self._dials = list(self._dials.values()), {}
            for transport in self._arriving.values():
                transport.close()
            self._arriving.clear()
        redials = [dial.redial for dial in dials if dial.redial is not None]
        for redial in redials:
            redial.stop()
        until = monotonic() + STOP_S
        for redial in redials:
            redial.join(max(0.0, until - monotonic()))

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptors."""
        for peer in self.everyone():
            peer.link.close_after_fork()
        for dial in self._dials.values():
            if dial.redial is not None:
                dial.redial.close_after_fork()
        for transport in self._arriving.values():
            transport.close_after_fork()
