"""One worker's part in one backward pass: joins protocol, engine and messages.

Threads: the readers of messages, the I/O thread when a peer is lost, and a thread that releases the context put
events into the pass's ``inbox``, and touch nothing else. One thread at a time, the holder of the ``working`` lock,
takes events out, runs the ready part of the graph and sends the results, one bundle for each worker. A part owns no
thread: at the origin the caller of `backward` holds the lock from beginning to end; elsewhere the thread that filled
the inbox claims the lock, and the `Port` lends a thread to `run`. An abort thus waits for the engine call that is
under way, which torch would not stop anyway; in return nothing but the inbox is shared.

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
    """The answer of a receive to its send; empty where the pass did not reach any tensor of the message."""

    context_id: int
    pass_id: PassId
    message_id: int
    gradients: Reached


Message = Gradient | protocol.Message
Event = tuple[Gradient | PartFailed | WorkerLost | protocol.PassMessage, int]
"""An event for a pass, and the worker that it came from."""


class Port(Protocol):
    """The runtime, as a node's contexts see it."""

    @property
    def worker_id(self) -> int:
        """The number of this worker."""

    @property
    def origin(self) -> int:
        """The first bits of the ids of this worker's contexts."""

    def send(self, worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        """Deliver ``messages`` together to that worker's `Contexts.deliver`.

        With ``awaited`` the calling thread has nothing else to do than to read the link, if that helps, until the
        inbox of ``awaited`` has something.
        """

    def send_later(self, worker_id: int, message: Message) -> None:
        """Deliver ``message`` with the next ones to that worker, or soon; never raises."""

    def submit(self, local: LocalPass) -> None:
        """Call ``local.run`` soon, within ``local.profile``, on a thread for user functions."""

    def wait(self, local: LocalPass) -> Event | None:
        """Flush ``local`` and wait for an event in its inbox; None: its deadline has passed."""

    def knows(self, peer: Any) -> bool:
        """Whether ``peer`` is a peer of this worker, and not of another one in this process."""

    def workers(self) -> frozenset[int]:
        """All workers of the cluster that are known to this one."""

    def info(self, worker_id: int) -> WorkerInfo | None:
        """The name and rank of a worker, also of one that is gone."""

    def now(self) -> float:
        """Seconds, of any monotonic clock."""

    def pass_ended(self) -> None:
        """A call of `backward` is over: a shutdown may be waiting for that."""

    def profile_call(self, worker_id: int, run: RunProfile | None) -> CallProfile | None:
        """A worker is to be told to join, by the profiled thread or on behalf of ``run``."""

    def profile_run(self, wanted: ProfileWanted | None) -> RunProfile | None:
        """This worker's part is to be profiled, as ``wanted`` by the worker that told it to join."""


class LocalPass:
    """One worker's part in one pass. Made under its context's lock, which makes the snapshot of the graph one.

    Mutable: ``inbox`` for all threads; for the holder of ``working``, the graph (None once this part is over), the
    outbox, and ``failure``, of which only the origin's is seen by a program.
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
        # Sends and receives are fixed here: a receive recorded later answers by itself (`Context.record_receive`).
        sends: dict[int, Sequence[Edge]] = {}
        for message_id, send in context.sends.items():
            sends[message_id] = send.next_functions
        self._graph: LocalGraph | None = LocalGraph(
            Roots() if roots is None else roots,
            sends,
            context.receives.values(),
            begin.retain_graph,
        )
        # At the origin the profiler, if there is one, is that of the thread that called `backward`.
        self.profile: RunProfile | None = None
        """If there is one, it runs `run`."""
        if roots is None and (profile is not None or PROFILING.everywhere):
            self.profile = port.profile_run(profile)
        self._profiled_calls: dict[int, CallProfile] = {}
        effects = machine.handle(begin, 0.0)
        if effects:
            self._apply(effects)  # the peers are told with the first bundle

    @property
    def arrived(self) -> bool:
        """Whether the inbox has something: a thread that reads a link for this pass may stop."""
        return not self.inbox.empty()

    def post(self, event: Gradient | PartFailed | WorkerLost | protocol.PassMessage) -> None:
        """Have ``event`` handled soon, on the thread that works on this pass. From any thread."""
        self.inbox.put((event, -1))
        if self.working.acquire(False):
            self._port.submit(self)

    def answer_late(self, message_id: int, worker_id: int) -> None:
        """Send "none" for a receive that was recorded after this worker joined: it cannot lead to the loss."""
        machine = self.machine
        # Also after this part is done: the sender may still be waiting. At the origin, no part is left by then.
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
            # Ctrl-C ended the wait. The other workers must not wait for this one: another thread tells them.
            self.working.release()
            self.post(PartFailed("the call of backward was interrupted"))
            raise

    def run(self) -> None:
        """Elsewhere, as the holder of ``working``: handle the inbox, and release the lock."""
        while True:
            self._handle(None)
            self.flush()
            self.working.release()
            # An event put into the inbox before the line above found the lock taken, so it must be seen here.
            if self.inbox.empty() or not self.working.acquire(False):
                return

    def _handle(self, event: Event | None) -> None:
        """Handle ``event``, if any, and the inbox; run the ready part; leave messages in the outbox."""
        try:
            while event is not None or not self.inbox.empty():
                message, sender = self.inbox.get() if event is None else event
                event = None
                if isinstance(message, Gradient):
                    if self._graph is not None:
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
            self._apply(self.machine.handle(PartFailed(str(error) or type(error).__name__), 0.0))
            if self.failure is not None:
                self.failure.__cause__ = error

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
        """``message``, which asks for or carries the record of this pass, if there is one."""
        if isinstance(message, StartPass):
            # Elsewhere than at the origin the thread may be profiled for another reason than this pass.
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
        """As the holder of ``working``: send the outbox. ``awaited``, only with one other peer: see `Port.send`."""
        outbox, self._outbox = self._outbox, {}
        own = outbox.pop(self.machine.me, None)
        if own is not None:
            self._port.send(self.machine.me, own)  # first: it may set off the very part that is awaited
        for worker_id, messages in outbox.items():
            try:
                self._port.send(worker_id, messages, awaited)
            except RpcError as error:
                self.inbox.put((WorkerLost(worker_id, str(error)), worker_id))


def _leave_mark(name: str) -> None:
    """Show a profiler that a send was given its gradient, or a receive sent one: neither takes time of its own."""
    with record_function(name):
        pass
