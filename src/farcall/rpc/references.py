"""The references of one node: the reference machine, its lock, and the effects it asks for.

Owns the lock around the machine and around the values of this node (`owned_values.py`), and which messages wait in the
core: those that bring a reference whose owner this node does not know yet. Such an owner has only just joined; another
member will announce it. Calls of one serial object keep the order in which their caller sent them, so they wait behind
such a message, too. Does not decide when a value may be freed: `protocol/references` does.
Everything else in `rpc/` reaches the machine through this file.

Thread rules
- The lock is held for microseconds, also while a control message is queued. So the message that registers a fork
  leaves before everything that the holder of the fork sends later. The lock is re-entrant: a garbage collection under
  it may run user code. A thread may take the lock of a link inside this one, never the other way round.
- Ctrl-C comes through under the lock as little as anywhere: a step cut in two would leave a fork that nobody releases.
- Destructors call ``released.append``, which takes no lock. The I/O thread collects the forks a moment later.
- A value dies outside the lock, and on a worker thread if its destructor may be user code.

Over 400 lines, because everything here changes under the one lock.
"""

from __future__ import annotations

import copy
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic, sleep
from typing import Any, get_args

from farcall.core.contract import CoreError
from farcall.errors import NetworkError, ReferenceLost, RpcError, RpcTimeout
from farcall.ids import ForkId, RefId, WorkerInfo
from farcall.protocol.frames import Frame
from farcall.protocol.notes import KEEP, REFUSED, Notes
from farcall.protocol.references import messages as protocol
from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import Fork, FreeValue, Lost, NeverCreated, Send
from farcall.protocol.references.user import ReleasedForks
from farcall.rpc.call import encode_request
from farcall.rpc.owned_values import KeptRequest, Owned, OwnedValues, dispose
from farcall.rpc.owner_calls import Creation
from farcall.rpc.reference_shutdown import ReferenceShutdown
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.serving import Server
from farcall.runtime.calls.turns import Turns
from farcall.runtime.io import sigint
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import encode_failure, withdraw
from farcall.serialize.allowance import INSTALLED, refuse_references

LINGER_S = 0.005
GAP_BITS = 36
"""Random gaps leave room for 2**28 references of one member; one guess in 2**35 hits."""
CONFIRM_S = 0.002
"""How long the answer to a creating call, for which no thread waits, is held back to travel with other messages."""
RETRY_S = 0.01
UNKNOWN_OWNER_S = 5.0
"""How long messages wait for the announcement of a member that owns a reference in them."""
_MESSAGES = frozenset(get_args(protocol.Message)) - {protocol.Farewell}


class NodeReferences:
    """The references of one node, ``node.part(NodeReferences)``.

    Mutable, under the lock: the machine, the values, and the tables of members and messages. Members are identified by
    the machine's number for them: see ``Peer.number``.
    """

    def __init__(self, node: Runtime) -> None:
        self.node = node
        self.traced = False
        """Record the line of the program that creates each reference?"""
        if node.is_static and node.me.number == node.info.id:  # otherwise `_on_peer_joined` brings each member
            self._workers = {member.rank: WorkerInfo(member.name, member.rank) for member in node.membership.members}
        else:
            self._workers = {node.me.number: node.info}
        self._lock = sigint.WholeLock()
        self._timer = node.timer(self._on_timer)
        self._machine = References(
            node.me.number,
            self._workers,
            linger_s=LINGER_S,
            wake=lambda: self._timer.at(monotonic() + LINGER_S),
            # With an allowance, members trust each other less: gaps make the numbers of references hard to guess, so
            # only receivers of a reference can use it.
            gap=None if INSTALLED.allowance is None else partial(secrets.randbits, GAP_BITS),
        )
        self.released: ReleasedForks = self._machine.released
        self._values = OwnedValues(node.info)
        self.in_use: dict[int, ForkId] = {}
        """Forks that `drop_all` does not give up, by users that destructors remove. Changed without the lock."""
        self.places: dict[RefId, Owned] = self._values.places
        """The values of this node; any thread may look one up without the lock."""
        self._lost: set[int] = set()
        self._failed: list[Creation] = []  # creations whose attached calls must fail once they are sent
        self._awaited: dict[int, float] = {}  # unknown owners, and until when messages wait for word of each
        self._deferring: set[Peer] = set()  # those of whom messages wait
        # The calls of serial objects of which one waits, by caller and object, in their order.
        self._rows: dict[tuple[Peer, RefId], list[int]] = {}
        self._unsent: list[Send] = []  # messages to members whose link is not connected yet
        self._unflushed: set[Peer] = set()  # peers with held-back answers to creating calls
        self.shutdown: ReferenceShutdown = ReferenceShutdown(self)
        node.server.references = self
        for kind in _MESSAGES:
            # A Register is handled in order, before everything behind it on its link: a use of the fork may be next.
            node.hooks.on_control(kind, self._on_control)
        node.hooks.peer_joined.append(self._on_peer_joined)
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(self._values.end)

    # ------------------------------------------------------------------ references are made

    def own(self, rref: RRef[Any], value: Any) -> None:
        """Make ``rref`` a reference to a value of this node."""
        origin = _origin() if self.traced else ""
        owned = Owned(origin)
        owned.resolve(value, self.node.device_list)
        with self._lock:
            fork = self._machine.own_local()
            self.places[fork.ref] = owned
            rref._bind(self, fork, owned, None, origin)

    def create(
        self,
        peer: Peer,
        what: Callable[..., Any],
        frame: Frame,
        timeout_s: float,
        keeps: RRef[Any] | None = None,
        make: Callable[..., Creation] = Creation,
        *,
        serial: bool = False,
    ) -> RRef[Any]:
        """Have ``peer`` run the function of the request ``frame`` and own its result.

        ``keeps``: the function is a method of that reference's value. ``serial``: calls of the result's methods run
        one at a time.
        """
        if not INSTALLED.takes_pickles:
            refuse_references()
        profile = None
        if is_profiled() or PROFILING.everywhere:
            profile = PROFILING.begin_call(self.node, peer, "remote", what, None)
        origin = _origin() if self.traced else ""
        sigint.enter()  # Ctrl-C comes through only while this thread waits: else nobody would release the fork
        try:
            owned: Owned | None = None
            with self._lock:
                fork = self._machine.create(peer.number)
                if fork.owner == self._machine.me:
                    owned = self.places[fork.ref] = Owned(origin)
            creation = make(self, fork, peer, what, timeout_s, keeps)
            rref: RRef[Any] = RRef.__new__(RRef)
            rref._bind(self, fork, owned, creation, origin)
            rref._serial = serial
            try:
                creation.profile = profile
                if keeps is not None and keeps._creation is not None:
                    keeps._creation.attach(creation, frame)  # if that creation fails, no object exists to call
                frame.flags = KEEP
                self.node.calls.send(creation, frame, fork, origin)
            except BaseException as error:
                if not isinstance(error, NetworkError | RpcTimeout):
                    if profile is not None:
                        profile.ended()
                    self.withdraw_creation(fork)
                    raise
                creation.on_failure(error)  # surfaces at first use, like every failure of a link
                if owned is not None:
                    self._values.never_comes(fork.ref, owned)  # the request was for this node: no peer reports its loss
            return rref
        finally:
            sigint.leave()

    def confirm_created(self, fork: Fork) -> None:
        """The owner has answered the creating call."""
        with self._lock:
            effects = self._machine.handle(protocol.CreationAnswered(fork), monotonic())
            deadline = self._machine.next_deadline()
            if not effects and (deadline is None or deadline >= self._timer.due):
                return  # nothing to do, and the timer is set early enough for lingering messages
            freed = self._carry_out(effects)
        dispose(self.node, freed)

    def withdraw_creation(self, fork: Fork) -> None:
        """The creating call was not sent, or its answer did not come."""
        self._tell(protocol.CreationWithdrawn(fork))

    def refused_creation(self, fork: Fork, error: RpcError) -> None:
        """The owner has refused the creating call; it never had the reference."""
        self.withdraw_creation(fork)
        if fork.owner == self.node.me.number:
            owned = self.places.get(fork.ref)
            if owned is not None:
                owned.fail(encode_failure(error, self.node.info))  # the request was for this node, as in `create`

    # ------------------------------------------------------------------ references travel

    def fork(self, rref: RRef[Any], peer: Peer) -> Fork:
        """Make a fork of ``rref``, to be sent to ``peer``."""
        creation = rref._creation
        if creation is not None and creation.error is not None:
            raise copy.copy(creation.error)
        if not self.node.is_peer(peer):
            ended = self.node.why_ended
            if ended is not None:
                raise ended  # it may have joined again since: then the peer is its successor's
            raise RpcError(f"{rref!r} belongs to another node of this process than the one that sends it")
        with self._lock:
            try:
                return self._machine.fork(rref._fork, peer.number)
            except LookupError as error:
                raise ReferenceLost(f"{rref!r} cannot be sent: {error}") from None

    def withdraw(self, fork: Fork) -> None:
        """The message with ``fork`` was not sent, or may not have been."""
        self._tell(protocol.ForkWithdrawn(fork))

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        """Account for the forks of an arrived message, in the order of its link.

        They become references in ``frame.forks``; references that decoding does not take out die with the frame.
        False: the message must not be handled.
        """
        if not INSTALLED.takes_pickles:
            refuse_references()
        machine = self._machine
        arrived: list[Any] = []
        if notes.created is not None and notes.created.holder != peer.number:
            raise ValueError("the message is malformed: it creates a value in the name of another")
        with self._lock:
            created = notes.created
            if created is not None:
                self._values.note_creation(created.ref)
                if not frame.flags & REFUSED:
                    if created.owner != created.holder and not machine.own(created):
                        return False  # a duplicate, or its caller is dead
                    owned = self.places.get(created.ref)
                    if owned is None:
                        owned = self.places[created.ref] = Owned()
                    if notes.origin:
                        owned.origin = f"{notes.origin} on {peer.info.name}"
                    arrived.append(owned)
            for fork in notes.forks:
                held = machine.receive(fork, peer.number)
                rref: RRef[Any] = RRef.__new__(RRef)
                rref._bind(self, fork, self._owned_of(fork, held), None, "")
                if not held:
                    rref._release = _release_nothing
                arrived.append(rref)
            # Only forks leave pending effects in the machine; ``machine.own`` has none.
            news = notes.forks and machine.has_news
            freed = self._carry_out(machine.handle_deadline(monotonic())) if news else []
        if freed:
            dispose(self.node, freed)
        frame.forks = arrived
        return True

    def take_turns(self, peer: Peer, frame: Frame, ref: RefId) -> None:
        """Give ``frame``, a request, the mailbox of the serial object ``ref``, in the order of its link."""
        if not INSTALLED.takes_pickles:
            refuse_references()
        frame.serial = ref
        with self._lock:
            try:
                owned = self.find(ref, peer.number)
            except ReferenceLost:
                return  # the request itself fails with this error when it runs
            is_new = owned.turns is None
            turns = owned.turns = owned.turns or Turns(self.node.server.submit)
        if is_new:
            owned.when_ready(turns.begin)
        frame.turns = turns

    def defers(self, peer: Peer, number: int, notes: Notes, defer: Callable[[], None]) -> bool:
        """Must a message wait, the call ``number`` if it is one? If so, ``defer`` it: `_recall` has it come again."""
        with self._lock:  # so `_recall` finds it deferred, or it finds the owner
            unknown = {fork.owner for fork in notes.forks} - self._workers.keys()
            row = None if notes.serial is None else self._rows.get((peer, notes.serial))
            if unknown:
                due = monotonic() + UNKNOWN_OWNER_S
                self._timer.at(min(self._awaited.setdefault(owner, due) for owner in unknown))
            elif not row:
                return False
            elif row[0] == number:
                del row[0]
                if not row:
                    del self._rows[peer, notes.serial]  # type: ignore[arg-type]
                else:
                    self._recall(peer)  # the next one may wait for this one only
                return False
            if notes.serial is not None and number not in (row or ()):
                self._rows.setdefault((peer, notes.serial), []).append(number)
            self._deferring.add(peer)
            defer()
        return True

    def _recall(self, peer: Peer) -> None:
        """Under the lock: have the messages of ``peer`` that wait come again."""
        try:
            self.node.resources.core.recall(peer.back)
        except CoreError:
            pass  # the node has ended

    def _recall_all(self) -> None:
        """Under the lock: an owner is known now, or given up."""
        deferring, self._deferring = self._deferring, set()
        for peer in deferring:
            self._recall(peer)

    def kept_request(self, server: Server, peer: Peer, frame: Frame) -> KeptRequest:
        """Make the request of a frame with the flag KEEP. `take_forks` has put the value's place before the forks."""
        owned, *frame.forks = frame.forks or (None,)
        if not isinstance(owned, Owned):
            raise ValueError("the message is malformed: it asks to keep a value, and names no place for it")
        return KeptRequest(server, peer, frame, owned, self._flush_soon)

    def _flush_soon(self, peer: Peer) -> None:
        self._unflushed.add(peer)
        when = monotonic() + CONFIRM_S
        if when < self._timer.due:  # in a burst of creations the timer is set already
            self._timer.at(when)

    def _owned_of(self, fork: Fork, held: bool) -> Owned | None:
        """Return the place of a value of this node, whose creating call may still come. The caller holds the lock."""
        if fork.owner != self._machine.me:
            return None
        if held:
            return self._values.place(fork.ref)
        owned = self.places.get(fork.ref)
        if owned is None:
            owned = Owned()  # not in the table: the sender is dead, and no Release would ever free the place
            self._values.never_comes(fork.ref, owned)
        return owned

    def _give_up_unknown(self, now: float) -> None:
        """On the I/O thread: owners that nobody announced in time count as known from now on, and as gone."""
        with self._lock:
            unheard = [member for member, due in self._awaited.items() if due <= now]
            for member in unheard:
                del self._awaited[member]
                self._workers[member] = WorkerInfo(f"member-{member}", -1)
                self._lost.add(member)
            if unheard:
                self._recall_all()

    # ------------------------------------------------------------------ references are used

    def find(self, ref: RefId, asker: int) -> Owned:
        """Return the value that ``asker`` asks for, or its pending place if its creating call may still come."""
        with self._lock:
            owned = self.places.get(ref)
            if owned is None or not owned.ready:
                # A question may overtake the creating call. No link reorders messages, but injected faults do.
                creator = ref.created_on
                may_come = creator != self._machine.me and creator not in self._lost and self._values.may_come(ref)
                if owned is None and not may_come and not self._machine.lists(ref):
                    raise ReferenceLost(
                        f"{self.node.info.name} has no value {ref.created_on}:{ref.local_id}: its last "
                        "reference was dropped, or a shutdown dropped all"
                    )
                if may_come:
                    self._values.await_creation(ref, asker)
                owned = self._values.place(ref)
        return owned

    def peer(self, rref: RRef[Any]) -> Peer:
        """Return the owner of a reference's value; raise if the owner is gone, or if this node has ended."""
        member = rref._fork.owner
        peer = self.node.numbered(member)
        if peer is None or member in self._lost:
            if not self.node.running:
                self.node.peer(self.node.info)  # raises
            what = "the value" if rref._type is None else f"the value, of type {rref._type.__qualname__},"
            raise ReferenceLost(
                f"{what} was on {self.worker(member).name}, which is gone: create it again (docs/restart.md)"
            )
        return peer

    def worker(self, member: int) -> WorkerInfo:
        """Return the name and rank of a member, alive or gone."""
        return self._workers.get(member) or WorkerInfo(f"member-{member}", -1)

    def confirmed(self, fork: Fork) -> bool:
        """Does the owner know of ``fork``?"""
        with self._lock:
            return self._machine.confirmed_by_owner(fork)

    def is_lost(self, fork: Fork) -> bool:
        """Is the owner of ``fork``'s value gone?"""
        return fork.owner in self._lost

    # ------------------------------------------------------------------ timers, messages, members

    def _on_timer(self, now: float) -> float:
        """On the I/O thread: send lingering messages, and retry the work that could not be done earlier."""
        while self._unflushed:
            self._unflushed.pop().flush()
        if self._failed:
            failed, self._failed = self._failed, []
            for creation in failed:
                creation.fail_waiting()
        if self._awaited:
            self._give_up_unknown(now)
        if self.released or self._unsent or self._machine.next_deadline() is not None:
            with self._lock:
                unsent, self._unsent = self._unsent, []
                for effect in unsent:
                    self._send(effect)
                freed = self._carry_out(self._machine.handle_deadline(now))
            dispose(self.node, freed)
        due = min(list(self._awaited.values()), default=NEVER)
        if self._failed or self._unsent:
            due = min(due, now + RETRY_S)
        lingering = self._machine.next_deadline()
        return due if lingering is None else min(due, lingering)

    def fail_waiting_soon(self, creation: Creation) -> None:
        """Have a failed creation look again, in RETRY_S, at the calls that were about to be sent behind it."""
        self._failed.append(creation)
        self._timer.at(monotonic() + RETRY_S)

    def _on_control(self, peer: RemotePeer, message: protocol.Message) -> None:
        if not INSTALLED.takes_pickles:
            refuse_references()
        self._tell(protocol.Received(peer.number, message))
        if self.shutdown.checks_leaks:
            self.node.something_ended()

    def _on_peer_joined(self, peer: Peer) -> None:
        with self._lock:
            self._workers[peer.number] = peer.info
            self._lost.discard(peer.number)  # it may have been given up before this late announcement
            if self._awaited.pop(peer.number, None) is not None:
                self._recall_all()
            freed = self._carry_out(self._machine.handle(protocol.MemberJoined(peer.number), monotonic()))
        dispose(self.node, freed)

    def _on_peer_gone(self, peer: Peer) -> None:
        member = peer.number
        with self._lock:
            self._lost.add(member)
            self.shutdown.on_peer_gone()
            if self.shutdown.agreed:
                return  # all members leave anyway: do not ask the others about the references of the dead
            freed = self._carry_out(self._machine.handle(protocol.MemberDied(member), monotonic()))
            freed += self._values.abandon(member, self._machine.lists)
        dispose(self.node, freed)

    def _tell(self, event: protocol.Event) -> None:
        """Hand an event to the machine and carry out its effects."""
        with self._lock:
            freed = self._carry_out(self._machine.handle(event, monotonic()))
        dispose(self.node, freed)

    def _carry_out(self, effects: Iterable[protocol.Effect]) -> list[Owned]:
        """Carry out effects; return the values to `dispose` of. The caller holds the lock."""
        freed: list[Owned] = []
        for effect in effects:
            if effect.__class__ is FreeValue:
                owned = self._values.take(effect.ref)
                if owned is not None:
                    freed.append(owned)
            elif effect.__class__ is Send:
                self._send(effect)
            elif effect.__class__ is NeverCreated:
                owned = self._values.place(effect.ref)
                self._values.note_creation(effect.ref)  # a question that comes after the place is freed must not wait
                self._values.never_comes(effect.ref, owned)
            elif effect.__class__ is Lost:
                self._lost.add(effect.fork.owner)
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline < self._timer.due:
            self._timer.at(deadline)
        return freed

    def _send(self, effect: Send) -> None:
        peer = self.node.other(effect.member)
        if peer is not None:
            peer.control(effect.message)
        elif effect.member not in self._lost:
            # This node is still starting: a fork came over one link, and the link to its owner is not connected yet.
            self._unsent.append(effect)
            self._timer.at(monotonic() + RETRY_S)

    # ------------------------------------------------------------------ the end, and a look inside

    def drop_all(self, timeout_s: float) -> None:
        """Give up all references here but those in use, once forks in transit have settled or ``timeout_s`` is over."""
        deadline = monotonic() + timeout_s
        with self.node.calls.waiting():
            while self._machine.unsettled and monotonic() < deadline:
                with self._lock:
                    freed = self._carry_out(self._machine.handle_deadline(NEVER))
                dispose(self.node, freed)
                sleep(0.002)
        self._tell(protocol.AllDropped(frozenset(list(self.in_use.values()))))

    @property
    def unsettled(self) -> int:
        """The number of forks that wait for a message of another member before they can be released."""
        return self._machine.unsettled

    def others(self) -> list[int]:
        """Return the numbers of the other members that are not gone."""
        me = self._machine.me
        return [member for member in list(self._workers) if member != me and member not in self._lost]

    def counts(self) -> protocol.Counts:
        """Count the references, for debug information."""
        with self._lock:
            return self._machine.counts()

    def pending_values(self) -> int:
        """Count the values of this node that are still being made."""
        return sum(not owned.ready for owned in list(self.places.values()))

    def snapshot(self) -> tuple[protocol.Snapshot, dict[RefId, tuple[str, str]]]:
        """Return the machine's snapshot, and the description and the origin of each value of this node."""
        with self._lock:
            described = {ref: (owned.describe(), owned.origin) for ref, owned in self.places.items()}
            return self._machine.snapshot(), described


def _release_nothing(fork: Fork) -> None:
    """Stand in for ``released.append`` in a reference whose fork the machine does not hold."""


def _origin() -> str:
    """Return the line of the program, outside of farcall, that made the current call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("farcall."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def call_remote(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float | None,
    *,
    serial: bool = False,
) -> RRef[Any]:
    """Call ``func`` on ``to``, which owns the result; return a reference at once. Errors in arguments raise here."""
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    frame = encode_request(peer, func, args, kwargs)
    try:
        return node.part(NodeReferences).create(peer, func, frame, timeout_s, serial=serial)
    except BaseException:
        withdraw(frame)  # Ctrl-C may come before `create` can do so
        raise
