"""The runtime of one member of a cluster: the composition root, which wires the parts, starts and stops them.

`start_runtime` brings a runtime up; it is complete from then on: peers, calls and server are plain attributes. Holds no
protocol of its own; what it consists of is listed in this folder's ``__init__.py``. Several runtimes may live in one
process. Knows none of the layers above: these keep their state with it (`Runtime.part`) and are called by it
(`hooks.py`).

One long file on purpose: it names each part once, in the order in which parts are made and ended.

Questions may be asked from any thread. `start_runtime` and `shutdown` belong to threads of the program,
``_on_expelled`` to the I/O thread, ``_end`` to the thread that moved the node out of its last state (`lifecycle.py`).
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, TypeVar

import torch

from farcall.channel.segments import host_token
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Cancelled, Expelled, NotInitialized, RpcError, ShutdownTimeout, UnknownWorker
from farcall.ids import MemberInfo, WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol.departure import DepartureMessage
from farcall.protocol.member import Member, Trust, new_incarnation
from farcall.protocol.messages import FORGOT_SHUTDOWN, GAVE_UP, LEFT
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import UNKNOWN_S, Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.devices.node import DEVICE_BUSY_WAIT_S, DEVICE_MESSAGES, NodeDevices
from farcall.runtime.io import sigint
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import stop_reading
from farcall.runtime.io.timers import Callback, Timer
from farcall.runtime.link.connector import Connector
from farcall.runtime.membership.events import MemberChanges, MemberEvents
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.membership.shutdown import Leaving, Withdrawing, Work
from farcall.runtime.node import current
from farcall.runtime.node.cluster_links import ClusterLinks
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.node.resources import Resources
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.observing.observer_connection import ObserverConnections, Questions
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.peers.shared_memory import retire_from
from farcall.runtime.rendezvous.addresses import choose_host
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous, Meeting, meet
from farcall.runtime.rendezvous.static import join
from farcall.runtime.rendezvous.store import MeetingPlace, find_meeting_place
from farcall.serialize.allowance import INSTALLED

__all__ = ["Runtime", "start_runtime"]

logger: logging.Logger = logging.getLogger("farcall")

P = TypeVar("P")
MakeCalls = Callable[..., CallTable]

STOP_S = 5.0
LEAVE_S = 10.0
TRIM_EVERY_S = 10.0
LINGER_S = 1.0
"""How long the others may take to read the last messages to them, after a graceful shutdown."""


def start_runtime(
    lifecycle: Lifecycle,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    *,
    parts: Iterable[Callable[[Runtime], object]] = (),
    make_calls: MakeCalls = CallTable,
    way_back: Meeting | None = None,
    over: str = "",
) -> Runtime:
    """Meet the other members and connect to each; raises within the options' start timeout.

    ``lifecycle`` has just been moved to "starting". ``parts`` are made before anything can arrive. ``way_back``: into
    the group that this node was expelled from. ``over``: the cluster of a group of fixed size that let nobody in.
    """
    name = lifecycle.name
    deadline = monotonic() + options.start_deadline_s
    place = find_meeting_place(rank, world_size, options.init_method) if way_back is None else way_back.place
    host = choose_host(options.advertise, place.host).host
    resources: Resources | None = None
    entry: DynamicRendezvous | None = None
    runtime: Runtime | None = None
    sigint.seal()
    try:
        try:
            resources = Resources(name, options, host)
        finally:
            sigint.unseal()  # A held Ctrl-C is raised here, where the handler below knows what there is to close.
        incarnation = new_incarnation(secrets.randbits(62))
        trust: Trust = "code" if INSTALLED.allowance is None else INSTALLED.allowance.trust
        me = Member(name, place.rank, incarnation, tuple(resources.addresses), host_token(), trust=trust)
        found: Membership | Meeting
        if way_back is not None:
            found = way_back
        elif place.is_dynamic or place.contacts:
            found = meet(place, me, options, deadline)
        else:
            found = join(place, me, options, over)
        if isinstance(found, Meeting):
            entry = DynamicRendezvous(found, me, options, deadline)
            found = entry.membership
        runtime = Runtime(lifecycle, options, resources, found, place=place, entry=entry, make_calls=make_calls)
        for kind in parts:
            runtime.part(kind)
        runtime._connect(deadline)
    except BaseException as error:
        if runtime is not None:
            runtime._end(Cancelled(f"the start of {name} failed: {error}"))
        elif resources is not None:
            if entry is not None:
                entry.close()
            resources.close()
        raise
    runtime._serve()
    return runtime


class Runtime:
    """One member of a cluster, from the moment it knows the others, or whom to ask, until it has left."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        options: RpcBackendOptions,
        resources: Resources,
        membership: Membership,
        *,
        place: MeetingPlace,
        entry: DynamicRendezvous | None,
        make_calls: MakeCalls,
    ) -> None:
        """Wire everything; the I/O thread does not run yet. ``entry``: the way into a group that is there."""
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
        self._place = place
        self._stays_out = threading.Event()  # shutdown was called: an expelled node does not come back
        self.hooks: Hooks = Hooks()
        self.event_log: EventLog = EventLog()
        self.resources: Resources = resources
        self.loop: Loop = resources.loop
        self.pool: SegmentPool | None = resources.pool
        self._lifecycle = lifecycle
        self._entry = entry
        self._exiting = False
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self.devices: NodeDevices | None = None
        """Made where the options, or a peer, say something about devices; else no device is ever looked at."""
        self.device_list: list[torch.device] = []
        """``devices.devices``; empty where there is none."""

        self.executor: Executor = Executor(
            lifecycle.name,
            options.num_worker_threads,
            self.loop.timer,
            self.loop.on_thread,
            before_idle=self._before_idle,
            on_thread_start=self._own_thread,
        )
        self.admission: Admission = Admission(
            options.limits.max_queued_calls, lambda: self.executor.waiting, self.loop.timer
        )
        self.calls: CallTable = make_calls(
            self.loop.timer,
            self.executor,
            options.limits.when_overloaded,
            on_given_up=self.something_ended,
            default_timeout_s=self.timeout_s if options.inherit else None,
        )
        self.server: Server = Server(
            self.info, self.executor, self._own_thread, nested=self.calls if options.inherit else None
        )
        self.hooks.peer_gone.append(self.server.cancel_all)
        self.hooks.ended.append(self.server.cancel_all)
        self.server.event_log = self.calls.event_log = self.event_log
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
            self.loop,
            self.admission,
            self.calls,
            self.server,
            self.leaving,
            lambda: self.links.watch,
            lambda peer, frame: self.links.peers.hold(peer, frame),
            self.hooks.controls,
            self.hooks.in_order,
            self.hooks.letters,
        )
        self.links: ClusterLinks = ClusterLinks(
            membership,
            options,
            resources,
            is_static=self.is_static,
            is_founder=self.is_static and entry is None,
            dispatcher=self.dispatcher,
            changes=self.member_changes,
            write_later=self.write_later,
            on_expelled=self._on_expelled,
        )
        self.connector: Connector = self.links.connector
        self._peers = self.links.peers.named  # every call asks for its peer

        self._observers = ObserverConnections(lifecycle.name, self.loop)
        resources.listener.on_observer = self._observers.admit
        for kind in DEVICE_MESSAGES:
            self.hooks.on_control(kind, lambda peer, message: self.use_devices().handle(peer, message), in_order=True)
        if options.names_devices:
            self.hooks.peer_joined.append(lambda peer: self.use_devices().meet(peer))
        self.loop.timer(self._trim).at(self.started_at + TRIM_EVERY_S)
        self.loop.on_thread_start = self._own_thread  # it runs quick functions, too
        self.loop.on_death = self._on_io_thread_lost
        # Answers are held back only while tasks wait, and then the executor's timer wakes the loop.
        self.loop.before_sleep(self.server.flush)
        self.loop.before_sleep(self.executor.before_sleep)
        current.STARTED.add(self)

    def _way_out(self) -> Leaving | Withdrawing:
        work = Work(self.calls, self.server, self.executor, self.hooks.unsettled)
        if not self.is_static:
            return Withdrawing(self.info.name, self.loop, work.state, work.under_way)
        return Leaving(
            self.info.id,
            {member.rank: member.name for member in self.membership.members},
            self.loop,
            work.state,
            self._tell,
        )

    def _tell(self, rank: int, message: DepartureMessage) -> None:
        peer = self.links.peers.remotes.get(rank)
        if peer is not None:
            peer.control(message)

    def __repr__(self) -> str:
        who = f"rank {self.info.id} of {len(self.workers())}, " if self.running else ""
        return f"<Node {self.info.name!r}: {who}{self.state}>"

    # ------------------------------------------------------------------ the start

    def _connect(self, deadline: float) -> None:
        """Be connected to the other members, or let in by them."""
        if self.options.names_devices:
            self.use_devices().meet(self.me)
        self.loop.start()
        if self._entry is None:
            self.links.connect_all(deadline)
            if self.devices is not None and self.options.names_devices:
                for peer in self.others():
                    self.devices.meet(peer)
        else:
            self.links.join(self._entry)

    def _serve(self) -> None:
        """Make and serve calls from now on; the calls that came before have waited."""
        self._lifecycle.move("connected")
        self.executor.start()
        self.watch.begin()
        verdict = self._lifecycle.verdict
        if verdict is not None:  # expelled while it started; from now on perhaps by the I/O thread, which ends it then
            if self._lifecycle.move("leave"):
                self._end(verdict)
            raise verdict
        places = " and ".join(self.addresses)
        logger.info("%s is up: rank %d of %d, at %s", self.info.name, self.info.id, len(self.workers()), places)

    def use_devices(self) -> NodeDevices:
        """This node's devices, from now on; on any thread."""
        with self._parts_lock:
            if self.devices is None:
                devices = NodeDevices(self.info.name, self.options, self.links.on_release, self.write_later)
                self.loop.look_for(DEVICE_BUSY_WAIT_S)
                self.device_list = devices.devices
                self.server.stream_pool = devices.stream_pool
                self.server.devices = devices.devices
                self.hooks.agreed.append(self.links.forget_device_segments)
                self.devices = devices
            return self.devices

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write a message that the I/O thread may not, because writing can mean waiting."""
        self.executor.submit(_Write(write))

    def _trim(self, now: float) -> float:
        """On the I/O thread: give back memory that was not used for long."""
        self.resources.memory.trim(now)
        if self.devices is not None:
            self.devices.trim(now)
        if self.pool is not None:
            for segment_id, holders in self.pool.trim(now):
                retire_from(holders, segment_id)
        return now + TRIM_EVERY_S

    def _before_idle(self) -> None:
        """On a worker that has nothing to do now, or something that may take long."""
        self.server.flush()
        if self.leaving.entered:
            self.leaving.poke()

    def _own_thread(self) -> None:
        current.work_for(self)

    # ------------------------------------------------------------------ questions

    @property
    def state(self) -> str:
        """One of the states in `lifecycle.py`, for people: a worker that waits in shutdown() for others serves them."""
        state = self._lifecycle.state
        return "serving" if state == "leaving" and isinstance(self.leaving, Leaving) else state

    @property
    def running(self) -> bool:
        """May calls be made?"""
        return self._lifecycle.is_running

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        return self._lifecycle.why_ended

    @property
    def watch(self) -> FailureDetector:
        """The detector of failed members; it knows who is a member."""
        return self.links.watch

    @property
    def peers_lost(self) -> int:
        """The number of members whose link has died although they did not say that they leave."""
        return self.member_changes.peers_lost

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this member can be reached."""
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
        if peer is not None and self._lifecycle.is_running:
            return peer
        if self.why_ended is not None:
            raise self.why_ended
        if not isinstance(to, str | int | WorkerInfo):
            raise TypeError(f"the destination must be a name, a rank or a WorkerInfo, not {type(to).__name__}")
        known = ", ".join(info.name for info in self.workers()[:16])
        raise UnknownWorker(f"unknown destination worker {to!r}: the members are {known}")

    def is_peer(self, peer: Peer) -> bool:
        """Is ``peer`` how this very node sees a member? Several nodes may live in one process."""
        return self._peers.get(peer.info.id) is peer

    def is_gone(self, name: str, incarnation: int) -> bool:
        """Was there that incarnation of a member, and is it there no more? An unknown one may come yet."""
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation == incarnation:
            return peer.broken
        return self.links.peers.is_over(incarnation)

    def numbered(self, member: int) -> Peer | None:
        """The member of this number (``Peer.number``), in whatever state the node and the link to it are.

        None: it is gone; or, while the node starts, not connected yet.
        """
        return self.links.peers.numbered.get(member)

    def other(self, member: int) -> RemotePeer | None:
        """The member of this number, if it is another than this node itself."""
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
        """The same, and who of them is unresponsive."""
        return self.links.peers.members()

    def shared_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, in shared memory where that may be used."""
        return torch.empty(shape, dtype=dtype) if self.pool is None else self.pool.empty(shape, dtype)

    # ------------------------------------------------------------------ the layers above

    def part(self, kind: Callable[[Runtime], P]) -> P:
        """This node's one ``kind(runtime)``, made at first use: how layers above keep state with a node."""
        part = self._parts.get(kind)
        if part is None:
            with self._parts_lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return part

    def part_if_made(self, kind: Callable[[Runtime], P]) -> P | None:
        """This node's ``kind``, or None if it was never used."""
        return self._parts.get(kind)

    def use_questions(self, questions: Questions) -> None:
        """Answer observers, and explain timeouts, by ``questions``: given once, while the node starts."""
        self._observers.questions = questions
        self.calls.questions = questions

    def something_ended(self) -> None:
        """Have a graceful shutdown look again: perhaps it waited for nothing else. From any thread."""
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
        if not self._lifecycle.move("leave"):
            self._stays_out.set()
            self._lifecycle.wait_ended(2 * STOP_S)  # if it was expelled
            if self.successor is not None:
                self.successor.shutdown(graceful, timeout_s)
            return
        stop_reading()
        agreed = False
        late: tuple[str, ...] = ()
        try:
            if graceful:
                self.server.on_answered = self.leaving.poke
                if self._entry is not None:
                    self._entry.withdraw()
                self.membership.close()  # before all agree: afterwards a new store may be opened at its port
                late = self.leaving.enter(timeout_s)
                agreed = not late and self._lifecycle.verdict is None
                if agreed:
                    self.watch.agreed_to_leave = True
                    for hook in self.hooks.agreed:
                        hook()
                    if isinstance(self.leaving, Withdrawing):
                        self.watch.leave(LEAVE_S)
                        self.leaving.enter(LEAVE_S, LEAVE_S)  # members that did not know yet may have asked for more
        finally:
            self._end(Cancelled(f"{self.info.name} shut down before the answer came"), linger=agreed)
        if self._lifecycle.verdict is not None:
            raise self._lifecycle.verdict
        if late:
            raise ShutdownTimeout(
                f"{self.info.name} left after waiting {timeout_s:g} s for: {'; '.join(late)}", self.leaving.late_names
            )

    def leave_at_exit(self) -> None:
        """The process ends without shutdown: close what is open, wait for nobody, let no function run on."""
        self._exiting = True
        if self.others() and not hasattr(sys, "last_value"):  # after an error nobody expects a shutdown
            logger.warning(
                "%s ended without shutdown(): call it last, so that workers wait for each other", self.info.name
            )
        self.shutdown(graceful=False)

    def _on_expelled(self, why: str) -> None:
        """On the I/O thread: the others hold this node for dead, and that is final."""
        if self._lifecycle.is_over():
            return
        what = "joins again by itself, as a new member" if self._comes_back else "can do no more; call shutdown()"
        self._give_up(Expelled(f"{self.info.name} was declared dead by the other members ({why}): it {what}"))

    def _on_io_thread_lost(self, error: BaseException) -> None:
        """On the I/O thread, which ends: a node without one would look alive, and answer nobody."""
        if not self._lifecycle.is_over():
            self._give_up(
                NotInitialized(
                    f"{self.info.name} ended, since its I/O thread failed ({type(error).__name__}: {error}): has a "
                    "function closed descriptors that are not its own? Call shutdown(), then init_rpc to join again"
                )
            )

    @property
    def _comes_back(self) -> bool:
        return bool(self.hooks.expelled) and self.options.membership.rejoin and self.state == "running"

    def _give_up(self, verdict: RpcError) -> None:
        """This node can do no more: every call fails with ``verdict``."""
        way_back = self._way_back() if isinstance(verdict, Expelled) and self._comes_back else None
        logger.error("%s", verdict)
        self._lifecycle.verdict = verdict
        self.links.myself.ended = verdict
        self.calls.end(verdict)

        def end(verdict: RpcError) -> None:
            self._end(verdict, comes_back=way_back is not None)
            if way_back is not None:
                for hook in self.hooks.expelled:
                    hook(way_back)

        if not self._lifecycle.expel(end):
            self.leaving.abort()  # the thread that starts or leaves ends the node

    def _way_back(self) -> Meeting:
        """How this node may join again: through those whom it knows. It keeps the store, and its part in the list."""
        membership = self.membership
        contacts = None if self._entry is None else self._entry.contacts
        return Meeting(
            self._place,
            contacts,
            membership.store,
            membership.cluster_id,
            membership.secret,
            tuple(self.links.peers.who_may_let_us_in()),
            membership.size,
            self._stays_out,
        )

    def newest(self) -> Runtime:
        """This node as the member that it is now."""
        runtime = self
        while runtime.successor is not None:
            runtime = runtime.successor
        return runtime

    def _end(self, why: RpcError, linger: bool = False, comes_back: bool = False) -> None:
        """Stop everything that runs; leave no thread, descriptor, file or segment behind.

        ``comes_back``: those who subscribed to events of members wait for this node's next membership.
        """
        name, links = self.info.name, self.links
        sigint.seal()  # Ctrl-C must not leave half of it behind; every wait in here has a bound
        try:
            wanted = self._lifecycle.state == "leaving" and self._lifecycle.verdict is None
            self._lifecycle.end()
            why = self._lifecycle.verdict or why
            if self._entry is not None:
                self._entry.close()
            links.watch.stop()
            if not comes_back:
                self.member_events.end()
            farewell = FORGOT_SHUTDOWN if self._exiting else LEFT if wanted else GAVE_UP
            links.say_goodbye(farewell, LINGER_S if linger else 0.0)
            self.calls.end(why)  # before the links: callers learn the true reason, not "the link is gone"
            links.cut(why)
            self.membership.close()
            # Now that no call can be made any more: one registered after this sweep sees that its peer is gone.
            self.calls.fail_all(lambda call: why)
            for hook in self.hooks.ended:
                hook()
            if self._exiting:
                self.executor.interrupt()
            stuck = self.executor.stop(STOP_S if linger else 1.0)
            if stuck:
                logger.warning("%s ends although functions still run on %d of its threads", name, len(stuck))
            self.server.coroutines.stop(STOP_S)
            self.loop.stop()
            self._observers.close()
            links.close()
            if self.devices is not None:
                self.devices.close()
        finally:
            self.resources.close()
            current.STARTED.discard(self)
            sigint.unseal()

    def close_after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent, without telling anybody."""
        self._lifecycle.fork()
        if self.membership.store is not None:
            # Its threads exist in the parent only, and its destructor would wait for them for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.membership.store))
            self.membership.close()


class _Write:
    """A message that the I/O thread may not write itself; a task of the executor."""

    expected_s = UNKNOWN_S

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def run(self, more: bool) -> None:
        try:
            self._write()
        except RpcError as error:
            logger.info("a message was not sent: %s", error)

    def drop(self) -> None:
        pass  # nobody waits for a message to a peer that this node has left
