"""One member of a cluster: the composition root that wires its parts together, starts and stops them.

It holds no protocol of its own, and what it is made of is listed in this folder's ``__init__.py``; here are the wires,
and the order in which things start and end. Several nodes may live in one process. States: `lifecycle.py`. ``start``
and ``shutdown`` belong to threads of the program, ``_on_expelled`` to the I/O thread, ``_end`` to whoever moved the
node out of its last state.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
from collections.abc import Callable
from time import monotonic

import torch

from farcall.channel.segments import host_token
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Cancelled, Expelled, RpcError, ShutdownTimeout
from farcall.ids import WorkerInfo, check_worker_name
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member, new_incarnation
from farcall.protocol.observing import Ask
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.devices.node import DEVICE_BUSY_WAIT_S, DEVICE_MESSAGES, NodeDevices
from farcall.runtime.io import sigint
from farcall.runtime.io.reader import stop_reading
from farcall.runtime.link.reconnect import Reconnecting
from farcall.runtime.membership.events import MemberChanges, MemberEvents
from farcall.runtime.membership.shutdown import Leaving, Withdrawing, Work
from farcall.runtime.node import current as process
from farcall.runtime.node.cluster_links import ClusterLinks
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.runtime.node.node_api import NodeApi
from farcall.runtime.node.resources import Resources
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.observing.observer_connection import ObserverConnection, ObserverConnections
from farcall.runtime.rendezvous.entry import Entry
from farcall.runtime.rendezvous.rendezvous import Membership, find_meeting_place, join
from farcall.runtime.rendezvous.store import MeetingPlace

__all__ = ["Node"]

logger: logging.Logger = logging.getLogger("farcall")

STOP_S = 5.0
LEAVE_S = 10.0
LINGER_S = 1.0
"""How long the others may take to read the last things that were sent to them, after a graceful shutdown."""


class Node(NodeApi):
    """One member. Use it as a context manager, or call ``start`` and ``shutdown``."""

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
    ) -> None:
        super().__init__(check_worker_name(name))
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise TypeError(f"the options must be a farcall.RpcBackendOptions, not a {type(options).__name__}")
        self.options: RpcBackendOptions = options or RpcBackendOptions()
        self.timeout_s: float = self.options.rpc_timeout
        self._rank = rank
        self._world_size = world_size
        self._exiting = False
        self._incarnation = new_incarnation(secrets.randbits(62))
        self._entry: Entry | None = None
        self.event_log: EventLog = EventLog()
        self.on_question: Callable[[ObserverConnection, Ask], None] | None = None
        """Told, on the I/O thread, of each question of an observer. Set by the layer above."""
        self.devices: NodeDevices | None = None
        """Where the options, or a peer, say something about devices; else no device is ever looked at."""
        self.device_list: list[torch.device] = []
        """The same as ``devices.devices``; empty where there is none."""
        for kind in DEVICE_MESSAGES:
            self.on_control(kind, lambda peer, message: self.use_devices().handle(peer, message), in_order=True)
        if self.options.names_devices:
            self.on_peer_joined(lambda peer: self.use_devices().meet(peer))

    def __repr__(self) -> str:
        who = f"rank {self.info.id} of {len(self.workers())}, " if self.running else ""
        return f"<Node {self._name!r}: {who}{self.state}>"

    # ------------------------------------------------------------------ the start

    def __enter__(self) -> Node:
        if self.state == "new":
            self.start()
        return self

    def start(self) -> None:
        """Meet the other members and connect to each; raises within the options' start timeout."""
        if not self._lifecycle.move("new", "starting"):
            raise RuntimeError(f"node {self._name!r} was started before; make a new one")
        self.started_at: float = monotonic()
        deadline = monotonic() + self.options.start_deadline_s
        sigint.seal()  # until the `try` below, which closes what is made here
        self._shielded = sigint.install()
        try:
            self._foundation = Resources(self._name, self.options, self._before_idle, self._own_thread)
        except BaseException:
            self._lifecycle.end()
            self._let_go()
            raise
        self._loop = self._foundation.loop
        self._onlookers = ObserverConnections(self._name, self._loop, lambda: self.on_question)
        process.STARTED.add(self)  # not before: a forked child closes all that is there of it
        self.pool: SegmentPool | None = self._foundation.pool
        self.executor: Executor = self._foundation.executor
        self.admission: Admission = self._foundation.admission
        self.calls: CallTable = self._make_calls()
        try:
            sigint.unseal()
            place = find_meeting_place(self._rank, self._world_size, self.options.init_method)
            self.is_static: bool = not place.is_dynamic
            addresses = self._foundation.open_door(place.host)
            self._become_member(self._meet(place, addresses, deadline))
            if self.options.names_devices:
                self.use_devices().meet(self.me)
            self._loop.start()
            if self._entry is None:
                self._company.connect_all(deadline)
            else:
                self._company.join(self._entry)
        except BaseException as error:
            self._end(Cancelled(f"the start of {self._name} failed: {error}"))
            raise
        if self.is_static and self.devices is not None and self.options.names_devices:
            for peer in self.others():
                self.devices.meet(peer)
        self._lifecycle.move("starting", "running")
        self.executor.start()
        self.watch.begin()
        verdict = self._lifecycle.verdict
        if verdict is not None:  # expelled before it was up
            if self._lifecycle.move("running", "leaving"):
                self._end(verdict)
            raise verdict
        places = " and ".join(self.addresses)
        logger.info("%s is up: rank %d of %d, at %s", self._name, self.info.id, len(self.workers()), places)

    def _make_calls(self) -> CallTable:
        """The table of calls; a layer above may want another one."""
        return CallTable(
            self._loop.timer, self.executor, self.options.when_overloaded, on_given_up=self.something_ended
        )

    def _meet(self, place: MeetingPlace, addresses: list[str], deadline: float) -> Membership:
        """Who the members are, as far as that is known before there is any connection."""
        if self.is_static:
            return join(
                self._name, self._rank, self._world_size, self.options, addresses, host_token(), self._incarnation
            )
        me = Member(self._name, place.rank, self._incarnation, tuple(addresses), host_token())
        self._entry = Entry(place, me, self.options, deadline)
        return self._entry.membership

    def _become_member(self, membership: Membership) -> None:
        """Make all that needs to know who we are, and wire it; the I/O thread does not run yet."""
        self.membership = membership
        self.info: WorkerInfo = WorkerInfo(self._name, membership.me.rank)
        self.server: Server = Server(self.info, self.executor, self._own_thread)
        self.server.event_log = self.calls.event_log = self.event_log
        self._changes = MemberEvents(self.executor)
        self._leaving = self._way_out(membership, Work(self.calls, self.server, self.executor, self._unsettled))
        self._member_changes = MemberChanges(
            self._name,
            is_over=self._lifecycle.is_over,
            loop=self._loop,
            admission=self.admission,
            calls=self.calls,
            leaving=self._leaving,
            events=self._changes,
            event_log=self.event_log,
            entry=self._entry,
            joined_hooks=self._joined_hooks,
            gone_hooks=self._gone_hooks,
        )
        self.dispatcher: Dispatcher = Dispatcher(
            self._name,
            self._loop,
            self.admission,
            self.calls,
            self.server,
            self._leaving,
            lambda: self.watch,
            lambda peer, frame: self._acquaintances.hold(peer, frame),
            self._controls,
            self._in_order,
            self._letters,
        )
        self._company = ClusterLinks(
            membership,
            self.is_static,
            self.options,
            self._foundation,
            self.dispatcher.on_message,
            self.dispatcher.on_frame,
            self._member_changes.on_gone,
            self._member_changes.fail_unsent,
        )
        self.reconnecting: Reconnecting = self._company.reconnecting
        self.reconnecting.lost_hooks.append(self._member_changes.on_interrupted)
        self.reconnecting.back_hooks.append(self._member_changes.on_reconnected)
        self._acquaintances = self._company.acquaintances
        self._acquaintances.on_entered = self._member_changes.on_entered
        self._acquaintances.on_change = self._member_changes.on_change
        self._acquaintances.on_expelled = self._on_expelled
        self._myself = self._company.myself
        self._peers = self._acquaintances.named
        self._remotes = self._acquaintances.remotes
        self._wire_loop()

    def _way_out(self, membership: Membership, work: Work) -> Leaving | Withdrawing:
        if not self.is_static:
            return Withdrawing(self._name, self._loop, work.state, work.under_way)
        return Leaving(
            self.info.id,
            {member.rank: member.name for member in membership.members},
            self._loop,
            work.state,
            lambda rank, message: self._remotes[rank].control(message) if rank in self._remotes else None,
        )

    def _wire_loop(self) -> None:
        """What the I/O thread does before it sleeps, in this order."""
        door = self._foundation.door
        door.on_observer = self._onlookers.admit
        # Answers are held back only while tasks wait, and then the executor's timer wakes the loop.
        self._loop.on_thread_start = self._own_thread  # it runs quick functions, too
        self._loop.before_sleep(self.server.flush)
        self._loop.before_sleep(self.executor.before_sleep)

    def use_devices(self) -> NodeDevices:
        """This node's devices, from now on; on any thread."""
        with self._parts_lock:
            if self.devices is None:
                foundation = self._foundation
                devices = NodeDevices(self._name, self.options, self._company.on_release, foundation.write_later)
                foundation.loop.look_for(DEVICE_BUSY_WAIT_S)
                self.device_list = devices.devices
                self.server.lanes = devices.lanes
                self.server.devices = devices.devices
                self.on_agreed(self._company.forget_device_segments)
                self.devices = foundation.devices = devices
            return self.devices

    def _before_idle(self) -> None:
        """A worker has nothing to do now."""
        self.server.flush()
        if self._leaving.entered:
            self._leaving.poke()

    def _own_thread(self) -> None:
        process.work_for(self)

    # ------------------------------------------------------------------ the end

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the others may be waiting for calls that never come: do not wait for them.
        self.shutdown(graceful=kind is None)

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        if not self._lifecycle.move("running", "leaving"):
            self._lifecycle.wait_ended(2 * STOP_S)  # if it was expelled
            return
        stop_reading()
        agreed = False
        late: tuple[str, ...] = ()
        try:
            if graceful:
                self.server.on_answered = self._leaving.poke
                if self._entry is not None:
                    self._entry.withdraw()
                self.membership.close()  # before all agree: afterwards a new store may be opened at its port
                late = self._leaving.enter(timeout_s)
                agreed = not late and self._lifecycle.verdict is None
                if agreed:
                    for hook in self._agreed_hooks:
                        hook()
                    if isinstance(self._leaving, Withdrawing):
                        self.watch.leave(LEAVE_S)
                        self._leaving.enter(LEAVE_S, LEAVE_S)  # those who did not know yet may have asked for something
        finally:
            self._end(Cancelled(f"{self._name} shut down before the answer came"), linger=agreed)
        if self._lifecycle.verdict is not None:
            raise self._lifecycle.verdict
        if late:
            raise ShutdownTimeout(
                f"{self._name} left after waiting {timeout_s:g} s for: {'; '.join(late)}", self._leaving.late_names
            )

    def leave_at_exit(self) -> None:
        """The process ends without shutdown: close what is open, wait for nobody, let no function run on."""
        self._exiting = True
        self.shutdown(graceful=False)

    def _on_expelled(self, why: str) -> None:
        """On the I/O thread: the others hold this node for dead, and that is final."""
        if self._lifecycle.is_over():
            return
        verdict = Expelled(
            f"{self._name} was declared dead by the other members ({why}): it can do no more here; call shutdown(), "
            "then init_rpc to join again"
        )
        logger.error("%s", verdict)
        self._lifecycle.verdict = verdict
        self._myself.ended = verdict
        self.calls.end(verdict)
        if not self._lifecycle.expel(self._end):
            self._leaving.abort()  # whoever starts or leaves ends it

    def _end(self, why: RpcError, linger: bool = False) -> None:
        """Stop everything that runs; leave no thread, descriptor, file or segment behind."""
        sigint.seal()  # Ctrl-C must not leave half of it behind; every wait in here has a bound
        try:
            self._lifecycle.end()
            self._stop_all(self._lifecycle.verdict or why, linger)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Nothing is left that a forked child would have to close, or Ctrl-C could tear."""
        process.STARTED.discard(self)
        if self._shielded:
            sigint.uninstall()
        sigint.unseal()

    def _stop_all(self, why: RpcError, linger: bool) -> None:
        company: ClusterLinks | None = getattr(self, "_company", None)  # None: the start failed before it was made
        if self._entry is not None:
            self._entry.close()
        if company is not None:
            company.watch.stop()
            self._changes.end()
            company.say_goodbye(LINGER_S if linger else 0.0)
        self.calls.end(why)  # first: who waits learns the true reason, not "the link is gone"
        if company is not None:
            company.cut(why)
        if hasattr(self, "membership"):
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
        self._onlookers.close()
        if company is not None:
            company.close()
        self._foundation.close()

    def close_after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent, without telling anybody."""
        self._lifecycle.fork()
        if hasattr(self, "membership") and self.membership.store is not None:
            # Its threads exist in the parent only, and its destructor would wait for them for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.membership.store))
            self.membership.close()
