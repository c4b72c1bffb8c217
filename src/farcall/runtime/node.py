"""One member of a cluster: the composition root that wires loop, links, calls, executor and protocol machines together.

It starts and stops things and routes messages to the part they belong to; it holds no protocol of its own. Several
nodes may live in one process.

    state      by                             to
    new        start()                        starting: meets the others, dials the earlier ones, awaits the later ones
    starting   all linked                     running: serves calls (those that came before have waited)
    starting   an error                       ended
    running    shutdown(graceful)             leaving: agrees with all members, then ends
    running    shutdown(graceful=False)       ended
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, ClassVar, TypeVar

from farcall.channel.recycled import ReceivePool
from farcall.channel.shared_memory import SegmentMap, SegmentPool, SegmentRefused, host_token
from farcall.errors import (
    Cancelled,
    Delivery,
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
from farcall.protocol.notes import Notes, decode_notes
from farcall.protocol.observing import Ask
from farcall.runtime import shield
from farcall.runtime.addresses import advertised_address, choose_host, listening_addresses
from farcall.runtime.calls import CallTable, PendingCall
from farcall.runtime.doors import Door
from farcall.runtime.executor import Executor
from farcall.runtime.leaving import Leaving
from farcall.runtime.link import Link
from farcall.runtime.loop import Loop, Ticker
from farcall.runtime.mesh import Mesh
from farcall.runtime.onlooker import Onlooker
from farcall.runtime.peers import Peer, RemotePeer, SelfPeer
from farcall.runtime.rendezvous import Membership, find_meeting_place, join
from farcall.runtime.role import abdicate
from farcall.runtime.serving import Server
from farcall.runtime.tallies import BOUNDS_S, FAILED
from farcall.serialize import Annotated
from farcall.transport.interface import Transport

logger = logging.getLogger("farcall")

RECEIVE_POOL_BYTES = 1 << 30
TRIM_EVERY_S = 10.0
RELEASE_DELAY_S = 0.01
STOP_S = 5.0
HANDLED_ANYWHERE = (messages.BlocksReleased, messages.SegmentAccepted)
"""Control messages that a helping reader handles itself, because they only touch things that have their own lock."""


P = TypeVar("P")


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


class Node:
    """One member. Use it as a context manager, or call ``start`` and ``shutdown``."""

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
    ) -> None:
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise TypeError(f"the options must be a farcall.RpcBackendOptions, not a {type(options).__name__}")
        self.options = options or RpcBackendOptions()
        self.timeout_s = self.options.rpc_timeout
        self._name = check_worker_name(name)
        self._rank = rank
        self._world_size = world_size
        self._state = "new"
        self._exiting = False
        self._incarnation = secrets.token_hex(8)
        self._linked = shield.Gate()
        self._peers: dict[str | int, Peer] = {}
        self._remotes: dict[int, RemotePeer] = {}
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self._gone_hooks: list[Callable[[WorkerInfo], None]] = []
        self._agreed_hooks: list[Callable[[], None]] = []
        self._end_hooks: list[Callable[[], None]] = []
        self.take_forks: Callable[[Peer, Arrived, Notes], Arrived | None] = lambda peer, message, notes: message
        """What a message with forks becomes before anybody reads it; None: nothing. Set by the layer above."""
        self.find_recording: Callable[[Arrived, Notes], Arrived] = lambda message, notes: message
        """The same message, with its distributed autograd context. Set by the layer above."""
        self._unsettled: list[Callable[[], int]] = []
        self._letters: dict[int, Callable[[Peer, Arrived], None]] = {}
        self._onlookers: set[Onlooker] = set()
        self.on_question: Callable[[Onlooker, Ask], None] | None = None
        """Told, on the I/O thread, of each question of an observer. Set by the layer above."""
        self._next_trim = monotonic() + TRIM_EVERY_S
        self._in_order: set[type[Any]] = set(HANDLED_ANYWHERE)
        self._controls: dict[type[Any], Callable[[RemotePeer, Any], None]] = {
            messages.SegmentOffered: RemotePeer.on_segment_offered,
            messages.SegmentAccepted: RemotePeer.on_segment_accepted,
            messages.SegmentRefused: RemotePeer.on_segment_refused,
            messages.SegmentRetired: RemotePeer.on_segment_retired,
            messages.BlocksReleased: RemotePeer.on_blocks_released,
            messages.CallCancelled: lambda peer, message: self.server.cancel(peer, message.call_id),
            messages.Goodbye: self._on_goodbye,
            messages.Ping: lambda peer, message: peer.control(messages.Pong(message.nonce)),
            messages.Pong: lambda peer, message: None,
            messages.DepartureReport: self._on_departure,
            messages.DepartureProbe: self._on_departure,
            messages.DepartureStatus: self._on_departure,
            messages.DepartureReleased: self._on_departure,
            messages.DepartureAcknowledged: self._on_departure,
        }

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
        self.calls = self._make_calls()
        self._door: Door | None = None
        try:
            shield.unseal()
            place = find_meeting_place(self._rank, self._world_size, self.options.init_method)
            host = choose_host(self.options.advertise, place.host).host
            self._door = Door(listening_addresses(self.options.allowed_transports, host), self._loop)
            addresses = [advertised_address(address, host) for address in self._door.addresses]
            membership = join(self._name, self._rank, self._world_size, self.options, addresses, host_token())
            self._become_member(membership)
            self._loop.start()
            Mesh(membership, self.options, self._remotes, self._linked).connect(self._door, self._on_member, deadline)
        except BaseException as error:
            self._end(Cancelled(f"the start of {self._name} failed: {error}"))
            raise
        self._state = "running"
        self.executor.start()
        logger.info(
            "%s is up: rank %d of %d, at %s",
            self._name,
            self.info.id,
            len(membership.members),
            " and ".join(self.addresses),
        )

    def _make_calls(self) -> CallTable:
        """The table of calls; a layer above may want another one."""
        return CallTable(self._loop, self.executor)

    def _become_member(self, membership: Membership) -> None:
        self.membership = membership
        self.info = WorkerInfo(self._name, membership.me.rank)
        self.server = Server(self.info, self.executor, self._own_thread)
        faults = self.options.faults
        deliver = self._on_message if faults is None else faults.wrap_delivery(self._on_message, self._name)
        self._myself = SelfPeer(self.info, deliver, self._memory)
        self._peers[self._name] = self._peers[self.info.id] = self._myself
        self._leaving = Leaving(
            self.info.id,
            {member.rank: member.name for member in membership.members},
            self._loop,
            self._local_state,
            lambda rank, message: self._remotes[rank].control(message) if rank in self._remotes else None,
        )
        assert self._door is not None
        self._door.on_observer = self._on_observer
        for ticker in (self.calls, self.executor, self._leaving, self._door, self):
            self._loop.add_ticker(ticker)
        # Answers are held back only while tasks wait, and then the loop looks in every executor tick.
        self._loop.on_thread_start = self._own_thread  # it runs quick functions, too
        self._loop.before_sleep(self.server.flush)
        self._loop.before_sleep(self.executor.before_sleep)

    def _on_member(self, transport: Transport, established: Established) -> None:
        """A proven peer is connected: make it reachable."""
        identity = established.peer
        info = WorkerInfo(identity.name, identity.rank)
        if self.options.faults is not None:
            transport = self.options.faults.wrap_transport(transport, self._name, info.name, self._fail_unsent)
        shared = transport.carries_descriptors and self.pool is not None
        peer = RemotePeer(
            info,
            identity.process_token,
            self.pool if shared else None,
            SegmentMap(self._on_release) if shared else None,
            self._write_later,
        )
        peer.link = Link(
            info,
            transport,
            self._loop,
            partial(self._on_frame, peer),
            partial(self._on_broken, peer),
            self.options.send_backlog_limit_bytes,
            self._memory.take,
            self.options.busy_wait_s,
        )
        logger.info("%s is connected to %s over %s", self._name, info.name, transport.describe())
        self._peers[info.name] = self._peers[info.id] = peer
        self._remotes[info.id] = peer
        peer.link.start(established.leftover)
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
                call.on_failure(NetworkError(why, Delivery.NOT_SENT))

        self._loop.call_soon(fail)

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        if self._state != "running":
            return
        self._state = "leaving"
        abdicate()
        agreed = False
        late: tuple[str, ...] = ()
        try:
            if graceful:
                self.server.on_answered = self._leaving.poke
                self.membership.close()  # before all agree: afterwards a new store may be opened at its port
                late = self._leaving.enter(timeout_s)
                agreed = not late
                if agreed:
                    for hook in self._agreed_hooks:
                        hook()
        finally:
            self._end(Cancelled(f"{self._name} shut down before the answer came"), linger=agreed)
        if late:
            raise ShutdownTimeout(
                f"{self._name} left after waiting {timeout_s:g} s for: {'; '.join(late)}", self._leaving.late_names
            )

    def leave_at_exit(self) -> None:
        """The process ends without shutdown: close what is open, wait for nobody, let no function run on."""
        self._exiting = True
        self.shutdown(graceful=False)

    def part(self, kind: Callable[[Node], P]) -> P:
        """This node's one ``kind(node)``, made at first use: how layers above keep state with a node."""
        part = self._parts.get(kind)
        if part is None:
            with self._parts_lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return part

    def part_if_made(self, kind: Callable[[Node], P]) -> P | None:
        """The same, or None if it was never used."""
        return self._parts.get(kind)

    def wait_for(self, count: Callable[[], int]) -> None:
        """Have a graceful shutdown wait while ``count()``, of things under way that are no calls, is not 0."""
        self._unsettled.append(count)

    def something_ended(self) -> None:
        """One of those things came to its end: a graceful shutdown may be waiting for nothing else."""
        self._leaving.poke()

    def on_peer_gone(self, hook: Callable[[WorkerInfo], None]) -> None:
        """Call ``hook`` on the I/O thread whenever a member left or died; it must not run user code."""
        self._gone_hooks.append(hook)

    def on_agreed(self, hook: Callable[[], None]) -> None:
        """In a graceful shutdown call ``hook`` when all work everywhere is done, and the links still stand."""
        self._agreed_hooks.append(hook)

    def on_end(self, hook: Callable[[], None]) -> None:
        """Call ``hook``, which must not raise, when the node ends in whatever way: no message can be sent any more."""
        self._end_hooks.append(hook)

    def on_control(self, kind: type[Any], handle: Callable[[RemotePeer, Any], None], *, in_order: bool = False) -> None:
        """Have ``handle`` called on the I/O thread for each control message of this kind.

        ``in_order``: by whoever reads the link, and so before anything that came behind it; ``handle`` must have a
        lock of its own then.
        """
        self._controls[kind] = handle
        if in_order:
            self._in_order.add(kind)

    def on_letter(self, subject: int, handle: Callable[[Peer, Arrived], None]) -> None:
        """Have ``handle`` called for each letter of this subject, on the thread that reads it: it must not block."""
        self._letters[subject] = handle

    def add_ticker(self, ticker: Ticker) -> None:
        """Have the I/O thread ask ``ticker`` before each sleep; it must not run user code."""
        self._loop.add_ticker(ticker)
        self._loop.wake()

    def attend_by(self, when: float) -> None:
        """Make sure that tickers are asked no later than ``when``."""
        self._loop.attend_by(when)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the I/O thread as soon as possible; it must not run user code."""
        self._loop.call_soon(function)

    def _end(self, why: Cancelled, linger: bool = False) -> None:
        """Stop everything that runs; leave no thread, descriptor, file or segment behind."""
        shield.seal()  # Ctrl-C must not leave half of it behind; every wait in here has a bound
        try:
            self._stop_all(why, linger)
        finally:
            _started.discard(self)
            if self._shielded:
                shield.uninstall()
            shield.unseal()

    def _stop_all(self, why: Cancelled, linger: bool) -> None:
        self._state = "ended"
        remotes = list(self._remotes.values())
        for peer in remotes:
            peer.leaving = True
            peer.control(messages.Goodbye("shutdown"))
        if linger:
            deadline = monotonic() + 1.0
            for peer in remotes:
                peer.link.outgoing.end_sending(deadline)
            for peer in remotes:
                peer.link.wait_closed(deadline)
        self.calls.fail_all(lambda call: why)  # first: who waits learns the true reason, not "the link is gone"
        for peer in remotes:
            peer.link.close()
        if hasattr(self, "membership"):
            self._myself.ended = why
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
        for peer in remotes:
            peer.close()
        if self._door is not None:
            self._door.close()
        if self.pool is not None:
            self.pool.close()
        self._memory.close()

    def close_after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent, without telling anybody."""
        self._state = "forked"
        _thread.node = None
        if hasattr(self, "membership") and self.membership.store is not None:
            # Its threads exist in the parent only, and its destructor would wait for them for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.membership.store))
            self.membership.close()
        for peer in self._remotes.values():
            peer.link.close_after_fork()
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

    def _no_peer(self, to: object) -> Exception:
        if self._state not in ("running", "leaving"):
            return NotInitialized(f"the node {self._name} is {self._state}: no calls can be made with it")
        if not isinstance(to, str | int | WorkerInfo):
            return TypeError(f"the destination must be a name, a rank or a WorkerInfo, not {type(to).__name__}")
        known = ", ".join(info.name for info in self.workers()[:16])
        return UnknownWorker(f"unknown destination worker {to!r}: the members are {known}")

    def is_peer(self, peer: Peer) -> bool:
        """Whether ``peer`` is how this very node sees a member: several nodes may live in one process."""
        return self._peers.get(peer.info.id) is peer

    def other(self, rank: int) -> RemotePeer | None:
        """The other member of this rank, in whatever state the node and the link to it are."""
        return self._remotes.get(rank)

    @property
    def myself(self) -> SelfPeer:
        """This member, as the target of its own calls."""
        return self._myself

    def others(self) -> list[RemotePeer]:
        """All other members, in whatever state the links to them are."""
        return list(self._remotes.values())

    def workers(self) -> list[WorkerInfo]:
        """All members, by rank."""
        return sorted({peer.info for peer in self._peers.values()}, key=lambda info: info.id)

    # ------------------------------------------------------------------ what arrives

    def _on_frame(self, peer: RemotePeer, frame: Frame) -> None:
        """Route one frame. On the thread that reads the link: it must not block."""
        if frame[0] == CONTROL:
            self._on_control(peer, frame)
            return
        if frame[6]:
            try:
                self._on_message(peer, peer.resolved(frame))
            except SegmentRefused as error:
                peer.link.abort(str(error))
        else:
            self._on_message(peer, frame)  # type: ignore[arg-type]  # no buffer, so no ticket

    def _on_message(self, peer: Peer, message: Arrived) -> None:
        if message[4]:
            notes = decode_notes(message[4])
            if notes.created is not None or notes.forks:
                noted = self.take_forks(peer, message, notes)
                if noted is None:
                    return
                message = noted
            if notes.context_id:
                message = self.find_recording(message, notes)
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
            call.on_answer(message)
            if self._leaving.entered:
                self._leaving.poke()
        elif isinstance(message[6], Annotated):
            message[6].decline(peer)  # too late

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
        if type(message) in self._in_order or self._loop.on_thread():
            handle(peer, message)
        else:
            self._loop.call_soon(lambda: handle(peer, message))

    def _on_goodbye(self, peer: RemotePeer, message: messages.Goodbye) -> None:
        peer.leaving = True

    def _on_departure(self, peer: RemotePeer, message: DepartureMessage) -> None:
        self._leaving.on_message(peer.info.id, message)

    def _on_broken(self, peer: RemotePeer, reason: str) -> None:
        """On the I/O thread, once: a link has ended. Whoever waits for the peer learns it now."""
        peer.close()
        if peer.leaving:
            logger.info("%s: %s has left", self._name, peer.info.name)
        elif self._state in ("running", "starting", "leaving"):
            logger.warning("%s: lost %s: %s", self._name, peer.info.name, reason)
        how = "has left" if peer.leaving else f"is gone: {reason}"

        def lost(call: PendingCall) -> PeerDead:
            return PeerDead(f"{peer.info.name} {how}; whether the call ran there is unknown", Delivery.UNKNOWN)

        self.calls.fail_all(lost, peer)
        for hook in self._gone_hooks:
            hook(peer.info)
        self._leaving.on_peer_gone(peer.info.id)

    # ------------------------------------------------------------------ what the loop asks

    def tick(self, now: float) -> float:
        """On the I/O thread: send releases that nobody took along, and give back memory unused for long."""
        for peer in list(self._remotes.values()):  # a copy: members may still be connecting
            if peer.segments is not None and peer.segments.has_releases:
                peer.send_releases()
        if now >= self._next_trim:
            self._next_trim = now + TRIM_EVERY_S
            self._memory.trim(now)
            if self.pool is not None:
                for segment_id, holders in self.pool.trim(now):
                    for holder in holders:
                        if isinstance(holder, RemotePeer):
                            holder.retire(segment_id)
        return self._next_trim

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


def _after_fork() -> None:
    """In a forked child: whatever nodes there were, they are the parent's."""
    for node in list(_started):
        node.close_after_fork()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
