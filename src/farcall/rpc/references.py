"""The references of one node: the reference machine, and what carries out what it says.

Owns the lock around the machine and around the values that this node owns (`values.py`). Decides nothing about who may
forget what: that is `protocol/references`. Everything else in `remote/` reaches the machine through here.

Thread rules
- The lock is held for microseconds, also while a control message is put on its way: so a message that registers a
  fork leaves before anything that the fork's holder sends afterwards. Re-entrant, since a garbage collection inside
  may run user code.
- ``released.append`` takes no lock: it is what destructors call. The I/O thread collects later.
- A value dies outside the lock, and on a worker thread if its destructor may be user code.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import torch

from farcall.errors import NetworkError, ReferenceLost, RpcError, RpcTimeout
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.frames import Frame
from farcall.protocol.notes import KEEP, REFUSED, Notes
from farcall.protocol.references import messages as protocol
from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import Fork, FreeValue, Lost, NeverCreated, Send
from farcall.protocol.references.outbox import ReleasedForks
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout, encode_request
from farcall.rpc.creation import Creation, KeptRequest
from farcall.rpc.deferred import DeferredMessages
from farcall.rpc.owned_value import Owned, TypeTold, dispose
from farcall.rpc.owned_values import Values
from farcall.rpc.reference_shutdown import ReferenceShutdown
from farcall.rpc.rref import RRef
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Node
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import encode_failure, withdraw

logger: logging.Logger = logging.getLogger("farcall")

LINGER_S = 0.005
CONFIRM_S = 0.002
"""How long the answer to a creating call may wait for company: nobody waits for it, and a first use is likely."""
RETRY_S = 0.01
_MESSAGES = (
    protocol.Register,
    protocol.Confirm,
    protocol.Accept,
    protocol.Release,
    protocol.Withdraw,
    protocol.Inquire,
    protocol.Answer,
)


class NodeReferences:
    """A part of a node: ``node.part(NodeReferences)``."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.traced = False
        """Record where in the program each reference is created?"""
        # By the number that the machine knows a member by: see Peer.number.
        self._workers = {member.rank: WorkerInfo(member.name, member.rank) for member in node.membership.members}
        if not node.is_static:
            self._workers = {node.me.number: node.info}
        self._lock = threading.RLock()
        self._timer = node.timer(self._do_due)
        self._machine = References(
            node.me.number,
            self._workers,
            linger_s=LINGER_S,
            wake=lambda: self._timer.at(monotonic() + LINGER_S),
        )
        self.released: ReleasedForks = self._machine.released
        self._values = Values(node.info)
        self._places = self._values.places
        self._lost: set[int] = set()
        self._failed: list[Creation] = []
        self._kept_back = DeferredMessages(node, self._workers.__contains__, self._give_up_on)
        self._unsent: list[Send] = []
        self._held_back: set[Peer] = set()  # whom answers to creating calls wait to be sent to
        node.dispatcher.take_forks = self.take_forks
        node.server.kept_request = self._kept_request
        for kind in _MESSAGES:
            # A fork is registered before it is used, and who uses it must not be told that nobody knows of it.
            node.on_control(kind, self._on_control, in_order=kind is protocol.Register)
        node.on_peer_joined(self._on_peer_joined)
        node.on_peer_gone(self._on_peer_gone)
        self.parting: ReferenceShutdown = ReferenceShutdown(self)

    # ------------------------------------------------------------------ references come to be

    def own(self, rref: RRef[Any], value: Any) -> None:
        """Make ``rref`` a reference to a value of this node."""
        origin = _origin() if self.traced else ""
        owned = Owned.of(value, origin, self.node.device_list)
        with self._lock:
            fork = self._machine.own_local()
            self._places[fork.ref] = owned
        rref._become(self, fork, owned, None, origin)

    def create(
        self,
        peer: Peer,
        what: Callable[..., Any],
        frame: Frame,
        timeout_s: float,
        keeps: RRef[Any] | None = None,
        make: Callable[..., Creation] = Creation,
    ) -> RRef[Any]:
        """Have ``peer`` run the function of the request ``frame`` and own its result.

        ``keeps``: the function is a method of that reference's value.
        """
        profile = None
        if is_profiled() or PROFILING.everywhere:
            profile = PROFILING.begin_call(self.node, peer, "remote", what, None)
        origin = _origin() if self.traced else ""
        with self._lock:
            fork = self._machine.create(peer.number)
            owned: Owned | None = None
            if fork.owner == self._machine.me:
                owned = self._places[fork.ref] = Owned(origin)
        creation = make(self, fork, peer, what, timeout_s, keeps)
        rref = RRef._of(self, fork, owned, creation, origin)
        try:
            creation.profile = profile
            if keeps is not None and keeps._creation is not None:
                try:
                    keeps._creation.attach(creation)  # without the object there is no method to wait for
                except BaseException:
                    withdraw(frame)
                    raise
            frame.flags = KEEP
            self.node.calls.send(creation, frame, fork, origin)
        except BaseException as error:
            if not isinstance(error, NetworkError | RpcTimeout):
                if profile is not None:
                    profile.ended()
                self.withdraw_creation(fork)
                raise
            creation.on_failure(error)  # like any end of the link: it surfaces at first use
            if owned is not None:
                self._values.never_comes(fork.ref, owned)  # nobody else tells us: the request was to be ours
        return rref

    def confirm_created(self, fork: Fork) -> None:
        """The owner has answered the creating call."""
        with self._lock:
            effects = self._machine.handle(protocol.CreationAnswered(fork), monotonic())
            freed = self._carry_out(effects) if effects or self._machine.next_deadline() is not None else []
        dispose(self.node, freed)

    def withdraw_creation(self, fork: Fork) -> None:
        """The creating call was not sent, or its answer did not come."""
        self._tell(protocol.CreationWithdrawn(fork))

    def refused_creation(self, fork: Fork, error: RpcError) -> None:
        """The owner has refused the creating call, and knows nothing of the reference."""
        self.withdraw_creation(fork)
        if fork.owner == self.node.me.number:
            owned = self._places.get(fork.ref)
            if owned is not None:
                owned.fail(encode_failure(error, self.node.info))  # nobody else tells us: the request was ours

    # ------------------------------------------------------------------ references travel

    def fork(self, rref: RRef[Any], peer: Peer) -> Fork:
        """A fork of ``rref``, to be sent to ``peer``."""
        creation = rref._creation
        if creation is not None and creation.error is not None:
            raise copy.copy(creation.error)
        if not self.node.is_peer(peer):
            raise RpcError(f"{rref!r} belongs to another node of this process than the one that sends it")
        with self._lock:
            try:
                return self._machine.fork(rref._fork, peer.number)
            except LookupError as error:
                raise ReferenceLost(f"{rref!r} cannot be sent: {error}") from None

    def withdraw(self, fork: Fork) -> None:
        """The message that ``fork`` was to travel in was not sent, or nobody knows."""
        self._tell(protocol.ForkWithdrawn(fork))

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        """A message with forks came: whatever becomes of it, its forks are accounted for from now on.

        They become references in ``frame.forks``; those that nobody takes out die with it. False: nobody is to read
        the message, or not now.
        """
        sender = peer.number
        machine = self._machine
        if not self.node.is_static and any(fork.owner not in self._workers for fork in notes.forks):
            self._kept_back.keep(peer, frame)
            return False
        arrived: list[Any] = []
        with self._lock:
            created = notes.created
            if created is not None:
                self._values.count_created(created.ref)
            if created is not None and not frame.flags & REFUSED:
                if created.owner != created.holder and not machine.own(created):
                    return False  # it came twice, or its caller is dead
                owned = self._values.place(created.ref)
                if notes.origin:
                    owned.origin = f"{notes.origin} on {peer.info.name}"
                arrived.append(owned)
            for fork in notes.forks:
                held = machine.receive(fork, sender)
                rref = RRef._of(self, fork, self._owned_of(fork, held), None)
                if not held:
                    rref._release = _nothing
                arrived.append(rref)
            freed = self._carry_out(machine.handle_deadline(monotonic())) if machine.has_news else []
        dispose(self.node, freed)
        frame.forks = arrived
        return True

    def _give_up_on(self, members: Sequence[int]) -> None:
        """No word has come of these owners of references: they are gone."""
        with self._lock:
            for member in members:
                self._workers[member] = WorkerInfo(f"member-{member}", -1)
                self._lost.add(member)

    def _kept_request(self, server: Server, peer: Peer, frame: Frame) -> KeptRequest:
        """The request of a frame with the flag KEEP; its value's place is the first of its forks."""
        arrived = list(frame.forks)
        owned = arrived.pop(0)
        frame.forks = arrived
        return KeptRequest(server, peer, frame, owned, self._flush_soon)

    def _flush_soon(self, peer: Peer) -> None:
        self._held_back.add(peer)
        self._timer.at(monotonic() + CONFIRM_S)

    def _owned_of(self, fork: Fork, held: bool) -> Owned | None:
        """Under the lock: the place of a value of this node; its creation may still be on its way."""
        if fork.owner != self._machine.me:
            return None
        owned = self._places.get(fork.ref)
        if owned is None:
            owned = Owned()
            if held:
                self._places[fork.ref] = owned
            else:
                self._values.never_comes(fork.ref, owned)  # its sender is dead: nobody would ever free the place
        return owned

    # ------------------------------------------------------------------ references are used

    def find(self, ref: RefId) -> Owned:
        """The value that somebody asks for."""
        owned = self._places.get(ref)
        if owned is None:
            with self._lock:
                owned = self._places.get(ref)
                if owned is None:
                    if not self._machine.lists(ref) and not self._may_come(ref):
                        raise ReferenceLost(
                            f"{self.node.info.name} has no value {ref.created_on}:{ref.local_id}: nobody referred to "
                            "it any more, or references were given up at a shutdown"
                        )
                    owned = self._values.place(ref)
        return owned

    def _may_come(self, ref: RefId) -> bool:
        """Under the lock: was the call that creates ``ref`` overtaken by a question? No link does it, but faults do."""
        creator = ref.created_on
        if creator == self._machine.me or creator in self._lost:
            return False
        return self._values.may_come(ref)

    def peer(self, fork: Fork) -> Peer:
        """The owner of a fork's value."""
        member = fork.owner
        peer = self.node.numbered(member)
        if peer is None or member in self._lost:
            if not self.node.running:
                self.node.peer(self.node.info)  # raises
            ref = fork.ref
            raise ReferenceLost(f"the owner of {ref.created_on}:{ref.local_id}, {self.worker(member)}, is gone")
        return peer

    def worker(self, member: int) -> WorkerInfo:
        """Who a member is or was."""
        return self._workers.get(member) or WorkerInfo(f"member-{member}", -1)

    def confirmed(self, fork: Fork) -> bool:
        """Does the owner know of ``fork``?"""
        with self._lock:
            return self._machine.confirmed_by_owner(fork)

    def is_lost(self, fork: Fork) -> bool:
        """Is the owner of ``fork``'s value gone?"""
        return fork.owner in self._lost

    def tell_type(self, owned: Owned, future: torch.futures.Future[Any]) -> None:
        """Complete ``future`` with the type of a value of this node."""
        told = TypeTold(owned, future)
        if owned.ready:
            told.run(False)
        else:
            owned.when_ready(lambda: self.node.executor.submit(told))

    # ------------------------------------------------------------------ what the loop, and the others, say

    def _do_due(self, now: float) -> float:
        """On the I/O thread: send what has lingered, look again after those who were about to wait."""
        while self._held_back:
            self._held_back.pop().flush()
        if self._failed:
            failed, self._failed = self._failed, []
            for creation in failed:
                creation.fail_waiting()
        freed: list[Owned] = []
        if self.released or self._unsent or self._machine.next_deadline() is not None:
            with self._lock:
                unsent, self._unsent = self._unsent, []
                for effect in unsent:
                    self._send(effect)
                freed = self._carry_out(self._machine.handle_deadline(now))
        dispose(self.node, freed)
        if self._failed or self._unsent:
            return now + RETRY_S
        deadline = self._machine.next_deadline()
        return NEVER if deadline is None else deadline

    def fail_waiting_soon(self, creation: Creation) -> None:
        """Look again, in a moment, whether calls that were about to be sent wait for a failed creation."""
        self._failed.append(creation)
        self._timer.at(monotonic() + RETRY_S)

    def _on_control(self, peer: RemotePeer, message: protocol.Message) -> None:
        self._tell(protocol.Received(peer.number, message))
        if self.parting.checks_leaks:
            self.node.something_ended()

    def _on_peer_joined(self, peer: Peer) -> None:
        with self._lock:
            self._workers[peer.number] = peer.info
            self._lost.discard(peer.number)  # given up when word of it was later than a message with its values
            freed = self._carry_out(self._machine.handle(protocol.MemberJoined(peer.number), monotonic()))
        dispose(self.node, freed)
        if self._kept_back:
            self.node.call_soon(self._kept_back.deliver)

    def _on_peer_gone(self, peer: Peer) -> None:
        member = peer.number
        with self._lock:
            self._lost.add(member)
            self.parting.on_peer_gone()
            if self.parting.agreed:
                return  # everybody leaves, and nobody needs to ask anybody any more
            freed = self._carry_out(self._machine.handle(protocol.MemberDied(member), monotonic()))
            freed += self._values.abandon(member, self._machine.lists)
        dispose(self.node, freed)

    def _tell(self, event: protocol.Event) -> None:
        """Tell the machine what happened, and do what it says."""
        with self._lock:
            freed = self._carry_out(self._machine.handle(event, monotonic()))
        dispose(self.node, freed)

    def _carry_out(self, effects: Iterable[protocol.Effect]) -> list[Owned]:
        """Under the lock: do what the machine says; the values that are to die are returned."""
        freed: list[Owned] = []
        for effect in effects:
            if effect.__class__ is FreeValue:
                owned = self._places.pop(effect.ref, None)
                if owned is not None:
                    freed.append(owned)
            elif effect.__class__ is Send:
                self._send(effect)
            elif effect.__class__ is NeverCreated:
                owned = self._values.place(effect.ref)
                self._values.count_created(effect.ref)  # who asks when it is forgotten must not wait for it
                self._values.never_comes(effect.ref, owned)
            elif effect.__class__ is Lost:
                self._lost.add(effect.fork.owner)
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer.at(deadline)
        return freed

    def _send(self, effect: Send) -> None:
        peer = self.node.other(effect.member)
        if peer is not None:
            peer.control(effect.message)
        elif effect.member not in self._lost:
            # This node is still starting. A fork came over one link, and the link to its owner does not stand yet.
            self._unsent.append(effect)
            self._timer.at(monotonic() + RETRY_S)

    # ------------------------------------------------------------------ the end

    def drop_all(self, timeout_s: float) -> None:
        """Give up every reference held here, once those under way have settled or ``timeout_s`` is over."""
        deadline = monotonic() + timeout_s
        with self.node.calls.waiting():
            while self._machine.unsettled and monotonic() < deadline:
                self._flush()
                sleep(0.002)
        self._flush()
        self._tell(protocol.AllDropped())

    def _flush(self) -> None:
        """Let nothing linger."""
        with self._lock:
            freed = self._carry_out(self._machine.handle_deadline(NEVER))
        dispose(self.node, freed)

    @property
    def unsettled(self) -> int:
        """How many forks wait for a message of another member before they can be released."""
        return self._machine.unsettled

    def others(self) -> list[int]:
        """The numbers of the other members that are still there."""
        me = self._machine.me
        return [member for member in list(self._workers) if member != me and member not in self._lost]

    # ------------------------------------------------------------------ a look inside

    def counts(self) -> protocol.Counts:
        """Sizes, for debug information."""
        with self._lock:
            return self._machine.counts()

    def pending_values(self) -> int:
        """How many values of this node are still being made."""
        return self._values.pending()

    def snapshot(self) -> tuple[protocol.Snapshot, dict[RefId, tuple[str, str]]]:
        """Who holds what as known here, and what each value of this node is, and where it was created."""
        with self._lock:
            snapshot = self._machine.snapshot()
            return snapshot, self._values.describe()


def _nothing(fork: Fork) -> None:
    """The release of a fork that is not held."""


def _origin() -> str:
    """Where in the program, outside of farcall, this was called."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("farcall."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def call_remote(
    node: Node,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float,
) -> RRef[Any]:
    """Call ``func`` on ``to``, which owns the result; returns at once. Errors of the arguments are raised here."""
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s)
    return node.part(NodeReferences).create(peer, func, encode_request(peer, func, args, kwargs), timeout_s)
