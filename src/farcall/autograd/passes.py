"""One worker's part in one backward pass: joins protocol, engine and messages.

Threads: the readers of messages, the I/O thread when a peer is lost, and a thread that releases the context put
events into the pass's ``inbox``, and touch nothing else. One thread at a time, the holder of the ``working`` lock,
takes events out, runs the ready part of the graph and sends the results, one bundle for each worker. A part owns no
thread: at the origin the caller of `backward` holds the lock from beginning to end; elsewhere the thread that filled
the inbox claims the lock, and the `Port` provides a thread for `run`. So an abort waits for the engine call under way,
which torch cannot stop anyway; in return, threads share nothing but the inbox.

Leaf gradients reach the context only when the part is finished, so a failed pass leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch.autograd.profiler import record_function

from farcall.autograd.engine import LocalGraph
from farcall.autograd.functions import RECEIVE_NAME, SEND_NAME, Edge, Reached
from farcall.autograd.leaves import call_end_hooks, in_own_memory
from farcall.autograd.nodes import Roots
from farcall.autograd.replicas import REPLICAS, reduce_gradients
from farcall.errors import PeerDead, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol import gradients as protocol
from farcall.protocol.gradients import (
    BackwardPass,
    Begin,
    Failed,
    PartFailed,
    PartFinished,
    PassDone,
    PassId,
    Received,
    StartPass,
    Tell,
    WorkerLost,
)
from farcall.protocol.notes import ProfileWanted
from farcall.runtime.observing.profiling import PROFILING, CallProfile, RunProfile, is_profiled

if TYPE_CHECKING:
    from farcall.autograd.context import Context


class Gradient(msgspec.Struct, frozen=True):
    """The answer of a receive to its send; empty if the pass reached no tensor of the message."""

    context_id: int
    pass_id: PassId
    message_id: int
    gradients: Reached


Message = Gradient | protocol.Message
Event = tuple[Gradient | PartFailed | WorkerLost | protocol.PassMessage, int]
"""An event for a pass, and the worker that it came from."""


class Port(Protocol):
    """The interface of a node's contexts to the runtime."""

    @property
    def worker_id(self) -> int:
        """The number of this worker."""

    @property
    def origin(self) -> int:
        """The leading bits of the ids of this worker's contexts."""

    def send(self, worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        """Deliver ``messages`` together to that worker's `Contexts.deliver`.

        With ``awaited`` the calling thread may read the link until the inbox of ``awaited`` has an event: it has
        nothing else to do.
        """

    def send_later(self, worker_id: int, message: Message) -> None:
        """Deliver ``message`` together with the next ones to that worker, or soon; never raises."""

    def submit(self, local: LocalPass) -> None:
        """Call ``local.run`` soon, within ``local.profile``, on a thread for user functions."""

    def wait(self, local: LocalPass) -> Event | None:
        """Flush ``local`` and wait for an event in its inbox; None: its deadline has passed."""

    def knows(self, peer: Any) -> bool:
        """Is ``peer`` a peer of this worker, and not of another one in this process?"""

    def workers(self) -> frozenset[int]:
        """Return all workers of the cluster that this one knows."""

    def info(self, worker_id: int) -> WorkerInfo | None:
        """Return the name and rank of a worker, also of one that is gone."""

    def now(self) -> float:
        """Return the time of any monotonic clock, in seconds."""

    def pass_ended(self) -> None:
        """Announce that a call of `backward` is over: a shutdown may be waiting for it."""

    def profile_call(self, worker_id: int, run: RunProfile | None) -> CallProfile | None:
        """Begin the profile of a StartPass to a worker, for the profiled thread or on behalf of ``run``."""

    def profile_run(self, wanted: ProfileWanted | None) -> RunProfile | None:
        """Begin the profile of this worker's part, as ``wanted`` by the worker that sent its StartPass."""


class LocalPass:
    """One worker's part in one pass. Made under its context's lock, so the snapshot of the graph is consistent.

    Mutable: ``inbox``, by all threads; by the holder of ``working``, the graph (None once this part is over), the
    outbox, and ``failure``, which a program sees at the origin only.
    """

    __slots__ = (
        "_context",
        "_graph",
        "_outbox",
        "_port",
        "_profiled_calls",
        "failure",
        "inbox",
        "machine",
        "profile",
        "working",
    )

    def __init__(
        self,
        context: Context,
        machine: BackwardPass,
        begin: Begin,
        *,
        roots: dict[Edge, torch.Tensor] | None = None,
        profile: ProfileWanted | None = None,
    ) -> None:
        """``roots`` only at the origin."""
        self._context = context
        self._port = port = context.contexts.port
        self.machine: BackwardPass = machine
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.working: threading.Lock = threading.Lock()
        self.working.acquire()
        self.failure: RpcError | None = None
        self._outbox: dict[int, list[Message]] = {}
        for sender, message_id in context.declined:
            self._outbox.setdefault(sender, []).append(Gradient(context.id, machine.pass_id, message_id, {}))
        # The snapshot of sends and receives: a receive recorded later answers by itself (`Context.record_receive`).
        sends: dict[int, Sequence[Edge]] = {}
        for message_id, send in context.sends.items():
            sends[message_id] = send.next_functions
        self._graph: LocalGraph | None = LocalGraph(
            Roots() if roots is None else roots,
            sends,
            context.receives.values(),
            begin.retain_graph,
        )
        # The origin needs no profile of its own: the thread that called `backward` may be profiled already.
        self.profile: RunProfile | None = None
        """The profile within which the port calls `run`, if this part is profiled."""
        if roots is None and (profile is not None or PROFILING.everywhere):
            self.profile = port.profile_run(profile)
        self._profiled_calls: dict[int, CallProfile] = {}
        effects = machine.handle(begin, 0.0)
        if effects:
            self._apply(effects)  # only into the outbox: the first bundle carries these messages

    @property
    def arrived(self) -> bool:
        """Has the inbox an event? Then a thread that reads a link for this pass may stop."""
        return not self.inbox.empty()

    def post(self, event: Gradient | PartFailed | WorkerLost | protocol.PassMessage) -> None:
        """Have the thread that works on this pass handle ``event`` soon. From any thread."""
        self.inbox.put((event, -1))
        if self.working.acquire(False):
            self._port.submit(self)

    def answer_late(self, message_id: int, worker_id: int) -> None:
        """Answer "none" for a receive that was recorded after this worker joined: it cannot lead to the loss."""
        machine = self.machine
        # Also after this part is done: the sender may still wait. Once the origin is done, no part is left that waits.
        if machine.state is protocol.PassState.FAILED or (machine.parent is None and machine.ended):
            return
        try:
            self._port.send(worker_id, [Gradient(machine.context_id, machine.pass_id, message_id, {})])
        except RpcError as error:
            self.post(WorkerLost(worker_id, str(error)))

    def run_to_end(self) -> None:
        """At the origin: work until the pass is over."""
        try:
            self._handle(None)
            while not self.machine.ended:
                event = self._port.wait(self)
                if event is None:
                    self._apply(self.machine.handle_deadline(self._port.now()), RpcTimeout)
                self._handle(event)
            if self._outbox:
                self.flush()
        except BaseException:
            # Ctrl-C ended the wait. The other workers must not wait for this one: another thread sends the abort.
            self.working.release()
            self.post(PartFailed("the call of backward was interrupted"))
            raise

    def run(self) -> None:
        """Elsewhere, as the holder of ``working``: handle the inbox, and release the lock."""
        has_failed = False
        while True:
            self._handle(None)
            try:
                self.flush()
            except BaseException as error:
                # There is no memory for a message, perhaps. Its receiver would wait for it, so the pass fails.
                if not has_failed:
                    has_failed = True
                    self.inbox.put((PartFailed(_reason(error)), -1))
                    continue
                self.working.release()  # for what may still come: the origin's abort, or that it is lost
                raise
            self.working.release()
            # Race: an event that came before the release found the lock taken, so nobody claimed it. Look again.
            if self.inbox.empty() or not self.working.acquire(False):
                return

    def _handle(self, event: Event | None) -> None:
        """Handle ``event``, if any, and the inbox; run the ready part; leave messages in the outbox."""
        try:
            while event is not None or not self.inbox.empty():
                message, sender = self.inbox.get() if event is None else event
                event = None
                if isinstance(message, Gradient):
                    if self._graph is not None and self._is_answer(message, sender):
                        self._graph.hear(message.message_id, message.gradients)
                        if message.gradients and is_profiled():
                            _leave_mark(SEND_NAME)
                    continue
                if type(message) is PassDone and sender in self._profiled_calls:
                    self._profiled_calls.pop(sender).ended(message.profiled)
                told = message if isinstance(message, PartFailed | WorkerLost) else Received(sender, message)
                effects = self.machine.handle(told, 0.0)
                if effects:
                    self._apply(effects, PeerDead if type(message) is WorkerLost else RpcError)
            graph = self._graph
            if graph is not None:
                for node, gradients in graph.run().items():
                    if gradients:
                        gradients = call_end_hooks(node, gradients)
                        if is_profiled():
                            _leave_mark(RECEIVE_NAME)
                    answer = Gradient(self.machine.context_id, self.machine.pass_id, node.message_id, gradients)
                    self._outbox.setdefault(node.from_worker, []).append(answer)
                if not graph.unheard:
                    self._graph = None
                    self._finish(graph)
        except BaseException as error:
            self._graph = None
            self._apply(self.machine.handle(PartFailed(_reason(error)), 0.0))
            if self.failure is not None:
                self.failure.__cause__ = error
            if self.machine.parent is None and not isinstance(error, Exception):
                raise  # Ctrl-C, at the origin: `run_to_end` has another thread tell the others

    def _is_answer(self, message: Gradient, sender: int) -> bool:
        """Does the gradient come from this worker itself (-1), or from the one that got the tensors?"""
        send = self._context.sends.get(message.message_id)
        return sender == -1 or (send is not None and send.to_worker == sender)

    def _finish(self, graph: LocalGraph) -> None:
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for node, gradient in graph.leaves.items():
            hooked = call_end_hooks(node, {0: gradient})[0]
            if hooked is not None:
                gradients[node.variable] = hooked
        if gradients:
            if REPLICAS:
                gradients = reduce_gradients(gradients)
            self._context.accumulate(in_own_memory(gradients))
        self._apply(self.machine.handle(PartFinished(), 0.0))

    def _apply(self, effects: Sequence[protocol.Effect], kind: type[RpcError] = RpcError) -> None:
        for effect in effects:
            if type(effect) is Tell:
                message = effect.message
                if self.profile is not None or PROFILING.everywhere or is_profiled():
                    message = self._with_profile(effect.worker, message)
                self._outbox.setdefault(effect.worker, []).append(message)
            elif type(effect) is Failed:
                self._graph = None
                info = self._port.info(effect.worker)
                number, where = effect.worker, ""
                if info is not None:
                    number, where = info.id, "" if info.name in effect.reason else f" (on {info.name})"
                self.failure = kind(f"Error on Node {number}: {effect.reason}{where}")

    def _with_profile(self, worker_id: int, message: protocol.PassMessage) -> protocol.PassMessage:
        """Return ``message`` with the request for a profile of this pass, or with the finished profile."""
        if isinstance(message, StartPass):
            # Except at the origin, the thread may be profiled for another reason than this pass.
            if self.machine.parent is None or self.profile is not None or PROFILING.everywhere:
                call = self._port.profile_call(worker_id, self.profile)
                if call is not None:
                    self._profiled_calls[worker_id] = call
                    return msgspec.structs.replace(message, profile=call.sends(b"", ()))
        elif isinstance(message, PassDone) and self.profile is not None and worker_id == self.machine.parent:
            self.profile.pause()
            return msgspec.structs.replace(message, profiled=self.profile.finish("backward"))
        return message

    def flush(self, awaited: LocalPass | None = None) -> None:
        """As the holder of ``working``: send the outbox. ``awaited``, only with one other peer: see `Port.send`.

        An error that is not farcall's leaves the messages for the workers that come after in the outbox.
        """
        outbox = self._outbox
        own = outbox.pop(self.machine.me, None)
        if own is not None:
            self._port.send(self.machine.me, own)  # first: it may start the very part that is awaited
        for worker_id in list(outbox):
            try:
                self._port.send(worker_id, outbox.pop(worker_id), awaited)
            except RpcError as error:
                self.inbox.put((WorkerLost(worker_id, str(error)), worker_id))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _leave_mark(name: str) -> None:
    """Show a profiler that a send got its gradient, or that a receive sent one: an event without duration."""
    with record_function(name):
        pass
