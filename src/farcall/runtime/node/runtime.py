"""The runtime of one member of a cluster: the composition root, which names each part once and wires it to the others.

`start.py` brings a runtime up, `ending.py` takes it down. Peers, calls and server are plain attributes; the list of
parts is in this folder's ``__init__.py``. Has no protocol of its own. Several runtimes may live in one process. Knows
none of the layers above: they keep their state with it (`Runtime.part`) and have it call them (`hooks.py`).

Any thread may ask the questions below.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall.channel.shared_memory import SegmentPool
from farcall.errors import RpcError, UnknownWorker
from farcall.ids import MemberInfo, WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol.departure.events import DepartureMessage
from farcall.protocol.messages import DEVICE_MESSAGES, Part, Parted, Stay
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import Executor, FunctionTask
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import watch_collections
from farcall.runtime.io.timers import Callback, Timer
from farcall.runtime.link.connector import Connector
from farcall.runtime.membership.events import MemberChanges, MemberEvents
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.membership.shutdown import Leaving, Withdrawing, Work
from farcall.runtime.node import current
from farcall.runtime.node.cluster_links import ClusterLinks
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.runtime.node.ending import ComeBack, Ending
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.node.resources import Resources
from farcall.runtime.node.torch_threads import TORCH_THREADS
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.observing.observer_connection import ObserverConnections, Questions
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.peers.shared_memory import retire_from
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous
from farcall.runtime.rendezvous.meeting_place import MeetingPlace
from farcall.secret import Secret

if TYPE_CHECKING:
    from farcall.runtime.devices.node import NodeDevices

logger: logging.Logger = logging.getLogger("farcall")

P = TypeVar("P")
MakeCalls = Callable[..., CallTable]

TRIM_EVERY_S = 10.0

current.while_there_are_nodes(watch_collections)


def _end_children() -> None:
    children = sys.modules.get("farcall.children")  # the first code by value loads it
    if children is not None:
        children.end()


current.while_there_are_nodes(lambda: _end_children)


class Runtime:
    """One member of a cluster, from the moment it knows the others, or a member to ask, until it has left."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        options: RpcBackendOptions,
        *,
        resources: Resources,
        membership: Membership,
        place: MeetingPlace,
        entry: DynamicRendezvous | None,
        make_calls: MakeCalls,
        come_back: ComeBack | None,
    ) -> None:
        """Wire the parts; the I/O thread does not run yet. ``entry``: the way into an existing group."""
        self.options: RpcBackendOptions = options
        self.timeout_s: float = options.rpc_timeout or 0.0
        """The timeout of calls that name none; 0: no limit."""
        self.info: WorkerInfo = WorkerInfo(lifecycle.name, membership.me.rank)
        self.started_at: float = monotonic()
        self.membership: Membership = membership
        self.is_static: bool = membership.size > 0
        """Has the group a fixed size?"""
        self.successor: Runtime | None = None
        """The same node as another member, after this one was expelled."""
        self.ending: Ending = Ending(self, place, come_back)
        self.hooks: Hooks = Hooks()
        self.event_log: EventLog = EventLog()
        self.resources: Resources = resources
        self.loop: Loop = resources.loop
        self.pool: SegmentPool | None = resources.pool
        self.lifecycle: Lifecycle = lifecycle
        self.entry: DynamicRendezvous | None = entry
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self.devices: NodeDevices | None = None
        """Made where the options, or a peer, name devices; otherwise no device is ever looked at."""
        self.device_list: list[torch.device] = []
        """``devices.devices``, or empty."""

        self.executor: Executor = Executor(
            lifecycle.name,
            options.num_worker_threads,
            resources.core,
            on_thread_start=self.own_thread,
        )
        self.admission: Admission = Admission(options.limits.max_queued_calls)
        resources.core.limit_queue(options.limits.max_queued_calls)
        self.calls: CallTable = make_calls(
            resources.core,
            self.loop.timer,
            self.executor,
            options.limits.when_overloaded,
            on_given_up=self.something_ended,
            default_timeout_s=self.timeout_s if options.inherit else None,
            log=self.event_log,
        )
        self.server: Server = Server(
            self.info,
            self.executor,
            self.own_thread,
            log=self.event_log,
            nested=self.calls if options.inherit else None,
        )
        self.hooks.peer_gone.append(self.server.cancel_all)
        self.hooks.ended.append(self.server.cancel_all)
        self.member_events: MemberEvents = MemberEvents(self.executor)
        self.leaving: Leaving | Withdrawing = self._way_out()
        self.member_changes: MemberChanges = MemberChanges(
            lifecycle.name,
            is_over=lifecycle.is_over,
            loop=self.loop,
            admission=self.admission,
            calls=self.calls,
            leaving=self.leaving,
            events=self.member_events,
            event_log=self.event_log,
            entry=entry,
            joined_hooks=self.hooks.peer_joined,
            gone_hooks=self.hooks.peer_gone,
        )
        self.dispatcher: Dispatcher = Dispatcher(
            lifecycle.name,
            self.hooks,
            loop=self.loop,
            admission=self.admission,
            calls=self.calls,
            server=self.server,
            leaving=self.leaving,
            watch=lambda: self.links.watch,
            core=resources.core,
        )
        self.calls.receive = self.dispatcher.receive
        self.links: ClusterLinks = ClusterLinks(
            self,
            membership,
            options,
            resources=resources,
            is_static=self.is_static,
            is_founder=self.is_static and entry is None,
            dispatcher=self.dispatcher,
            changes=self.member_changes,
        )
        self.dispatcher.peers = self.links.peers.by_link
        self.executor.on_arrived = self.dispatcher.on_arrived
        self.connector: Connector = self.links.connector
        self._peers = self.links.peers.named  # kept here, since every call looks its peer up

        self.observers: ObserverConnections = ObserverConnections(lifecycle.name, self.loop)
        resources.listener.on_observer = self.observers.admit
        for kind in DEVICE_MESSAGES:
            self.hooks.on_control(kind, lambda peer, message: self.use_devices().handle(peer, message))
        self.hooks.on_control(Part, lambda peer, message: self.links.peers.partings.on_part(peer, message))
        self.hooks.on_control(Parted, lambda peer, message: self.links.peers.partings.on_parted(peer, message))
        self.hooks.on_control(Stay, lambda peer, message: self.links.peers.partings.on_stay(peer))
        if options.names_devices:
            self.hooks.peer_joined.append(lambda peer: self.use_devices().meet(peer))
        self.loop.timer(self._trim).at(self.started_at + TRIM_EVERY_S)
        self.loop.watch(resources.core.fileno(), lambda _: self.dispatcher.on_news())
        current.has_started(self)

    def _way_out(self) -> Leaving | Withdrawing:
        work = Work(self.calls, self.server, self.executor, self.hooks.unsettled)
        if not self.is_static:
            return Withdrawing(self.info.name, self.loop, work.state, work.oldest, work.under_way)
        return Leaving(
            self.info.id,
            {member.rank: member.name for member in self.membership.members},
            self.loop,
            work.state,
            work.oldest,
            send=self._tell,
            neighbours=lambda: self.links.peers.neighbours(),
            fell_silent=lambda incarnation: self.watch.fell_silent(incarnation),
            return_s=self.options.membership.return_s,
        )

    def _tell(self, rank: int, message: DepartureMessage) -> None:
        peer = self.links.peers.remotes.get(rank)
        if peer is not None:
            peer.control(message)

    def __repr__(self) -> str:
        who = f"rank {self.info.id} of {len(self.workers())}, " if self.running else ""
        return f"<Node {self.info.name!r}: {who}{self.state}>"

    def use_devices(self) -> NodeDevices:
        """The devices of this node, made at first use; on any thread."""
        with self._parts_lock:
            if self.devices is None:
                from farcall.runtime.devices.node import NodeDevices  # most programs have none

                devices = NodeDevices(self.info.name, self.options, self.links)
                self.device_list = devices.devices
                self.server.stream_pool = devices.stream_pool
                self.server.devices = devices.devices
                self.hooks.agreed.append(lambda deadline: self.links.forget_device_segments())
                self.devices = devices
            return self.devices

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write a message that the I/O thread may not, because writing can mean waiting."""

        def write_or_log() -> None:
            try:
                write()
            except RpcError as error:
                logger.info("a message was not sent: %s", error)

        self.executor.submit(FunctionTask(write_or_log))  # dropped if the node ends first: nobody waits for it

    def on_expelled(self, why: str) -> None:
        """On the I/O thread: the others have declared this node dead."""
        self.ending.on_expelled(why)

    def _trim(self, now: float) -> float:
        """On the I/O thread: free memory that was not used for long."""
        self.resources.core.trim()
        if self.devices is not None:
            self.devices.trim(now)
        if self.pool is not None:
            for segment_id, holders in self.pool.trim(now):
                retire_from(holders, segment_id)
        return now + TRIM_EVERY_S

    def own_thread(self) -> None:
        """The calling thread runs functions for this node."""
        current.work_for(self)
        TORCH_THREADS.take_over()

    def renew_threads(self) -> None:
        """Each thread that runs functions calls `own_thread` again, before the next one."""
        self.executor.renew()
        self.server.coroutines.renew()

    # ------------------------------------------------------------------ questions

    @property
    def state(self) -> str:
        """For people: a state of `lifecycle.py`, or "serving" for a worker that waits in shutdown() for others."""
        state = self.lifecycle.state
        return "serving" if state == "leaving" and isinstance(self.leaving, Leaving) else state

    @property
    def running(self) -> bool:
        """May calls be made?"""
        return self.lifecycle.is_running

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        return self.lifecycle.why_ended

    @property
    def watch(self) -> FailureDetector:
        """The failure detector, which has the table of members."""
        return self.links.watch

    @property
    def peers_lost(self) -> int:
        """The number of members whose link died without a goodbye."""
        return self.member_changes.peers_lost

    @property
    def observers_secret(self) -> Secret:
        """The secret of which observers prove a key."""
        return self.resources.observers or self.membership.secret

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of this member."""
        return self.membership.me.addresses

    @property
    def me(self) -> Peer:
        """This node, as a peer of itself."""
        return self.links.myself

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """The member called ``to``, by name, rank or WorkerInfo."""
        try:
            peer = self._peers.get(to.name if isinstance(to, WorkerInfo) else to)
        except TypeError:
            peer = None  # unhashable: the error below says what is wanted
        if peer is not None and self.lifecycle.is_running:
            return peer
        if self.why_ended is not None:
            raise self.why_ended
        if not isinstance(to, str | int | WorkerInfo):
            raise TypeError(f"the destination must be a name, a rank or a WorkerInfo, not {type(to).__name__}")
        known = ", ".join(info.name for info in self.workers()[:16])
        raise UnknownWorker(f"unknown destination worker {to!r}: the members are {known}")

    def is_peer(self, peer: Peer) -> bool:
        """Is ``peer`` a peer of this node? Several nodes may live in one process."""
        return self._peers.get(peer.info.id) is peer

    def is_gone(self, name: str, incarnation: int) -> bool:
        """Has that incarnation of a member come and gone? An unknown one may still come."""
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation == incarnation:
            return peer.broken
        return self.links.peers.is_over(incarnation)

    def numbered(self, member: int) -> Peer | None:
        """The member of this number (``Peer.number``), in whatever state the node and the link to it are.

        None: the member is gone; or, while the node starts, not connected yet.
        """
        return self.links.peers.numbered.get(member)

    def other(self, member: int) -> RemotePeer | None:
        """The member of this number, unless it is this node itself."""
        peer = self.links.peers.numbered.get(member)
        return peer if isinstance(peer, RemotePeer) else None

    def members(self) -> list[int]:
        """The numbers of all members, this node's own included."""
        return list(self.links.peers.numbered)

    def others(self) -> list[RemotePeer]:
        """All other members, in whatever state the links to them are."""
        return list(self.links.peers.remotes.values())

    def workers(self) -> list[WorkerInfo]:
        """All members, by rank; where members come and go, the present ones."""
        return self.links.peers.workers()

    def members_now(self) -> list[MemberInfo]:
        """All members, with the time for which each has been unresponsive, if it is."""
        return self.links.peers.members()

    def shared_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, in shared memory where that may be used."""
        return torch.empty(shape, dtype=dtype) if self.pool is None else self.pool.empty(shape, dtype)

    # ------------------------------------------------------------------ the layers above

    def part(self, kind: Callable[[Runtime], P]) -> P:
        """This node's one ``kind(runtime)``, made at first use: the layers above keep their state so."""
        part = self._parts.get(kind)
        if part is None:
            with self._parts_lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return part

    def part_if_made(self, kind: Callable[[Runtime], P]) -> P | None:
        """This node's ``kind``; None: it was never used."""
        return self._parts.get(kind)

    def use_questions(self, questions: Questions) -> None:
        """Answer observers, and explain timeouts, by ``questions``; set once, while the node starts."""
        self.observers.questions = questions
        self.calls.questions = questions

    def something_ended(self) -> None:
        """Have a graceful shutdown look again: it may have waited for this alone. From any thread."""
        if self.leaving.entered:
            self.leaving.poke()

    def timer(self, callback: Callback) -> Timer:
        """A timer of the I/O thread: ``callback(now)`` must not run user code."""
        return self.loop.timer(callback)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the I/O thread as soon as possible."""
        self.loop.call_soon(function)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self.loop.on_thread()

    # ------------------------------------------------------------------ the end

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        self.ending.shutdown(graceful, timeout_s)

    def newest(self) -> Runtime:
        """The runtime of this node's present membership."""
        runtime = self
        while runtime.successor is not None:
            runtime = runtime.successor
        return runtime
