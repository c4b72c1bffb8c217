"""One member of a cluster: the composition root that wires loop, links, calls, executor and protocol machines together.

It starts and stops things and routes messages to the part they belong to; it holds no protocol of its own. Several
nodes may live in one process.

    state      by                             to
    new        start()                        starting: meets the others, dials the earlier ones, awaits the later ones
    starting   all linked; or let in          running: serves calls (those that came before have waited)
    starting   an error                       ended
    running    shutdown(graceful)             leaving: agrees with all members, then ends; in a group without a fixed
                                              size: ends its own work, tells the others, then ends
    running    shutdown(graceful=False)       ended
    running    the others declare it dead     expelled, then ended: every call fails and says so
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from time import monotonic
from typing import ClassVar, get_args

import torch

from farcall.channel.recycled import ReceivePool
from farcall.channel.shared_memory import SegmentPool, SegmentRefused, host_token
from farcall.errors import (
    Cancelled,
    Delivery,
    Expelled,
    NetworkError,
    NotInitialized,
    PeerDead,
    RpcError,
    ShutdownTimeout,
    UnknownWorker,
)
from farcall.ids import WorkerInfo, check_worker_name
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.protocol.departure import DepartureMessage
from farcall.protocol.frames import CONTROL, FAILURE, LETTER, REQUEST, Arrived, Frame
from farcall.protocol.handshake import Established
from farcall.protocol.membership import LinkLost, LinkRefused, Record, Status
from farcall.protocol.membership.messages import Message
from farcall.protocol.notes import REFUSABLE, REFUSED, Notes, ProfileWanted, Refusal, decode_notes, encode_refusal
from farcall.protocol.observing import Ask
from farcall.runtime import shield
from farcall.runtime.acquaintances import Acquaintances
from farcall.runtime.addresses import advertised_address, choose_host, listening_addresses
from farcall.runtime.admission import Admission
from farcall.runtime.calls import CallTable, PendingCall
from farcall.runtime.changes import Changes, MemberEvent
from farcall.runtime.chronicle import INTERRUPTED, RECONNECTED, Chronicle
from farcall.runtime.devices import DEVICE_BUSY_WAIT_S, DEVICE_MESSAGES, NodeDevices
from farcall.runtime.doors import Door
from farcall.runtime.entry import Entry
from farcall.runtime.executor import Executor
from farcall.runtime.layered import Layered
from farcall.runtime.leaving import Leaving, Withdrawing
from farcall.runtime.loop import Loop
from farcall.runtime.members import MemberRecord, incarnation_of, life_of, new_incarnation
from farcall.runtime.mesh import Mesh, identity_of, usable_ways
from farcall.runtime.onlooker import Onlooker
from farcall.runtime.peers import Peer, RemotePeer, SelfPeer
from farcall.runtime.profiling import PROFILING
from farcall.runtime.reconnect import Reconnecting
from farcall.runtime.rendezvous import Membership, find_meeting_place, join
from farcall.runtime.role import abdicate
from farcall.runtime.serving import Server
from farcall.runtime.stores import MeetingPlace
from farcall.runtime.tallies import BOUNDS_S, FAILED, LOST
from farcall.runtime.watch import Watch, as_record, chosen
from farcall.serialize import Annotated, discard
from farcall.transport.interface import Transport

logger = logging.getLogger("farcall")

RECEIVE_POOL_BYTES = 1 << 30
TRIM_EVERY_S = 10.0
RELEASE_DELAY_S = 0.01
STOP_S = 5.0
HANDLED_ANYWHERE = (
    messages.BlocksReleased,
    messages.ClockAsked,
    messages.FramesReceived,
    messages.QueueFull,
    messages.QueueHasRoom,
    messages.SegmentAccepted,
    messages.SegmentOffered,
)
"""Control messages that a helping reader handles itself, because they only touch things that have their own lock."""


NEWS = get_args(Message)
"""Control messages about who is a member."""
FOR_STRANGERS = (*NEWS, *HANDLED_ANYWHERE, messages.Goodbye, messages.SegmentRefused, messages.SegmentRetired)
"""Control messages that are also taken from who is no member here, or not yet."""
LEAVE_S = 10.0


class _Write:
    """A message that the I/O thread may not write itself, because that can mean waiting; a task."""

    quick = False

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def run(self, more: bool) -> None:
        try:
            self._write()
        except RpcError as error:
            logger.info("a message was not sent: %s", error)

    def drop(self) -> None:
        pass  # nobody waits for a message to a peer that this node has left


_thread = threading.local()
_started: weakref.WeakSet[Node] = weakref.WeakSet()
"""Nodes that hold descriptors: a forked child must let go of its copies of those."""


class Current:
    """Where functions that are given no node find one; `farcall.api`, which keeps the current node, fills this in."""

    find: ClassVar[Callable[[], Node] | None] = None


def current_node() -> Node:
    """The node whose function the calling thread runs, or the one that `init_rpc` made."""
    if Current.find is not None:
        return Current.find()
    node = node_of_thread()
    if node is None:
        raise NotInitialized("RPC has not been initialized. Call farcall.init_rpc first.")
    return node


def node_of_thread() -> Node | None:
    """The node whose function the calling thread runs, if it runs one."""
    return getattr(_thread, "node", None)


class Node(Layered):
    """One member. Use it as a context manager, or call ``start`` and ``shutdown``."""

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
    ) -> None:
        super().__init__()
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise TypeError(f"the options must be a farcall.RpcBackendOptions, not a {type(options).__name__}")
        self.options = options or RpcBackendOptions()
        self.timeout_s = self.options.rpc_timeout
        self._max_queued = self.options.max_queued_calls
        self._name = check_worker_name(name)
        self._rank = rank
        self._world_size = world_size
        self._state = "new"
        self._state_lock = threading.Lock()
        """Of shutting down and being expelled, which happen on different threads, one ends the node."""
        self._exiting = False
        self._incarnation = new_incarnation()
        self._why_ended: RpcError | None = None
        self._entry: Entry | None = None
        self._ending: threading.Thread | None = None
        self._linked = shield.Gate()
        self.take_forks: Callable[[Peer, Arrived, Notes], Arrived | None] = lambda peer, message, notes: message
        """What a message with forks becomes before anybody reads it; None: nothing. Set by the layer above.

        A request with the flag REFUSED will not be run, and creates nothing.
        """
        self.find_recording: Callable[[Arrived, Notes], Arrived] = lambda message, notes: message
        """The same message, with its distributed autograd context. Set by the layer above."""
        self.chronicle = Chronicle()
        self.peers_lost = 0
        """Members whose link has died although they did not say that they leave."""
        self._onlookers: set[Onlooker] = set()
        self.on_question: Callable[[Onlooker, Ask], None] | None = None
        """Told, on the I/O thread, of each question of an observer. Set by the layer above."""
        self.devices: NodeDevices | None = None
        """Where the options, or a peer, say something about devices; else no device is ever looked at."""
        self.device_list: list[torch.device] = []
        """The same as ``devices.devices``; empty where there is none."""
        self._next_trim = monotonic() + TRIM_EVERY_S
        self._in_order.update(HANDLED_ANYWHERE)
        self._controls |= {
            messages.SegmentOffered: RemotePeer.on_segment_offered,
            messages.SegmentAccepted: RemotePeer.on_segment_accepted,
            messages.SegmentRefused: RemotePeer.on_segment_refused,
            messages.SegmentRetired: RemotePeer.on_segment_retired,
            messages.BlocksReleased: RemotePeer.on_blocks_released,
            messages.QueueFull: RemotePeer.on_queue_full,
            messages.QueueHasRoom: RemotePeer.on_queue_has_room,
            messages.CallCancelled: lambda peer, message: self.server.cancel(peer, message.call_id),
            messages.Goodbye: self._on_goodbye,
            messages.Ping: lambda peer, message: peer.control(messages.Pong(message.nonce)),
            messages.Pong: lambda peer, message: None,
            messages.FramesReceived: lambda peer, message: peer.link.session.on_acknowledged(message.count),
            messages.ClockAsked: lambda peer, message: peer.control(
                messages.ClockTold(message.sent_ns, PROFILING.clock_ns())
            ),
            messages.ClockTold: lambda peer, message: None,
            messages.DepartureReport: self._on_departure,
            messages.DepartureProbe: self._on_departure,
            messages.DepartureStatus: self._on_departure,
            messages.DepartureReleased: self._on_departure,
            messages.DepartureAcknowledged: self._on_departure,
        }
        for kind in DEVICE_MESSAGES:
            self.on_control(kind, lambda peer, message: self.use_devices().handle(peer, message), in_order=True)
        for kind in NEWS:
            self._controls[kind] = lambda peer, message: self.watch.on_message(peer.life, message)

    def __repr__(self) -> str:
        who = f"rank {self.info.id} of {len(self.workers())}, " if self.running else ""
        return f"<Node {self._name!r}: {who}{self._state}>"

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Node:
        if self._state == "new":
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the others may be waiting for calls that never come: do not wait for them.
        self.shutdown(graceful=kind is None)

    def start(self) -> None:
        """Meet the other members and connect to each; raises within the options' start timeout."""
        if self._state != "new":
            raise RuntimeError(f"node {self._name!r} was started before; make a new one")
        self._state = "starting"
        self.started_at = monotonic()
        deadline = monotonic() + self.options.start_deadline_s
        shield.seal()  # until the `try` below, which closes what is made here
        self._shielded = shield.install()
        _started.add(self)
        self._loop = Loop(self._name, self.options.busy_wait_s)
        self.pool = SegmentPool(self.options.shared_memory_limit_bytes) if self.options.shared_memory else None
        self._memory = ReceivePool(RECEIVE_POOL_BYTES)
        self.executor = Executor(
            self._name,
            self.options.num_worker_threads,
            self._loop.attend_by,
            self._loop.on_thread,
            before_idle=self._before_idle,
            on_thread_start=self._own_thread,
        )
        self.admission = Admission(self.options.max_queued_calls, lambda: self.executor.waiting, self._loop.attend_by)
        self.calls = self._make_calls()
        self._door: Door | None = None
        try:
            shield.unseal()
            place = find_meeting_place(self._rank, self._world_size, self.options.init_method)
            self.is_static = not place.is_dynamic
            host = choose_host(self.options.advertise, place.host).host
            self._door = Door(listening_addresses(self.options.allowed_transports, host), self._loop)
            addresses = [advertised_address(address, host) for address in self._door.addresses]
            self._become_member(self._meet(place, addresses, deadline))
            if self.options.names_devices:
                self.use_devices().meet(self._myself)
            self._loop.start()
            if self.is_static:
                self._connect_all(deadline)
            else:
                self._join()
        except BaseException as error:
            self._end(Cancelled(f"the start of {self._name} failed: {error}"))
            raise
        if self.is_static and self.devices is not None and self.options.names_devices:
            for peer in list(self._remotes.values()):
                self.devices.meet(peer)
        self._move("starting", "running")
        self.executor.start()
        self.watch.begin()
        if self._why_ended is not None:  # expelled before it was up
            if self._move("running", "leaving"):
                self._end(self._why_ended)
            raise self._why_ended
        places = " and ".join(self.addresses)
        logger.info("%s is up: rank %d of %d, at %s", self._name, self.info.id, len(self.workers()), places)

    def _make_calls(self) -> CallTable:
        """The table of calls; a layer above may want another one."""
        return CallTable(self._loop, self.executor, self.options.when_overloaded)

    def _meet(self, place: MeetingPlace, addresses: list[str], deadline: float) -> Membership:
        """Who the members are, as far as that is known before there is any connection."""
        if self.is_static:
            return join(
                self._name, self._rank, self._world_size, self.options, addresses, host_token(), self._incarnation
            )
        me = MemberRecord(self._name, place.rank, tuple(addresses), host_token(), self._incarnation)
        self._entry = Entry(place, me, self.options, deadline)
        return self._entry.membership

    def _become_member(self, membership: Membership) -> None:
        self.membership = membership
        self.info = WorkerInfo(self._name, membership.me.rank)
        self.server = Server(self.info, self.executor, self._own_thread)
        self._unanswered = self.server.unanswered
        self.server.chronicle = self.calls.chronicle = self.chronicle
        self._changes = Changes(self.executor)
        faults = self.options.faults
        deliver = self._on_message if faults is None else faults.wrap_delivery(self._on_message, self._name)
        self._myself = SelfPeer(self.info, self._incarnation, self.is_static, deliver, self._memory)
        identity = identity_of(membership)
        self.reconnecting = Reconnecting(
            identity, membership.secret, self.options.reconnect_s, self._ways_to, self._loop, self._wrapped
        )
        self.reconnecting.lost_hooks.append(lambda info, why: self.chronicle.note(INTERRUPTED, info.name, text=why))
        self.reconnecting.back_hooks.append(lambda info: self.chronicle.note(RECONNECTED, info.name))
        self.reconnecting.on_lost = lambda peer: self.watch.feed(LinkLost(peer.life))
        self.reconnecting.on_vanished = lambda peer: self.watch.feed(LinkRefused(peer.life))
        self.reconnecting.is_trusted = lambda peer: self.watch.is_trusted(peer.life)
        self._acquaintances = Acquaintances(
            self._myself,
            self.is_static,
            self.options,
            self._loop,
            self.pool,
            self._memory,
            self.reconnecting,
            identity,
            membership.secret,
            lambda: self.watch,
            self._write_later,
            self._fail_unsent,
            self._on_frame,
            self._on_gone,
            self._on_release,
            self._wrapped,
        )
        self._peers = self._acquaintances.named
        self._remotes = self._acquaintances.remotes
        self._acquaintances.on_entered = self._on_entered
        self._acquaintances.on_change = self._on_change
        self._acquaintances.on_expelled = self._on_expelled
        records = [as_record(member) for member in membership.members]
        self.watch = Watch(
            as_record(membership.me),
            records if self.is_static else None,
            chosen(self.options),
            self._loop,
            self._acquaintances,
        )
        if self.is_static:
            self._leaving = Leaving(
                self.info.id,
                {member.rank: member.name for member in membership.members},
                self._loop,
                self._local_state,
                lambda rank, message: self._remotes[rank].control(message) if rank in self._remotes else None,
            )
        else:
            under_way = lambda: (*self.calls.snapshot(), *self.server.active)  # noqa: E731
            self._leaving = Withdrawing(self._name, self._loop, self._local_state, under_way)
        assert self._door is not None
        self._door.on_observer = self._on_observer
        for ticker in (self.calls, self.executor, self.admission, self._leaving, self._door, self._acquaintances, self):
            self._loop.add_ticker(ticker)
        # Answers are held back only while tasks wait, and then the loop looks in every executor tick.
        self._loop.on_thread_start = self._own_thread  # it runs quick functions, too
        self._loop.before_sleep(self.server.flush)
        self._loop.before_sleep(self.executor.before_sleep)

    def _connect_all(self, deadline: float) -> None:
        """In a group of fixed size: be connected to everybody."""
        assert self._door is not None
        mesh = Mesh(self.membership, self.options, self._remotes, self._linked, self._is_over)
        mesh.connect(self._door, self._on_connected, self.reconnecting, deadline)

    def use_devices(self) -> NodeDevices:
        """This node's devices, from now on; on any thread."""
        with self._parts_lock:
            if self.devices is None:
                devices = NodeDevices(self._name, self.options, self._on_release, self._write_later)
                self._loop.look_for(DEVICE_BUSY_WAIT_S)
                self.device_list = devices.devices
                self.server.lanes = devices.lanes
                self.server.devices = devices.devices
                self.on_agreed(self._close_device_segments)
                self.devices = devices
            return self.devices

    def _close_device_segments(self) -> None:
        for peer in self._acquaintances.everyone():
            if peer.devices is not None:
                peer.devices.forget_segments()

    def _is_over(self, incarnation: str) -> bool:
        """Has that member left or died?"""
        status = self.watch.status_of(life_of(incarnation))
        return status is not None and status >= Status.DEAD

    def _join(self) -> None:
        """In a group whose members come and go: be let in, or found it."""
        assert self._door is not None
        assert self._entry is not None
        self._entry.enter(self._door, self._loop, self._acquaintances, self.reconnecting, self.watch, self._set_watch)

    def _set_watch(self, watch: Watch) -> None:
        self.watch = watch

    def _ways_to(self, peer: RemotePeer) -> list[str]:
        record = self.watch.record_of(peer.life)
        if record is None:
            return []
        return usable_ways(record.addresses, record.host_token, self.options.allowed_transports)

    def _wrapped(self, transport: Transport, info: WorkerInfo) -> Transport:
        """The transport for a link to ``info``: with the faults of the options, if any."""
        if self.options.faults is None:
            return transport
        wrapped: Transport = self.options.faults.wrap_transport(transport, self._name, info.name, self._fail_unsent)
        return wrapped

    def _on_connected(self, transport: Transport, established: Established, dialled: bool) -> None:
        """A proven peer is connected anew."""
        self._acquaintances.connected(transport, established, dialled)
        self._linked.open()

    def _on_observer(self, transport: Transport, established: Established) -> None:
        """Somebody who may look on is connected."""
        if self.on_question is None:
            transport.close()
            return
        logger.info("%s: an observer is connected over %s", self._name, transport.describe())
        onlooker = Onlooker(transport, self._loop, self.on_question, self._onlookers.discard)
        self._onlookers.add(onlooker)
        onlooker.start(established.leftover)

    def _fail_unsent(self, call_id: int, why: str) -> None:
        """A request was not sent after all: have its caller told, from any thread."""

        def fail() -> None:
            call = self.calls.claim(call_id)
            if call is not None:
                call.tally[LOST] += 1
                call.on_failure(NetworkError(why, Delivery.NOT_SENT))

        self._loop.call_soon(fail)

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        if not self._move("running", "leaving"):
            if self._ending is not None:  # it was expelled
                self._ending.join(2 * STOP_S)
            return
        abdicate()
        agreed = False
        late: tuple[str, ...] = ()
        try:
            if graceful:
                self.server.on_answered = self._leaving.poke
                if self._entry is not None:
                    self._entry.withdraw()
                self.membership.close()  # before all agree: afterwards a new store may be opened at its port
                late = self._leaving.enter(timeout_s)
                agreed = not late and self._why_ended is None
                if agreed:
                    for hook in self._agreed_hooks:
                        hook()
                    if isinstance(self._leaving, Withdrawing):
                        self.watch.leave(LEAVE_S)
                        self._leaving.enter(LEAVE_S, LEAVE_S)  # those who did not know yet may have asked for something
        finally:
            self._end(Cancelled(f"{self._name} shut down before the answer came"), linger=agreed)
        if self._why_ended is not None:
            raise self._why_ended
        if late:
            raise ShutdownTimeout(
                f"{self._name} left after waiting {timeout_s:g} s for: {'; '.join(late)}", self._leaving.late_names
            )

    def _move(self, before: str, after: str) -> bool:
        """Change the state, if it is ``before``."""
        with self._state_lock:
            if self._state != before:
                return False
            self._state = after
            return True

    def leave_at_exit(self) -> None:
        """The process ends without shutdown: close what is open, wait for nobody, let no function run on."""
        self._exiting = True
        self.shutdown(graceful=False)

    def redeliver(self, peer: Peer, message: Arrived) -> None:
        """On the I/O thread: take a message that ``take_forks`` has kept back."""
        if message[0] == REQUEST and message[1] & REFUSED:
            self._refuse(peer, message)
        else:
            self._on_message(peer, message)

    def _on_expelled(self, why: str) -> None:
        """On the I/O thread: the others hold this node for dead, and that is final."""
        if self._state not in ("running", "leaving", "starting"):
            return
        error = self._why_ended = Expelled(
            f"{self._name} was declared dead by the other members ({why}): it can do no more here; call shutdown(), "
            "then init_rpc to join again"
        )
        logger.error("%s", error)
        self._myself.ended = error
        self.calls.end(error)
        ending = threading.Thread(target=self._end, args=(error,), name=f"farcall-end-{self._name}", daemon=True)
        with self._state_lock:
            if self._state == "running":
                self._state = "expelled"
                ending.start()
                self._ending = ending
                return
        self._leaving.abort()  # whoever starts or leaves ends it

    def _end(self, why: RpcError, linger: bool = False) -> None:
        """Stop everything that runs; leave no thread, descriptor, file or segment behind."""
        shield.seal()  # Ctrl-C must not leave half of it behind; every wait in here has a bound
        try:
            self._stop_all(why, linger)
        finally:
            _started.discard(self)
            if self._shielded:
                shield.uninstall()
            shield.unseal()

    def _stop_all(self, why: RpcError, linger: bool) -> None:
        why = self._why_ended or why
        self._state = "expelled" if self._why_ended is not None else "ended"
        remotes: list[RemotePeer] = []
        if self._entry is not None:
            self._entry.close()
        if hasattr(self, "watch"):
            self.watch.stop()
            remotes = self._acquaintances.everyone()
            self._changes.end()
        for peer in remotes:
            peer.leaving = True
        if hasattr(self, "reconnecting"):
            self.reconnecting.stop()
            self._acquaintances.stop()
        for peer in remotes:
            peer.control(messages.Goodbye("shutdown"))
        if linger:
            deadline = monotonic() + 1.0
            for peer in remotes:
                peer.link.outgoing.end_sending(deadline)
            for peer in remotes:
                peer.link.wait_closed(deadline)
        self.calls.end(why)  # first: who waits learns the true reason, not "the link is gone"
        for peer in remotes:
            peer.link.close()
            peer.on_queue_has_room()
        if hasattr(self, "membership"):
            self._myself.ended = why
            self._myself.on_queue_has_room()
            self.membership.close()
        # Now that no call can be made any more: one registered after this sweep sees that its peer is gone.
        self.calls.fail_all(lambda call: why)
        for hook in self._end_hooks:
            hook()
        if self._exiting:
            self.executor.interrupt()
        stuck = self.executor.stop(STOP_S if linger else 1.0)
        if stuck:
            logger.warning("%s leaves %d threads inside user functions behind", self._name, len(stuck))
        if hasattr(self, "server"):
            self.server.stop(STOP_S)
        self._loop.stop()
        for onlooker in list(self._onlookers):
            onlooker.close(f"{self._name} ended")
        if hasattr(self, "watch"):
            for peer in self._acquaintances.everyone():
                peer.link.close()  # also those who have come in meanwhile
                peer.close()
        for peer in remotes:
            peer.close()
        if self._door is not None:
            self._door.close()
        if self.pool is not None:
            self.pool.close()
        if self.devices is not None:
            self.devices.close()
        self._memory.close()

    def close_after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent, without telling anybody."""
        self._state = "forked"
        _thread.node = None
        if hasattr(self, "membership") and self.membership.store is not None:
            # Its threads exist in the parent only, and its destructor would wait for them for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.membership.store))
            self.membership.close()
        if hasattr(self, "reconnecting"):
            self._acquaintances.close_after_fork()
            self.reconnecting.close_after_fork()
        for onlooker in self._onlookers:
            onlooker.close_after_fork()
        if self._door is not None:
            self._door.close_after_fork()
        self._loop.close_after_fork()

    def _before_idle(self) -> None:
        """A worker has nothing to do now."""
        self.server.flush()
        if self._leaving.entered:
            self._leaving.poke()

    def _write_later(self, write: Callable[[], None]) -> None:
        self.executor.submit(_Write(write))

    def _own_thread(self) -> None:
        _thread.node = self

    # ------------------------------------------------------------------ members

    @property
    def state(self) -> str:
        """One of the states in the table above."""
        return self._state

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this member can be reached."""
        return self.membership.me.addresses

    @property
    def running(self) -> bool:
        """May calls be made?"""
        return self._state in ("running", "leaving")

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """The member called ``to``, by name, rank or WorkerInfo."""
        try:
            peer = self._peers.get(to.name if isinstance(to, WorkerInfo) else to)
        except TypeError:
            peer = None  # unhashable: the error below says what is wanted
        if peer is None or self._state not in ("running", "leaving"):
            raise self._no_peer(to)
        return peer

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        if self._why_ended is not None or self.running:
            return self._why_ended
        return NotInitialized(f"the node {self._name} is {self._state}: no calls can be made with it")

    def _no_peer(self, to: object) -> Exception:
        ended = self.why_ended
        if ended is not None:
            return ended
        if not isinstance(to, str | int | WorkerInfo):
            return TypeError(f"the destination must be a name, a rank or a WorkerInfo, not {type(to).__name__}")
        known = ", ".join(info.name for info in self.workers()[:16])
        return UnknownWorker(f"unknown destination worker {to!r}: the members are {known}")

    def is_peer(self, peer: Peer) -> bool:
        """Whether ``peer`` is how this very node sees a member: several nodes may live in one process."""
        return self._peers.get(peer.info.id) is peer

    def is_gone(self, name: str, incarnation: str) -> bool:
        """Was there that incarnation of a member, and is it there no more? One that is not known may come yet."""
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation == incarnation:
            return peer.broken
        return self._is_over(incarnation)

    def numbered(self, member: int) -> Peer | None:
        """The member of this number (``Peer.member``), in whatever state the node and the link to it are.

        None: it is gone; or, while the node starts, not connected yet.
        """
        return self._acquaintances.numbered.get(member)

    def other(self, member: int) -> RemotePeer | None:
        """The same, where it is another member than this one."""
        peer = self._acquaintances.numbered.get(member)
        return peer if isinstance(peer, RemotePeer) else None

    def members(self) -> list[int]:
        """The numbers of all members, one's own too."""
        return list(self._acquaintances.numbered)

    @property
    def me(self) -> Peer:
        """This node, as a peer of itself."""
        return self._myself

    def others(self) -> list[RemotePeer]:
        """All other members, in whatever state the links to them are."""
        return list(self._remotes.values())

    def workers(self) -> list[WorkerInfo]:
        """All members, by rank; where members come and go, those that are there now."""
        return self._acquaintances.workers()

    # ------------------------------------------------------------------ what arrives

    def _on_frame(self, peer: RemotePeer, frame: Frame) -> None:
        """Route one frame. On the thread that reads the link: it must not block."""
        if frame[0] == CONTROL:
            self._on_control(peer, frame)
            return
        if not peer.known:
            self._acquaintances.hold(peer, frame)
            return
        if frame[6]:
            try:
                self._on_message(peer, peer.resolved(frame))
            except SegmentRefused as error:
                peer.link.abort(str(error))
        else:
            self._on_message(peer, frame)  # type: ignore[arg-type]  # no buffer, so no ticket

    def _on_message(self, peer: Peer, message: Arrived) -> None:
        if (
            message[0] == REQUEST
            and len(self._unanswered) >= self._max_queued
            and self.admission.refuses(peer, bool(message[1] & REFUSABLE))
        ):
            self._refuse(peer, message)
            return
        if message[4]:
            notes = decode_notes(message[4])
            noted = self._noted(peer, message, notes)
            if noted is None:
                return
            message = noted
        if message[0] == REQUEST:
            self.server.accept(peer, message)
            return
        if message[0] == LETTER:
            self._on_letter(peer, message)
            return
        call = self.calls.claim(message[2])
        if call is not None:
            call.tally[bisect_right(BOUNDS_S, monotonic() - call.started_at)] += 1
            if message[0] == FAILURE:
                call.tally[FAILED] += 1
            if call.profile is not None:
                # Before whoever waits goes on: it may be about to look at what was recorded.
                call.profile.ended(notes.profiled if message[4] else b"", _size_of(message))
            call.on_answer(message)
            if self._leaving.entered:
                self._leaving.poke()
        else:  # too late
            if isinstance(message[6], Annotated):
                message[6].decline(peer)
            discard(message[5], peer)

    def _noted(self, peer: Peer, message: Arrived, notes: Notes) -> Arrived | None:
        """``message`` with what its notes stand for; None: nothing is to be done with it, or not now."""
        if notes.created is not None or notes.forks:
            noted = self.take_forks(peer, message, notes)
            if noted is None:
                return None
            message = noted
        if notes.context_id:
            message = self.find_recording(message, notes)
        return message if notes.profile is None else _with_profile(message, notes.profile)

    def _refuse(self, peer: Peer, message: Arrived) -> None:
        """Too many calls wait here: answer that, and account for what came with the request. It creates nothing."""
        call_id = message[2]
        if message[4]:
            noted = self._noted(peer, (REQUEST, REFUSED, *message[2:]), decode_notes(message[4]))
            if noted is None:
                return  # it comes again, see redeliver
            if isinstance(noted[6], Annotated):
                noted[6].decline(peer)
        try:
            refusal = encode_refusal(Refusal(self.admission.queued, self.admission.limit))
            peer.send(FAILURE, REFUSED, call_id, b"", b"", refusal, ())
        except RpcError as error:
            logger.info("%s: %s was not told that its call was refused: %s", self._name, peer.info.name, error)

    def _on_letter(self, peer: Peer, message: Arrived) -> None:
        handle = self._letters.get(message[2])
        if handle is None:
            logger.error("%s: %s sent a letter of an unknown subject, %d", self._name, peer.info.name, message[2])
            return
        handle(peer, message)

    def _on_control(self, peer: RemotePeer, frame: Frame) -> None:
        try:
            message = messages.decode_message(frame[5])
        except messages.ProtocolError as error:
            peer.link.abort(str(error))
            return
        handle = self._controls[type(message)]
        if not peer.known and not isinstance(message, FOR_STRANGERS):
            self._acquaintances.hold(peer, frame)
            return
        if type(message) in self._in_order or self._loop.on_thread():
            handle(peer, message)
        else:
            self._loop.call_soon(lambda: handle(peer, message))

    def _on_goodbye(self, peer: RemotePeer, message: messages.Goodbye) -> None:
        peer.leaving = True
        if peer.known:
            self.watch.on_goodbye(peer.life)

    def _on_departure(self, peer: RemotePeer, message: DepartureMessage) -> None:
        self._leaving.on_message(peer.info.id, message)

    def _on_entered(self, peer: RemotePeer) -> None:
        if self.options.names_devices:
            self.use_devices().meet(peer)
        for hook in self._joined_hooks:
            hook(peer)

    def _on_change(self, kind: str, record: Record, why: str) -> None:
        """On the I/O thread: a member joined, left, died, is suspected, or recovered."""
        level = logging.WARNING if kind in ("suspected", "dead") else logging.INFO
        logger.log(level, "%s: %s (rank %d) %s%s", self._name, record.name, record.rank, kind, f": {why}" * bool(why))
        self.chronicle.note(kind, record.name, text=why)
        if self._entry is not None and kind in ("joined", "left", "dead"):
            self._entry.on_change()
        self._changes.tell(MemberEvent(kind, WorkerInfo(record.name, record.rank), incarnation_of(record.life), why))

    def _on_gone(self, peer: RemotePeer, reason: str) -> None:
        """On the I/O thread, once: a member's link is dead. Whoever waits for it learns it now."""
        peer.close()
        self.admission.forget(peer)
        if peer.leaving:
            logger.info("%s: %s has left", self._name, peer.info.name)
        elif self._state in ("running", "starting", "leaving"):
            self.peers_lost += 1
            logger.warning("%s: lost %s: %s", self._name, peer.info.name, reason)
        how = "has left" if peer.leaving else f"is gone: {reason}"

        def lost(call: PendingCall) -> PeerDead:
            sent = call.call_id not in peer.link.never_sent
            what = "whether the call ran there is unknown" if sent else "the call was not sent"
            delivery = Delivery.UNKNOWN if sent else Delivery.NOT_SENT
            return PeerDead(f"{peer.info.name} {how}; {what}", delivery, peer.info, peer.incarnation)

        self.calls.fail_all(lost, peer)
        for hook in self._gone_hooks:
            hook(peer)
        self._leaving.on_peer_gone(peer.info.id)

    # ------------------------------------------------------------------ what the loop asks

    def tick(self, now: float) -> float:
        """On the I/O thread: send releases that nobody took along, give back memory unused for long, and watch."""
        for peer in self._acquaintances.everyone():  # a copy: members may still be connecting
            if peer.segments is not None and peer.segments.has_releases:
                peer.send_releases()
            if peer.devices is not None:
                peer.devices.settle_views()
                if peer.devices.has_releases:
                    peer.send_device_releases()
        if now >= self._next_trim:
            self._next_trim = now + TRIM_EVERY_S
            self._memory.trim(now)
            if self.devices is not None:
                self.devices.trim(now)
            if self.pool is not None:
                for segment_id, holders in self.pool.trim(now):
                    for holder in holders:
                        if isinstance(holder, RemotePeer):
                            holder.retire(segment_id)
        return min(self._next_trim, self.watch.tick(now))

    def _on_release(self, urgent: bool) -> None:
        """A tensor over a peer's memory died; on any thread, perhaps inside a garbage collection: only wake."""
        self._loop.attend_by(monotonic() + (0.0 if urgent else RELEASE_DELAY_S))

    def _local_state(self) -> tuple[int, int]:
        """(calls in flight, activity): read until no call began in between."""
        while True:
            activity = self.calls.last_id + self.server.last_accepted
            # A request that a worker runs is both active and busy; a callback is busy only, a coroutine active only.
            served = max(self.server.awaited, self.executor.waiting + self.executor.busy)
            in_flight = len(self.calls) + served + sum(count() for count in self._unsettled)
            if activity == self.calls.last_id + self.server.last_accepted:
                return in_flight, activity


def _with_profile(message: Arrived, wanted: ProfileWanted) -> Arrived:
    """``message`` with what its profiled caller wants to know."""
    buffers = message[6]
    if not isinstance(buffers, Annotated):
        buffers = Annotated(buffers, [])
    buffers.profile = wanted
    return (*message[:6], buffers)


def _size_of(message: Arrived) -> int:
    return len(message[5]) + sum(buffer.nbytes for buffer in message[6])


def _after_fork() -> None:
    """In a forked child: whatever nodes there were, they are the parent's."""
    for node in list(_started):
        node.close_after_fork()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
