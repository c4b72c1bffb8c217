"""Everybody this node knows: the peers by name, by rank and by incarnation, members and strangers.

Owns the tables of peers and the making of them; first connections are made by `dialling.py`, what becomes of one that
breaks is `reconnect.py`'s business, who is a member is decided by `failure_detector.py`. Everything here runs on the
I/O thread, but for `connected` (also while the node starts) and what says otherwise.

    who                       event                               then
    (unknown)                 connects to us, or is dialled       a stranger: heard about membership, nothing else
    (unknown), or stranger    joined                              a member; of two, the one that came later dials
    member, no connection     we dialled it, or it us             connected: what was sent to it meanwhile goes now
    member, connected         connects once more, anew            a stranger beside that: it has lost the session
    member, connected         does not answer for SILENT_PART     it is asked to connect again, if it dialled us
                              of ``suspicion_s``
    member                    left                                no calls any more; its link ends with its Goodbye
    member                    died, or its link is dead           gone: whoever waits for it learns it

A name or a rank stands for the last one that had it, so that calls to the dead say so; who comes next takes it over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

from farcall.channel.recycled import ReceivePool
from farcall.channel.shared_memory import SegmentMap, SegmentPool
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.protocol.frames import Frame
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello
from farcall.protocol.member import Member, incarnation_text
from farcall.protocol.membership import LinkGivenUp, LinkRefused
from farcall.protocol.membership.messages import Introduction
from farcall.protocol.membership.messages import Message as News
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.dialling import Dialling
from farcall.runtime.link.link import Link
from farcall.runtime.link.reconnect import Reconnecting
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.transport.absent import Absent
from farcall.transport.interface import Transport

logger: logging.Logger = logging.getLogger("farcall")

STRANGER_S = 30.0
"""How long a stranger's connection is kept: long enough for it to be told what it needs to know."""
MAX_STRANGERS = 256
LEFT_S = 10.0
"""How long one that has left may take to close its link."""
MAX_HELD = 4096
SILENT_PART = 0.5
MAX_GONE = 1024
"""How many of those who left or died are remembered by name, where members come and go."""


class PeerTable:
    """All peers of one node."""

    def __init__(
        self,
        myself: LoopbackPeer,
        is_static: bool,
        options: RpcBackendOptions,
        loop: Loop,
        pool: SegmentPool | None,
        memory: ReceivePool,
        reconnecting: Reconnecting,
        hello: Hello,
        secret: bytes,
        watch: Callable[[], FailureDetector],
        write_later: Callable[[Callable[[], None]], None],
        fail_call: Callable[[int, str], None],
        on_frame: Callable[[RemotePeer, Frame], None],
        on_gone: Callable[[RemotePeer, str], None],
        on_release: Callable[[bool], None],
        wrap: Callable[[Transport, WorkerInfo], Transport],
    ) -> None:
        """``on_gone(peer, reason)`` is told once of each member whose link is dead."""
        self.named: dict[str | int, Peer] = {myself.info.name: myself, myself.info.id: myself}
        self.numbered: dict[int, Peer] = {myself.number: myself}
        """By ``Peer.number``."""
        self.remotes: dict[int, RemotePeer] = {}
        """The other members, also dead ones whose rank nobody else has, by rank."""
        self._by_incarnation: dict[int, RemotePeer] = {}
        self._strangers: dict[int, RemotePeer] = {}
        self._gone: deque[RemotePeer] = deque()
        self._ends: dict[RemotePeer, float] = {}  # when to close whose link
        self._silent: dict[RemotePeer, tuple[float, object]] = {}  # when to look whether anything came, and since what
        self._introductions: dict[int, Member] = {}
        self._dialling = Dialling(
            options.allowed_transports,
            secret,
            loop,
            self._who_we_are,
            self._on_dialled,
            lambda incarnation: watch().feed(LinkRefused(incarnation)),
            self._is_wanted,
        )
        self.on_expelled: Callable[[str], None] = lambda why: None
        """Told that the others hold this node for dead."""
        self.on_entered: Callable[[RemotePeer], None] = lambda peer: None
        """Told of each member that joined, before anything of it is read."""
        self.on_change: Callable[[str, Member, str], None] = lambda kind, member, why: None
        """Told of members that joined, left, died, are suspected or recovered."""
        self._me = myself
        self._is_static = is_static
        self._options = options
        self._loop = loop
        self._timer = loop.timer(self._look_after_links)
        self._pool = pool
        self._memory = memory
        self._reconnecting = reconnecting
        reconnecting.is_dialling = self._dialling.is_dialling
        self._hello = hello
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
        for incarnation, peer in list(self._by_incarnation.items()):
            if peer.link.broken is None:
                yield incarnation, peer.link

    def everyone(self) -> list[RemotePeer]:
        """All that have a link, strangers too. From any thread."""
        return [*self._by_incarnation.values(), *self._strangers.values()]

    def workers(self) -> list[WorkerInfo]:
        """The members by rank; where members come and go, only those that are there. From any thread."""
        peers = set(self.named.values())
        if not self._is_static:
            peers = {peer for peer in peers if not peer.broken and not (isinstance(peer, RemotePeer) and peer.leaving)}
        return sorted((peer.info for peer in peers), key=lambda info: info.id)

    def knows_us(self, incarnation: int) -> bool:
        """Has that member answered over its link, or is it gone? From any thread."""
        peer = self._by_incarnation.get(incarnation)
        return peer is None or peer.link.session.received > 0 or peer.broken

    # ------------------------------------------------------------------ peers and their links

    def _make(self, info: WorkerInfo, incarnation: int, transport: Transport) -> RemotePeer:
        peer = RemotePeer(info, incarnation, self._is_static, self._write_later, self._me.info, self._fail_call)
        peer.link = Link(
            info,
            transport,
            self._loop,
            partial(self._on_frame, peer),
            partial(self._on_broken, peer),
            self._options.limits.send_backlog_limit_bytes,
            allocate=self._memory.take,
            busy_wait_s=self._options.busy_wait_s,
            acknowledge=lambda count, more: peer.control(messages.FramesReceived(count), more),
            on_interrupted=lambda reason: peer.known and self._reconnecting.on_interrupted(peer, reason),
            incarnation=incarnation_text(incarnation),
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
        self._introductions.pop(peer.incarnation, None)
        self._strangers.pop(peer.incarnation, None)
        self._ends.pop(peer, None)
        self.numbered[peer.number] = peer
        self._by_incarnation[peer.incarnation] = peer
        self.remotes[peer.info.id] = peer
        self.named[peer.info.name] = self.named[peer.info.id] = peer

    def connected(self, transport: Transport, established: Established, dialled: bool) -> RemotePeer:
        """A proven peer has connected, or was dialled, anew: a member's first connection, or a stranger's."""
        member = established.peer.member
        info = WorkerInfo(member.name, member.rank)
        transport = self._wrap(transport, info)
        incarnation = member.incarnation
        logger.info("%s is connected to %s over %s", self._me.info.name, info.name, transport.describe())
        if not self._is_static and not dialled and member.admission:
            self._introductions[incarnation] = member
            self._watch().on_message(incarnation, Introduction(member))
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and self._is_first(peer):
            self._use_shared_memory(peer, transport)
            self._reconnecting.begin(peer, established, dialled)
            peer.link.connect(transport, established.leftover)
            return peer
        new = self._make(info, incarnation, transport)
        if peer is not None and self._is_static and peer.broken and not peer.link.session.received:
            peer = None  # while the node starts: its connection broke before anything had come over it
        if peer is None:
            self._reconnecting.begin(new, established, dialled)
        if peer is None and self._is_static:
            self._enter(new)
        else:
            self._add_stranger(incarnation, new)
        new.link.start(established.leftover)
        return new

    def _is_first(self, peer: RemotePeer) -> bool:
        """Would a connection be this member's first, as far as it knows?"""
        link = peer.link
        return (
            link.broken is None and not link.session.received and (not link.up or not self._reconnecting.dialled(peer))
        )

    def _add_stranger(self, incarnation: int, peer: RemotePeer) -> None:
        peer.known = False
        before = self._strangers.pop(incarnation, None)
        if before is None and len(self._strangers) >= MAX_STRANGERS:
            before = self._strangers.pop(next(iter(self._strangers)))
        self._strangers[incarnation] = peer
        self._ends[peer] = monotonic() + STRANGER_S
        self._timer.at(self._ends[peer])
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
        self._silent.pop(peer, None)
        peer.held.clear()
        incarnation = peer.incarnation
        if not peer.known:
            peer.close()
            if self._strangers.get(incarnation) is peer:
                del self._strangers[incarnation]
                self._introductions.pop(incarnation, None)
            return
        self._dialling.give_up(incarnation)
        if not self._is_static:
            # The name stays for a while, for those who ask for it; nothing else is kept of the many that come and go.
            self._by_incarnation.pop(incarnation, None)
            self.numbered.pop(peer.number, None)
            if self.remotes.get(peer.info.id) is peer:
                del self.remotes[peer.info.id]
            self._gone.append(peer)
            if len(self._gone) > MAX_GONE:
                self._forget(self._gone.popleft())
        self._on_gone(peer, reason)

    def _forget(self, peer: RemotePeer) -> None:
        for key in (peer.info.name, peer.info.id):
            if self.named.get(key) is peer:
                del self.named[key]

    # ------------------------------------------------------------------ what the watch says

    def send_news(self, incarnation: int, message: News) -> None:
        """Send a membership message, dialling if need be; it may be lost."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and peer.link.broken is None:
            if peer.link.up:
                peer.control(message)
            return  # else it is being dialled, or dials
        stranger = self._strangers.get(incarnation)
        if stranger is not None and stranger.link.up:
            stranger.control(message)
            return
        member = self._watch().member_of(incarnation)
        if member is not None:
            self._dialling.dial(member, message)

    def on_joined(self, member: Member) -> None:
        """There is a new member."""
        incarnation = member.incarnation
        peer = self._by_incarnation.get(incarnation)
        if peer is not None or incarnation == self._me.incarnation:
            return
        peer = self._strangers.get(incarnation)
        if peer is None or peer.link.broken is not None:
            peer = self._make(WorkerInfo(member.name, member.rank), incarnation, Absent())
        self._enter(peer)
        self.on_entered(peer)
        self.on_change("joined", member, "")
        if not peer.link.up and self._dials_it(member):
            self._dialling.dial(member)
        held, peer.held = peer.held, []
        for frame in held:
            self._on_frame(peer, frame)

    def _dials_it(self, member: Member) -> bool:
        """Of two members, the one that came later dials."""
        me = self._watch().me
        return (me.admission, me.rank, me.incarnation) > (member.admission, member.rank, member.incarnation)

    def on_admitted(self) -> None:
        """This node is a member: so those who said meanwhile that they are members, too, count."""
        for incarnation, member in list(self._introductions.items()):
            if incarnation in self._strangers:
                self._watch().on_message(incarnation, Introduction(member))

    def on_suspected(self, member: Member, suspected: bool) -> None:
        """A member does not answer, or answers again."""
        if suspected:
            self.on_silent(member.incarnation)
        self.on_change("suspected" if suspected else "recovered", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if not suspected and self._options.membership.reconnect_s and (peer is None or peer.broken):
            # We had given it up a moment before it could be reached again. One that is dead to some and lives for
            # others would lose references between those, too.
            self._watch().feed(LinkGivenUp(member.incarnation, f"{self._me.info.name} could not reach it for too long"))

    def on_silent(self, incarnation: int) -> None:
        """A member does not answer us. Its connection may be to blame: routers forget them, and tell nobody."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and peer.link.up and peer not in self._silent:
            look_at = monotonic() + SILENT_PART * self._options.membership.suspicion_s
            self._silent[peer] = (look_at, peer.link.progress)
            self._timer.at(look_at)

    def on_left(self, member: Member) -> None:
        """A member has left; it may still have answers to send."""
        self.on_change("left", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if peer is None or peer.broken:
            return
        peer.leaving = True
        if not peer.link.up:
            self._reconnecting.give_up(peer, "it has left")
            return
        self._ends[peer] = monotonic() + LEFT_S
        self._timer.at(self._ends[peer])

    def on_died(self, member: Member, why: str) -> None:
        """A member is dead, by the verdict of those who looked for it."""
        self.on_change("dead", member, why)
        self._dialling.give_up(member.incarnation)
        peer = self._by_incarnation.get(member.incarnation)
        if peer is not None:
            self._reconnecting.give_up(peer, why)

    # ------------------------------------------------------------------ dialling

    def _who_we_are(self) -> Hello:
        return Hello(self._watch().me, self._hello.cluster_id)

    def _on_dialled(self, transport: Transport, established: Established, news: Sequence[News]) -> None:
        peer = self._by_incarnation.get(established.peer.member.incarnation)
        if peer is not None and peer.link.up:
            transport.close()  # it was faster
        else:
            peer = self.connected(transport, established, True)
            peer.control(messages.Ping(0))  # it is answered by those who know us
        for message in news:
            peer.control(message)

    def _is_wanted(self, incarnation: int) -> bool:
        peer = self._by_incarnation.get(incarnation)
        return peer is not None and not peer.broken

    # ------------------------------------------------------------------ time, and the end

    def _look_after_links(self, now: float) -> float:
        """Close what nobody needs any more, and look after connections that are silent."""
        nearest = NEVER
        for peer, (look_at, progress) in list(self._silent.items()):
            if look_at <= now:
                del self._silent[peer]
                if peer.link.up and peer.link.progress == progress:
                    self._reconnecting.remind(peer)
            else:
                nearest = min(nearest, look_at)
        for peer, end in list(self._ends.items()):
            if end <= now:
                self._ends.pop(peer, None)
                self._reconnecting.give_up(peer, "it has left" if peer.known else "it is no member here")
            else:
                nearest = min(nearest, end)
        return nearest

    def stop(self) -> None:
        """The node ends: dial nobody any more. From any thread but the I/O thread."""
        self._dialling.stop()

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptors."""
        for peer in self.everyone():
            peer.link.close_after_fork()
        self._dialling.close_after_fork()
