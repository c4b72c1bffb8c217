"""The peers of one node, members and strangers, by name, rank, number and incarnation.

Owns the tables of peers and the making of peers. Connections are made, and made again, by `link/connector.py`;
`failure_detector.py` decides which peers are members. Everything here runs on the I/O thread, but for `connected` (also
while the node starts) and what says otherwise.

    peer                      event                               then
    (unknown)                 connects to us, or is dialled       a stranger: heard about membership, nothing else
    (unknown), or stranger    joined                              a member; of two, the one that came later dials
    member, no connection     we dialled it, or it us             connected: what was sent to it meanwhile goes now
    member, connected         connects once more, anew            a stranger beside that: it has lost the session
    member, connected         its host leaves all unanswered      its connection is given up, and made again
                              for SILENT_PART of ``reconnect_s``
    member                    left                                no calls any more; its link ends with its Goodbye
    member                    died, or its link is dead           gone: calls that wait for it fail

A name or a rank stands for the last member that had it, so that calls to the dead say so, until another one takes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

from farcall.channel.segment_map import SegmentMap
from farcall.ids import MemberInfo, MemberList, WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.protocol.frames import Frame
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello
from farcall.protocol.member import Member, incarnation_text
from farcall.protocol.membership.events import LinkGivenUp
from farcall.protocol.membership.joining import GROUP_IS_OVER
from farcall.protocol.membership.messages import Introduction, Status
from farcall.protocol.membership.messages import Message as News
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.connector import Connector
from farcall.runtime.link.dialler import usable_ways
from farcall.runtime.link.link import Link
from farcall.runtime.membership.failure_detector import FailureDetector, chosen
from farcall.runtime.peers.host import Host, Resources, Watcher
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.rendezvous.agreement import Membership
from farcall.transport.interface import Absent, Transport

logger: logging.Logger = logging.getLogger("farcall")

STRANGER_S = 30.0
"""How long a stranger's connection is kept: long enough for it to be told what it needs to know."""
MAX_STRANGERS = 256
LEFT_S = 10.0
"""How long a member that has left may take to close its link."""
MAX_HELD = 4096
SILENT_PART = 0.5
MAX_GONE = 1024
"""How many members that left or died are remembered by name, where members come and go."""


class PeerTable:
    """The peers of one node, by name, rank, number and incarnation."""

    def __init__(
        self,
        myself: LoopbackPeer,
        membership: Membership,
        options: RpcBackendOptions,
        resources: Resources,
        *,
        is_static: bool,
        is_founder: bool,
        host: Host,
        watcher: Watcher,
        on_frame: Callable[[RemotePeer, Frame], None],
    ) -> None:
        """``is_static``: a group of fixed size; ``is_founder``: and ``membership`` has all its first members."""
        self.named: dict[str | int, Peer] = {myself.info.name: myself, myself.info.id: myself}
        """The targets of calls, by name and by rank."""
        self.numbered: dict[int, Peer] = {myself.number: myself}
        """By ``Peer.number``."""
        self.remotes: dict[int, RemotePeer] = {}
        """The other members, also dead ones whose rank nobody else has, by rank."""
        self._by_incarnation: dict[int, RemotePeer] = {}
        self._strangers: dict[int, RemotePeer] = {}
        self._gone: deque[RemotePeer] = deque()
        self._ends: dict[RemotePeer, float] = {}  # when to close whose link
        self._silent: dict[RemotePeer, float] = {}  # whose host is looked at, and until when at least
        self._records: dict[int, Member] = {}  # who the strangers say they are
        self._me = myself
        self._membership = membership
        self._is_static = is_static
        self._founders = {member.incarnation for member in membership.members} if is_founder else set()
        self._options = options
        self._resources = resources
        self._host = host
        self.watcher: Watcher = watcher
        self._on_frame = on_frame
        self._timer = resources.loop.timer(self._look_after_links)
        self.watch: FailureDetector = FailureDetector(
            membership.me,
            membership.members if is_founder else None,
            chosen(options),
            resources.loop,
            self,
            is_fixed=is_static,
        )
        """The membership protocol: decides which incarnations are members."""
        self.connector: Connector = Connector(self, self.watch, resources.loop, options, secret=membership.secret)

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
        return [peer.info for peer in self._present()]

    def members(self) -> list[MemberInfo]:
        """The same, and who is unresponsive. From any thread."""
        silent, found = self.watch.unresponsive(), MemberList()
        for peer in self._present():
            member = MemberInfo(*peer.info)
            member.unresponsive_s = silent.get(peer.incarnation)
            found.append(member)
        return found

    def _present(self) -> list[Peer]:
        # One whose name or rank another has by now is remembered under what is left, and no member.
        named, peers = self.named, set(self.named.values())  # at once: the I/O thread may change them
        peers = {peer for peer in peers if named.get(peer.info.name) is peer is named.get(peer.info.id)}
        if not self._is_static:
            peers = {peer for peer in peers if not peer.broken and not (isinstance(peer, RemotePeer) and peer.leaving)}
        return sorted(peers, key=lambda peer: peer.info.id)

    def is_over(self, incarnation: int) -> bool:
        """Has that member left or died? From any thread."""
        status = self.watch.status_of(incarnation)
        return status is not None and status >= Status.DEAD

    def why_closed(self, incarnation: int) -> str | None:
        """Why a proven process that is no member of this group of fixed size is not even heard; None: it is."""
        if self._is_static and self.watch.is_over and not self.watch.is_member(incarnation):
            return GROUP_IS_OVER
        return None

    def who_may_let_us_in(self) -> list[Member]:
        """Where to ask after this node was expelled: first the one that said so, then all others it knew, by rank."""
        by = self.watch.expelled_by
        known = {member.incarnation: member for member in [*self._records.values(), *self.watch.acquaintances()]}
        return sorted(known.values(), key=lambda member: (member.incarnation != by, member.rank))

    def knows_us(self, incarnation: int) -> bool:
        """Has that member answered over its link, or is it gone? From any thread."""
        peer = self._by_incarnation.get(incarnation)
        return peer is None or peer.link.session.received > 0 or peer.broken

    # ------------------------------------------------------------------ peers and their links

    def _make(self, info: WorkerInfo, incarnation: int, transport: Transport) -> RemotePeer:
        number = info.id if incarnation in self._founders else incarnation
        peer = RemotePeer(info, incarnation, number, self._host.write_later, self._me.info, self.watcher.fail_unsent)
        peer.link = Link(
            info,
            transport,
            self._resources.loop,
            partial(self._on_frame, peer),
            partial(self._on_broken, peer),
            self._options.limits.send_backlog_limit_bytes,
            allocate=self._resources.memory.take,
            busy_wait_s=self._options.busy_wait_s,
            acknowledge=lambda count, more: peer.control(messages.FramesReceived(count), more),
            on_interrupted=lambda reason: peer.known and self.connector.on_interrupted(peer, reason),
            incarnation=incarnation_text(incarnation),
        )
        self._use_shared_memory(peer, transport)
        return peer

    def _use_shared_memory(self, peer: RemotePeer, transport: Transport) -> None:
        if transport.carries_descriptors and self._resources.pool is not None and peer.segments is None:
            peer.share(self._resources.pool, SegmentMap(self._host.on_release))

    def _enter(self, peer: RemotePeer) -> None:
        """Make a member addressable."""
        before = self.remotes.get(peer.info.id)
        named = self.named.get(peer.info.name)
        for other in (before, named):
            if isinstance(other, RemotePeer) and other.incarnation != peer.incarnation:
                if not other.broken:
                    self.connector.give_up(other, "another process has its name or rank")
                if other.number == other.incarnation:  # one that came later, of which a group may see many
                    self._by_incarnation.pop(other.incarnation, None)
                    self.numbered.pop(other.number, None)
        peer.known = True
        self._records.pop(peer.incarnation, None)
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
        transport = self._host.wrap(transport, info)
        incarnation = member.incarnation
        logger.debug("%s is connected to %s over %s", self._me.info.name, info.name, transport.describe())
        if not dialled and member.admission:
            self.watch.on_message(incarnation, Introduction(member))
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and self._is_first(peer):
            self._use_shared_memory(peer, transport)
            self.connector.begin(peer, established, dialled)
            peer.link.connect(transport, established.leftover)
            return peer
        new = self._make(info, incarnation, transport)
        is_founder = incarnation in self._founders
        if peer is not None and is_founder and peer.broken and not peer.link.session.received:
            peer = None  # while the node starts: its connection broke before anything had come over it
        if peer is None:
            self.connector.begin(new, established, dialled)
        if peer is None and is_founder:
            self._enter(new)
        else:
            self._add_stranger(member, new)
        new.link.start(established.leftover)
        return new

    def _is_first(self, peer: RemotePeer) -> bool:
        """Would a connection be this member's first, as far as it knows?"""
        link = peer.link
        return link.broken is None and not link.session.received and (not link.up or not self.connector.dialled(peer))

    def _add_stranger(self, member: Member, peer: RemotePeer) -> None:
        incarnation = member.incarnation
        self._records[incarnation] = member
        peer.known = False
        before = self._strangers.pop(incarnation, None)
        if before is None and len(self._strangers) >= MAX_STRANGERS:
            before = self._strangers.pop(next(iter(self._strangers)))
        self._strangers[incarnation] = peer
        self._ends[peer] = monotonic() + STRANGER_S
        self._timer.at(self._ends[peer])
        if before is not None:
            self.connector.give_up(before, "it has connected anew")

    def hold(self, peer: RemotePeer, frame: Frame) -> None:
        """A stranger has sent what is not about membership: perhaps it is a member not heard of yet."""
        peer.held.append(frame)
        if len(peer.held) > MAX_HELD:
            peer.link.abort("it is no member here, and talks on")

    def _on_broken(self, peer: RemotePeer, reason: str) -> None:
        """A link is dead."""
        self.connector.forget(peer)
        self._ends.pop(peer, None)
        self._silent.pop(peer, None)
        peer.held.clear()
        incarnation = peer.incarnation
        if not peer.known:
            peer.close()
            if self._strangers.get(incarnation) is peer:
                del self._strangers[incarnation]
                self._records.pop(incarnation, None)
            return
        self.connector.abandon(incarnation)
        if not self._is_static:
            # The name stays for a while, for those who ask for it; nothing else is kept of the many that come and go.
            self._by_incarnation.pop(incarnation, None)
            self.numbered.pop(peer.number, None)
            if self.remotes.get(peer.info.id) is peer:
                del self.remotes[peer.info.id]
            self._gone.append(peer)
            if len(self._gone) > MAX_GONE:
                oldest = self._gone.popleft()
                for key in (oldest.info.name, oldest.info.id):
                    if self.named.get(key) is oldest:
                        del self.named[key]
        self.watcher.on_gone(peer, reason)

    # ------------------------------------------------------------------ effects of the membership protocol

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
        member = self.watch.member_of(incarnation)
        if member is not None:
            self.connector.dial(member, message)

    def on_joined(self, member: Member) -> None:
        """There is a new member."""
        incarnation = member.incarnation
        peer = self._by_incarnation.get(incarnation)
        if peer is not None or incarnation == self._me.incarnation:
            return
        peer = self._strangers.get(incarnation)
        if peer is None or peer.link.broken is not None:
            peer = self._make(WorkerInfo(member.name, member.rank), incarnation, Absent())
        if self._is_static and not member.admission:
            peer.number = member.rank
        self._enter(peer)
        self.watcher.on_entered(peer)
        self.watcher.on_change("joined", member, "")
        me = self.watch.me
        is_later = (me.admission, me.rank, me.incarnation) > (member.admission, member.rank, incarnation)
        if not peer.link.up and is_later:  # of two members, the one that came later dials
            self.connector.dial(member)
        held, peer.held = peer.held, []
        for frame in held:
            self._on_frame(peer, frame)

    def on_admitted(self) -> None:
        """This node is a member: so are the strangers that have introduced themselves as members meanwhile."""
        for incarnation, member in list(self._records.items()):
            if incarnation in self._strangers and member.admission:
                self.watch.on_message(incarnation, Introduction(member))

    def on_unresponsive(self, member: Member, unresponsive: bool) -> None:
        """A member does not answer, or answers again."""
        if unresponsive:
            self.on_silent(member.incarnation)
        self.watcher.on_change("unresponsive" if unresponsive else "recovered", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if unresponsive and peer is not None and isinstance(peer.link.transport, Absent):
            self.connector.dial(member)  # its part it was, and whether it is there has to be found out
        if not unresponsive and self._options.membership.reconnect_s and (peer is None or peer.broken):
            # We had given it up a moment before it could be reached again. One that is dead to some and lives for
            # others would lose references between those, too.
            self.watch.feed(LinkGivenUp(member.incarnation, f"{self._me.info.name} could not reach it for too long"))

    def on_silent(self, incarnation: int) -> None:
        """A member does not answer us. Its connection may be to blame, or its host be gone: look for a while."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and peer.link.up and peer not in self._silent:
            now = monotonic()
            self._silent[peer] = now + self._patience_s
            self._timer.at(now)

    @property
    def _patience_s(self) -> float:
        """How long a host may leave everything unanswered."""
        return self._options.membership.reconnect_s or self._options.membership.suspicion_s

    def host_answers(self, incarnation: int) -> bool:
        """Does the host of an unresponsive member answer, as far as was tried? One that was given up here does not."""
        peer = self._by_incarnation.get(incarnation)
        if peer is None or peer.link.broken is not None:
            return False
        return self.connector.host_silent_s(incarnation) < self._patience_s

    def on_left(self, member: Member) -> None:
        """A member has left; it may still have answers to send."""
        self.watcher.on_change("left", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if peer is None or peer.broken:
            return
        peer.leaving = True
        if not peer.link.up:
            self.connector.give_up(peer, "it has left")
            return
        self._ends[peer] = monotonic() + LEFT_S
        self._timer.at(self._ends[peer])

    def on_died(self, member: Member, why: str) -> None:
        """A member is dead, by the verdict of the members."""
        self.watcher.on_change("dead", member, why)
        self.connector.abandon(member.incarnation)
        peer = self._by_incarnation.get(member.incarnation)
        if peer is not None:
            self.connector.give_up(peer, why)

    def on_expelled(self, why: str) -> None:
        """The others hold this node for dead."""
        self._host.on_expelled(why)

    # ------------------------------------------------------------------ for the connector

    def hello(self) -> Hello:
        """What this node says of itself; with its admission number, once it has one."""
        return Hello(self.watch.me, self._membership.cluster_id)

    def ways_to(self, incarnation: int) -> list[str]:
        """The addresses of a member that may work from here."""
        member = self.watch.member_of(incarnation)
        return [] if member is None else usable_ways(member, self._options.allowed_transports)

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """What a link uses instead of a transport."""
        return self._host.wrap(transport, info)

    def is_wanted(self, incarnation: int) -> bool:
        """Is a member that was not there to be looked for again?"""
        peer = self._by_incarnation.get(incarnation)
        return peer is not None and not peer.broken

    def on_dialled(self, transport: Transport, established: Established, news: Sequence[News]) -> None:
        """A member that was dialled for the first time let us in."""
        peer = self._by_incarnation.get(established.peer.member.incarnation)
        if peer is not None and peer.link.up:
            transport.close()  # it was faster
        else:
            peer = self.connected(transport, established, True)
            peer.control(messages.Ping(0))  # it is answered by those who know us
        for message in news:
            peer.control(message)

    # ------------------------------------------------------------------ time, and the end

    def _look_after_links(self, now: float) -> float:
        """Close what nobody needs any more, and look after connections that are silent."""
        nearest = NEVER
        for peer, until in list(self._silent.items()):
            silent_s = peer.link.transport.silent_s() if peer.link.up else 0.0
            if silent_s >= SILENT_PART * self._patience_s:
                self.connector.mend_silence(peer, silent_s)
            if now >= until and not silent_s and peer.incarnation not in self.watch.unresponsive():
                del self._silent[peer]
            else:
                nearest = min(nearest, now + self._options.membership.probe_interval_s)
        for peer, end in list(self._ends.items()):
            if end <= now:
                self._ends.pop(peer, None)
                self.connector.give_up(peer, "it has left" if peer.known else "it is no member here")
            else:
                nearest = min(nearest, end)
        return nearest
