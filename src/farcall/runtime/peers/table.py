"""The peers of one node, members and strangers, by name, rank, number and incarnation.

Owns the tables of peers and makes the peers. `link/connector.py` makes connections, and makes broken ones again;
`failure_detector.py` decides which peers are members. Everything here runs on the I/O thread, except `connected` (also
while the node starts) and functions that say otherwise.

    peer                      event                               then
    (unknown)                 connects to us, or is dialled       a stranger: only its membership messages are handled
    (unknown), or stranger    joined a small group                a member; of each two, the later one dials, and a
                                                                  newcomer all that were there
    (unknown), or stranger    joined a large one, a neighbour     the same; or the first that has something to send
    (unknown), or stranger    joined a large one, another         a member; the first that has something to send dials
    member, no connection     we dialled it, or it us             connected: the messages sent meanwhile go out
    member, no neighbour      no message for a while              parts from us; connected again when needed
    member, connected         connects once more, anew            a stranger beside the member: it lost the session
    member, connected         its host leaves all unanswered      its connection is given up, and made again
                              for SILENT_PART of ``reconnect_s``
    member                    left                                no more calls to it; its link ends with its Goodbye
    member                    died, or its link is dead           gone: calls that wait for it fail

A name or a rank stands for its last owner until another member takes it, so that a call to a dead member says so.

Over 400 lines: all events about peers change these few tables.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any

from farcall.channel.segment_map import SegmentMap
from farcall.ids import MemberInfo, MemberList, WorkerInfo
from farcall.imports import gc_paused
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello
from farcall.protocol.member import Member, incarnation_text
from farcall.protocol.membership.events import LinkGivenUp
from farcall.protocol.membership.joining import GROUP_IS_OVER
from farcall.protocol.membership.messages import Introduction, Status
from farcall.protocol.membership.messages import Message as News
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.connector import Connector
from farcall.runtime.link.dialler import is_near, usable_ways
from farcall.runtime.link.link import Link
from farcall.runtime.link.parting import Partings
from farcall.runtime.link.resend import instead_of
from farcall.runtime.membership.failure_detector import FailureDetector, chosen
from farcall.runtime.peers.host import Host, Resources, Watcher
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.rendezvous.addresses import is_on_loopback
from farcall.runtime.rendezvous.agreement import Membership
from farcall.transport.interface import Absent, Transport

logger: logging.Logger = logging.getLogger("farcall")

STRANGER_S = 30.0
"""How long a stranger's connection is kept: long enough for the membership messages that it needs."""
MAX_STRANGERS = 256
YIELDED_S = 2.0
"""How long a member whose dial made us give up our own may take to connect."""
AWAITED_S = 10.0
"""How long a new member of a small group may take to dial us; after that, the first with something to send dials."""
LEFT_S = 10.0
"""How long a member that has left may take to close its link."""
SILENT_PART = 0.5
MAX_GONE = 1024
"""How many members that left or died are remembered by name, in a group whose members come and go."""


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
        dispatcher: Any,
    ) -> None:
        """``is_static``: the group has a fixed size; ``is_founder``: ``membership`` lists all its founding members."""
        # Mutable: the tables of peers. The I/O thread alone changes them once the node runs; others read in one step.
        self.named: dict[str | int, Peer] = {myself.info.name: myself, myself.info.id: myself}
        """The targets of calls, by name and by rank."""
        self.numbered: dict[int, Peer] = {myself.number: myself}
        """The members, by ``Peer.number``."""
        self.remotes: dict[int, RemotePeer] = {}
        """The other members by rank, including dead ones whose rank no other member has taken."""
        self._by_incarnation: dict[int, RemotePeer] = {}
        self._strangers: dict[int, RemotePeer] = {}  # by incarnation
        self._gone: deque[RemotePeer] = deque()  # the oldest first
        self._ends: dict[RemotePeer, float] = {}  # when to close the link of each
        self._yielded: dict[RemotePeer, float] = {}  # when each should have connected to us
        # The member whose connection is being taken: a dial now would cross with that, and both would be closed.
        self._arriving = 0
        self._silent: dict[RemotePeer, float] = {}  # members whose host is watched, and until when at least
        self._records: dict[int, Member] = {}  # the strangers as they introduced themselves, by incarnation
        # Several threads may need a link at the same moment. Re-entrant: a garbage collection inside may need one, too.
        self._making = threading.RLock()
        self._awaited: dict[RemotePeer, float] = {}  # new members of a small group: when each should have dialled us
        self._me = myself
        self._membership = membership
        self._is_static = is_static
        self._founders = {member.incarnation for member in membership.members} if is_founder else set()
        self._options = options
        self._resources = resources
        self._host = host
        self.watcher: Watcher = watcher
        self._dispatcher = dispatcher
        self.by_link: dict[int, Peer] = {myself.way: myself, myself.back: myself}
        """Those behind the links of the core."""
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
        self.partings: Partings = Partings(
            myself.incarnation,
            self.connector,
            self.watch,
            watcher,
            loop=resources.loop,
            reconnect_s=options.membership.reconnect_s,
        )

    # ------------------------------------------------------------------ looking

    def links(self) -> Iterator[tuple[int, Link]]:
        """The members' links that have a connection, or had one until it broke; by incarnation."""
        for incarnation, peer in self.connector.awake.copy().items():
            if peer.known and peer.link.broken is None:
                yield incarnation, peer.link

    def everyone(self) -> list[RemotePeer]:
        """All peers that have a link, strangers included. From any thread."""
        return [peer for peer in (*self._by_incarnation.values(), *self._strangers.values()) if peer.linked]

    def neighbours(self) -> list[int]:
        """The ranks of the members that keep a standing link to this node. On the I/O thread."""
        peers = (self._by_incarnation.get(incarnation) for incarnation in self.watch.neighbours())
        return [peer.info.id for peer in peers if peer is not None]

    def stranger(self, incarnation: int) -> RemotePeer | None:
        """The connected peer of that incarnation, if it is no member as far as this node knows. From any thread."""
        peer = self._strangers.get(incarnation)
        return peer if peer is not None and peer.link.up else None

    def workers(self) -> list[WorkerInfo]:
        """The members by rank; in a group whose members come and go, only the present ones. From any thread."""
        return [peer.info for peer in self._present()]

    def members(self) -> list[MemberInfo]:
        """`workers`, with the time for which each has been unresponsive. From any thread."""
        silent, found = self.watch.unresponsive(), MemberList()
        for peer in self._present():
            member = MemberInfo(*peer.info)
            member.unresponsive_s = silent.get(peer.incarnation)
            found.append(member)
        return found

    def _present(self) -> list[Peer]:
        # A peer that has lost its name or its rank to another one is still found under the other key: it is no member.
        named, peers = self.named, set(self.named.values())  # one atomic copy: the I/O thread may change the table
        peers = {peer for peer in peers if named.get(peer.info.name) is peer is named.get(peer.info.id)}
        if not self._is_static:
            peers = {peer for peer in peers if not peer.broken and not (isinstance(peer, RemotePeer) and peer.leaving)}
        return sorted(peers, key=lambda peer: peer.info.id)

    def is_over(self, incarnation: int) -> bool:
        """Has the member of that incarnation left or died? From any thread."""
        status = self.watch.status_of(incarnation)
        return status is not None and status >= Status.DEAD

    def why_closed(self, incarnation: int) -> str | None:
        """Why an authenticated process may not even connect: this group of fixed size ends. None: it may connect."""
        if self._is_static and self.watch.is_over and not self.watch.is_member(incarnation):
            return GROUP_IS_OVER
        return None

    def why_unreached(self, peer: RemotePeer) -> str:
        """Why there is no connection to a member, for users; empty if there is one, or none is needed."""
        member, me = self.member_of(peer.incarnation), self.watch.me
        why = self.connector.why_not_reached(peer.incarnation)
        is_up = peer.linked and peer.link.up
        if member is None or peer.broken or is_up or (not why and peer.linked and peer.link.asleep):
            return ""
        text = f"{me.name} has no connection to {member.name}{f' ({why})' if why else ''}"
        for one in () if is_near(member, me.host_token) else (member, me):
            if is_on_loopback(one.addresses):
                text += (
                    f"; {one.name} has told the others an address that leads to no other host: set advertise=... or "
                    "FARCALL_ADVERTISE there"
                )
        return text

    def who_may_let_us_in(self) -> list[Member]:
        """Members to ask after this node was expelled: first the one that reported it, then all known ones, by rank."""
        by = self.watch.expelled_by
        known = {member.incarnation: member for member in [*self._records.values(), *self.watch.known_members()]}
        return sorted(known.values(), key=lambda member: (member.incarnation != by, member.rank))

    def knows_us(self, incarnation: int) -> bool:
        """Has the member of that incarnation answered over its link, or is it gone? From any thread."""
        peer = self._by_incarnation.get(incarnation)
        return peer is None or (peer.linked and peer.link.has_heard) or peer.broken

    # ------------------------------------------------------------------ peers and their links

    def _make(self, info: WorkerInfo, incarnation: int) -> RemotePeer:
        number = info.id if incarnation in self._founders else incarnation
        return RemotePeer(
            info,
            incarnation,
            number,
            self._resources.core,
            self._resources.loop,
            self._make_sleeping_link,
        )

    def _make_sleeping_link(self, peer: RemotePeer) -> None:
        """From any thread: make the link to a member that never had a connection; the first message will dial."""
        self._make_link(peer, Absent(), asleep=True)

    def _make_link(self, peer: RemotePeer, transport: Transport, *, asleep: bool = False) -> None:
        link = self._new_link(peer, transport)  # outside the lock: it takes a while
        if asleep:
            link.sleep()
        with self._making:
            if peer.linked:
                link.close("another thread was faster")
                return
            if peer.gone is not None:
                link.close(peer.gone)
            self.by_link[link.number] = peer
            peer.link, peer.way, peer.back = link, link.number, link.number
            peer.linked = True
            if peer.known:
                self._resources.core.admit(link.number)
        self._use_shared_memory(peer, transport)

    def _new_link(self, peer: RemotePeer, transport: Transport) -> Link:
        return Link(
            self._resources.core,
            peer.info,
            transport,
            self._resources.loop,
            partial(self._on_broken, peer),
            instead=partial(instead_of, self._me.info, peer),
            on_interrupted=lambda reason: peer.known and self.connector.on_interrupted(peer, reason),
            on_wanted=lambda: self.connector.wake(peer),
            forget_end=self._dispatcher.forget_end,
            incarnation=incarnation_text(peer.incarnation),
        )

    def _use_shared_memory(self, peer: RemotePeer, transport: Transport) -> None:
        if transport.carries_descriptors and self._resources.pool is not None and peer.segments is None:
            peer.share(self._resources.pool, SegmentMap(self._host.on_release))

    def _enter(self, peer: RemotePeer) -> None:
        """Make a member addressable, in the place of an earlier owner of its name or rank."""
        before = self.remotes.get(peer.info.id)
        named = self.named.get(peer.info.name)
        for other in (before, named):
            if isinstance(other, RemotePeer) and other.incarnation != peer.incarnation:
                self._give_up(other, "another process has its name or rank")
                if other.number == other.incarnation:  # no founder: a group may see any number of such members
                    self._by_incarnation.pop(other.incarnation, None)
                    self.numbered.pop(other.number, None)
        self._admit(peer)
        self._records.pop(peer.incarnation, None)
        self._strangers.pop(peer.incarnation, None)
        self._ends.pop(peer, None)
        self._address(peer)
        if not self.watch.is_near_all:
            self.partings.look_from_now_on()
            # Members that should dial us may have seen the group as large before we did, and us as no neighbour: they
            # will not dial.
            awaited, self._awaited = self._awaited, {}
            for other in awaited:
                self.connector.look_after(other)

    def _admit(self, peer: RemotePeer) -> None:
        """What a member sends is handled from now on, beginning with what has waited."""
        was_known, peer.known = peer.known, True
        if not peer.linked:
            return
        core, number = self._resources.core, peer.link.number
        core.admit(number)
        if was_known:
            return
        early, peer.early = peer.early, []
        for handle, message in early:
            handle(peer, message)
        core.unpause(number)

    def expect(self, members: Iterable[Member]) -> None:
        """While the node starts: enter founding members that are connected only when needed."""
        with gc_paused():
            for member in members:
                self._address(self._make(WorkerInfo(member.name, member.rank), member.incarnation))
        if not self.watch.is_near_all:
            self.partings.look_from_now_on()

    def _address(self, peer: RemotePeer) -> None:
        self.numbered[peer.number] = peer
        self._by_incarnation[peer.incarnation] = peer
        self.remotes[peer.info.id] = peer
        self.named[peer.info.name] = self.named[peer.info.id] = peer

    def connected(self, transport: Transport, established: Established, dialled: bool) -> RemotePeer:
        """An authenticated peer has connected anew, or was dialled: a member's first connection, or a stranger's."""
        member = established.peer.member
        info = WorkerInfo(member.name, member.rank)
        transport = self._host.wrap(transport, info)
        incarnation = member.incarnation
        logger.debug("%s is connected to %s over %s", self._me.info.name, info.name, transport.describe())
        if not dialled and member.admission:
            self._arriving = incarnation
            self.watch.on_message(incarnation, Introduction(member))
            self._arriving = 0
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and self._is_first(peer):
            self._use_shared_memory(peer, transport)
            self.connector.begin(peer, established, dialled)
            peer.link.connect(transport, established.leftover)
            return peer
        new = self._make(info, incarnation)
        self._make_link(new, transport)
        is_founder = incarnation in self._founders
        if peer is not None and is_founder and peer.broken and not peer.link.has_heard:
            peer = None  # while the node starts: its connection broke before the first frame arrived
        if peer is None:
            self.connector.begin(new, established, dialled)
        if peer is None and is_founder:
            self._enter(new)
        else:
            self._add_stranger(member, new)
        new.link.start(established.leftover)
        return new

    def _is_first(self, peer: RemotePeer) -> bool:
        """Would a new connection be this member's first, as far as the member knows?"""
        link = peer.link
        return link.broken is None and not link.has_heard and (not link.up or not self.connector.dialled(peer))

    def _add_stranger(self, member: Member, peer: RemotePeer) -> None:
        incarnation = member.incarnation
        self._records[incarnation] = member
        peer.known = False
        before = self._strangers.pop(incarnation, None)
        if before is None and len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            before = self._strangers.pop(oldest)
            self._records.pop(oldest, None)
        self._strangers[incarnation] = peer
        self._ends[peer] = monotonic() + STRANGER_S
        self._timer.at(self._ends[peer])
        if before is not None:
            self.connector.give_up(before, "it has connected anew")

    def _give_up(self, peer: RemotePeer, reason: str) -> None:
        """A member is gone. If it never had a link, make none for this: in a large group most have none."""
        with self._making:
            if not peer.linked and peer.gone is None:
                peer.gone = reason
                is_news = True
            else:
                is_news = False
        if is_news:
            self._on_broken(peer, reason)
        elif peer.linked:
            self.connector.give_up(peer, reason)

    def _on_broken(self, peer: RemotePeer, reason: str) -> None:
        """A link is dead, or a member without one is gone."""
        self.connector.forget(peer)
        self._ends.pop(peer, None)
        self._awaited.pop(peer, None)
        self._silent.pop(peer, None)
        peer.early.clear()
        incarnation = peer.incarnation
        if not peer.known:
            peer.close()
            if self._strangers.get(incarnation) is peer:
                del self._strangers[incarnation]
                self._records.pop(incarnation, None)
            return
        self.connector.abandon(incarnation)
        if not self._is_static:
            # Keep the name for a while, so that calls to it say what happened. Keep nothing else: members come and go
            # without end.
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
        """Send a membership message, dialling if necessary; it may be lost."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and peer.linked and peer.link.broken is None:
            if peer.link.up or peer.link.asleep:
                peer.control(message)
                return
            # Who leaves does not wait for a newcomer's dial: one that knows of the leave, or leaves, does not dial.
            is_new = incarnation != self._arriving and self.connector.bond_of(peer) is None
            may_dial = self.watch.is_leaving and is_new
            if not may_dial and not self.connector.is_dialling(incarnation):
                return  # it will dial us, or is dialled again: drop the message
        stranger = self._strangers.get(incarnation)
        if stranger is not None and stranger.link.up:
            stranger.control(message)
            return
        member = self.watch.member_of(incarnation)
        if member is not None:
            self.connector.dial(member, message)

    def on_joined(self, member: Member, *, was_there: bool = False) -> None:
        """A member has joined, or ``was_there`` when this node did: make it addressable, and handle its held frames.

        Dials it if that is our part.
        """
        incarnation = member.incarnation
        peer = self._by_incarnation.get(incarnation)
        if peer is not None or incarnation == self._me.incarnation:
            return
        peer = self._strangers.get(incarnation)
        if peer is None or peer.link.broken is not None:
            peer = self._make(WorkerInfo(member.name, member.rank), incarnation)
        if self._is_static and not member.admission:
            peer.number = member.rank
        if not peer.linked and self.watch.is_near_all:
            # Before any thread can address the peer: a link made at its first use sleeps, and wakes up by dialling, so
            # both sides would dial.
            self._make_link(peer, Absent())
            self._awaited[peer] = monotonic() + AWAITED_S
            self._timer.at(self._awaited[peer])
        self._enter(peer)
        self.watcher.on_entered(peer)
        self.watcher.on_change("joined", member, "")
        is_connected = incarnation == self._arriving or (peer.linked and peer.link.up)
        if self.watch.is_neighbour(incarnation) and not is_connected:
            me = self.watch.me
            # The later one dials. But one that was there may have a later number, offered before it joined, and not
            # know of us yet: then it would not dial before it hears of us, perhaps only when tables are compared.
            is_later = (me.admission, me.rank, me.incarnation) > (member.admission, member.rank, incarnation)
            if is_later or was_there:
                self.connector.dial(member)
        self._admit(peer)

    def on_admitted(self) -> None:
        """This node is a member now: admit the strangers that have introduced themselves as members meanwhile."""
        for incarnation, member in self._records.copy().items():
            if incarnation in self._strangers and member.admission:
                self.watch.on_message(incarnation, Introduction(member))

    def on_unresponsive(self, member: Member, unresponsive: bool) -> None:
        """A member has stopped answering, or answers again."""
        if unresponsive:
            self.on_silent(member.incarnation)
        self.watcher.on_change("unresponsive" if unresponsive else "recovered", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if unresponsive and peer is not None and self.watch.is_neighbour(peer.incarnation):
            self.connector.wake(peer)  # the member was to dial us; dial it, to find out whether it lives
        if not unresponsive and self._options.membership.reconnect_s and (peer is None or peer.broken):
            # This node gave the member up just before it could be reached again. Have the group declare it dead: a
            # member that is dead to some and alive to others would lose references between those, too.
            self.watch.feed(LinkGivenUp(member.incarnation, f"{self._me.info.name} could not reach it for too long"))

    def on_silent(self, incarnation: int) -> None:
        """A member does not answer us. Its connection or its host may have failed: watch the connection for a while."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None and peer.linked and peer.link.up and peer not in self._silent:
            now = monotonic()
            self._silent[peer] = now + self._patience_s
            self._timer.at(now)

    @property
    def _patience_s(self) -> float:
        """How long a host may leave everything unanswered before it counts as gone."""
        return self._options.membership.reconnect_s or self._options.membership.suspicion_s

    def host_answers(self, incarnation: int) -> bool:
        """Does the host of an unresponsive member answer, as far as we tried? No, if we have given the member up."""
        peer = self._by_incarnation.get(incarnation)
        if peer is None or peer.broken:
            return False
        return self.connector.host_silent_s(incarnation) < self._patience_s

    def on_left(self, member: Member, why: str) -> None:
        """A member has left; ``why`` is set if it was made to leave. It may still have answers to send."""
        self.watcher.on_change("left", member, "")
        peer = self._by_incarnation.get(member.incarnation)
        if peer is None or peer.broken:
            return
        if why and not peer.leaving:  # otherwise its own Goodbye has set the farewell
            peer.farewell = why
        peer.leaving = True
        if not (peer.linked and peer.link.up):
            self._give_up(peer, "it has left")
            return
        self._ends[peer] = monotonic() + LEFT_S
        self._timer.at(self._ends[peer])

    def on_died(self, member: Member, why: str) -> None:
        """The group has declared a member dead."""
        self.watcher.on_change("dead", member, why)
        self.connector.abandon(member.incarnation)
        peer = self._by_incarnation.get(member.incarnation)
        if peer is not None:
            self._give_up(peer, why)

    def on_expelled(self, why: str) -> None:
        """The other members have declared this node dead."""
        self._host.on_expelled(why)

    # ------------------------------------------------------------------ for the connector

    def hello(self) -> Hello:
        """How this node introduces itself; with its admission number, once it has one."""
        return Hello(self.watch.me, self._membership.cluster_id)

    def ways_to(self, incarnation: int) -> list[str]:
        """The addresses of a member that may be reachable from here."""
        member = self.member_of(incarnation)
        return (
            []
            if member is None
            else usable_ways(member, self._options.allowed_transports, self._membership.me.host_token)
        )

    def member_of(self, incarnation: int) -> Member | None:
        """The record of an incarnation, past or present; None if unknown."""
        return self.watch.member_of(incarnation)

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """The transport that a link uses in the place of ``transport``: tests interpose theirs (`interference.py`)."""
        return self._host.wrap(transport, info)

    def is_wanted(self, incarnation: int) -> bool:
        """Is a member that refused our connection to be dialled again?"""
        peer = self._by_incarnation.get(incarnation)
        return peer is not None and not peer.broken

    def is_needed(self, incarnation: int) -> bool:
        """Is an unreachable member to be dialled again? Without a link, only news was to be sent, which may be lost."""
        peer = self._by_incarnation.get(incarnation)
        return peer is not None and not peer.broken and (peer.linked or self.watch.is_neighbour(incarnation))

    def look_later(self, incarnation: int) -> None:
        """We do not dial a member, because it dials us, or cannot dial it now: check in YIELDED_S what came of it."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None:
            self._yielded[peer] = monotonic() + YIELDED_S
            self._timer.at(self._yielded[peer])

    def on_dialled(self, transport: Transport, established: Established, news: Sequence[News]) -> None:
        """A member that was dialled for the first time has accepted the connection; send it ``news``."""
        peer = self._by_incarnation.get(established.peer.member.incarnation)
        if peer is not None and peer.link.up:
            transport.close()  # the member's own connection came first
        else:
            peer = self.connected(transport, established, True)
            peer.control(messages.Ping(0))  # answered once the peer knows us as a member: see `knows_us`
        for message in news:
            peer.control(message)

    # ------------------------------------------------------------------ time, and the end

    def _look_after_links(self, now: float) -> float:
        """Close links that are no longer needed, and watch silent connections; returns when to look again."""
        nearest = NEVER
        for peer, until in self._silent.copy().items():
            silent_s = peer.link.transport.silent_s() if peer.link.up else 0.0
            if silent_s >= SILENT_PART * self._patience_s:
                self.connector.mend_silence(peer, silent_s)
            if now >= until and not silent_s and peer.incarnation not in self.watch.unresponsive():
                del self._silent[peer]
            else:
                nearest = min(nearest, now + self._options.membership.probe_interval_s)
        for waiting in (self._yielded, self._awaited):
            for peer, until in waiting.copy().items():
                if until > now:
                    nearest = min(nearest, until)
                    continue
                del waiting[peer]
                self.connector.look_after(peer)
        for peer, end in self._ends.copy().items():
            if end <= now and not peer.known and not self.watch.belongs:
                # We do not know yet that we were admitted. This stranger may be a member that knows us: keep its link,
                # or it could not reach us.
                self._ends[peer] = now + STRANGER_S
                nearest = min(nearest, self._ends[peer])
            elif end <= now:
                self._ends.pop(peer, None)
                self.connector.give_up(peer, "it has left" if peer.known else "it is no member here")
            else:
                nearest = min(nearest, end)
        return nearest
