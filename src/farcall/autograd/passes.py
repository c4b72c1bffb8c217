"""One worker's part in one backward pass: joins protocol, engine and messages.

Messages are put into an inbox by whoever reads them; one thread at a time (`_pump`) takes them out, runs
what became ready, and sends what came of it, all for one worker in one bundle. It owns no thread: the
`Port` lends one, or the caller of `backward` gives its own. Leaf gradients reach the context only when the
part is finished, so a failed pass leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch

from farcall.autograd.engine import Leaves, Phases, add_gradients, run_whole
from farcall.autograd.functions import Edge, Node
from farcall.autograd.marks import RECEIVE_NAME, SEND_NAME, is_profiled, leave_mark
from farcall.autograd.nodes import Gradients, post_hooks
from farcall.autograd.replicas import reduce_gradients
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
    PassState,
    StartPass,
    Tell,
    WorkerLost,
)
from farcall.protocol.notes import ProfileWanted
from farcall.runtime.observing.profiling import PROFILING, CallProfile, RunProfile

if TYPE_CHECKING:
    from farcall.autograd.context import Context

__all__ = ["Gradient", "Letter", "LocalPass", "Port", "Task"]


class Gradient(NamedTuple):
    """What a send hears: a gradient (or None) for each of its tensors, or None for the lot."""

    context_id: int
    pass_id: PassId
    message_id: int
    gradients: Gradients | None


Letter = Gradient | protocol.Message
Task = Callable[[], None]


class Port(Protocol):
    """What a context needs from the runtime."""

    @property
    def origin(self) -> int:
        """What the ids of this worker's contexts begin with."""

    @property
    def worker_id(self) -> int:
        """This worker."""

    def send(self, worker_id: int, letters: Sequence[Letter]) -> None:
        """Deliver ``letters`` together, in order, to that worker's `Contexts.deliver`, without waiting."""

    def submit(self, task: Task) -> None:
        """Run ``task`` soon on a thread for user functions, never on the one that reads messages."""

    def take(self, tasks: SimpleQueue[Task], timeout_s: float | None, workers: frozenset[int]) -> Task:
        """Wait for a task, reading messages meanwhile if that helps; `queue.Empty` when time is up.

        Letters that bring one come, if all goes well, from ``workers``.
        """

    def knows(self, peer: Any) -> bool:
        """Whether ``peer`` is a peer of this worker, and not of another one in this process."""

    def workers(self) -> frozenset[int]:
        """All workers of the cluster that are known to this one."""

    def info(self, worker_id: int) -> WorkerInfo | None:
        """Who that is, or was, for people."""

    def now(self) -> float:
        """Seconds, of any monotonic clock."""

    def pass_ended(self) -> None:
        """A call of `backward` is over: somebody may have waited for that in order to leave."""

    def profile_call(self, worker_id: int, run: RunProfile | None) -> CallProfile | None:
        """A worker is to be told to join, by the profiled thread or on behalf of ``run``."""

    def profile_run(self, wanted: ProfileWanted | None) -> RunProfile | None:
        """This worker's part is to be profiled, as ``wanted`` by whoever told it to join."""


class LocalPass:
    """A pass, at one worker. ``roots`` only at the origin."""

    __slots__ = (
        "_broken",
        "_context",
        "_inbox",
        "_leaves",
        "_lock",
        "_outbox",
        "_phases",
        "_port",
        "_profile",
        "_profiled_calls",
        "_retain_graph",
        "_running",
        "_sends",
        "_unanswered",
        "failure",
        "machine",
        "roots",
        "tasks",
    )

    def __init__(
        self,
        context: Context,
        port: Port,
        machine: BackwardPass,
        roots: dict[Edge, torch.Tensor],
        retain_graph: bool,
        wanted: ProfileWanted | None = None,
    ) -> None:
        self._context = context
        self._port = port
        self.machine: BackwardPass = machine
        self.roots: dict[Edge, torch.Tensor] = roots
        self._retain_graph = retain_graph
        # Taken together under the context's lock: a receive recorded later answers for itself.
        self._sends: dict[int, Sequence[Edge]] = {
            message_id: send.next_functions for message_id, send in context.sends.items()
        }
        self._unanswered: dict[Node, None] = dict.fromkeys(context.receives.values())
        self._outbox: dict[int, list[Letter]] = {}
        for sender, message_id in context.declined:
            self._outbox.setdefault(sender, []).append(Gradient(context.id, machine.pass_id, message_id, None))
        # At the origin the thread that called `backward` is profiled already, if it is.
        self._profile: RunProfile | None = None
        if machine.parent is not None and (wanted is not None or PROFILING.everywhere):
            self._profile = port.profile_run(wanted)
        self._profiled_calls: dict[int, CallProfile] = {}
        self._inbox: list[tuple[int, Gradients | None]] = []
        self._leaves: Leaves = {}
        self._phases: Phases | None = None
        self._lock = threading.Lock()
        self._running = False
        self._broken = False  # this part failed; waiting to be told that the pass is given up
        self.failure: RpcError | None = None
        # At the origin the caller of `backward` runs the tasks itself.
        self.tasks: SimpleQueue[Task] | None = SimpleQueue() if machine.parent is None else None

    # --- from outside -------------------------------------------------------------------------------------

    def begin(self, covered: frozenset[int], over_below: int) -> None:
        """Join: tell the peers (with the first bundle), then run what is ready already."""
        peers = frozenset(self._context.peers)
        with self._lock:
            self._apply(self.machine.handle(Begin(peers, covered, self._retain_graph, over_below)))
            self._running = True

    def hear(self, message_id: int, gradients: Gradients | None) -> None:
        with self._lock:
            self._inbox.append((message_id, gradients))

    def react(self, event: protocol.Event, sender: int = -1) -> None:
        """Feed an event to the protocol and send what it says."""
        if isinstance(event, PassDone) and sender in self._profiled_calls:
            self._profiled_calls.pop(sender).ended(event.profiled)
        with self._lock:
            effects = self.machine.handle(event, self._port.now(), sender)
            self._apply(effects, PeerDead if isinstance(event, WorkerLost) else RpcError)
        self._flush()

    def wake(self) -> None:
        """Have the inbox worked on, unless that is under way."""
        with self._lock:
            if self._running or not self._inbox or self.machine.ended:
                return
            self._running = True
        self.start()

    def start(self) -> None:
        """Hand `_pump` to the thread it belongs to."""
        if self.tasks is not None:
            self.tasks.put(self._pump)
        else:
            profile = self._profile
            self._port.submit(self._pump if profile is None else lambda: profile.run(self._pump))

    def answer_late(self, letter: Gradient, worker_id: int) -> None:
        """Send what a receive recorded after this worker joined has to say: it cannot lead to the loss."""
        if self.machine.state is PassState.FAILED or (self.machine.parent is None and self.machine.ended):
            return
        with self._lock:
            self._outbox.setdefault(worker_id, []).append(letter)
        self._flush()

    def run_here(self) -> None:
        """At the origin: work until the pass is over."""
        assert self.tasks is not None
        self._pump()
        while not self.machine.ended:
            now = self._port.now()
            deadline = self.machine.next_deadline()
            try:
                timeout_s = None if deadline is None else max(0.0, deadline - now)
                self._port.take(self.tasks, timeout_s, self.machine.peers)()
            except Empty:
                with self._lock:
                    self._apply(self.machine.handle_deadline(self._port.now()), RpcTimeout)
                self._flush()
        self.roots = {}

    def give_up(self, reason: str) -> None:
        """At the origin: end the pass now, everywhere."""
        self.react(PartFailed(reason))

    # --- the part itself ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        first = True
        while True:
            with self._lock:
                heard, self._inbox = self._inbox, []
                if (not heard and not first) or self.machine.ended:
                    self._running = False
                    return
            first = False
            if self._broken:
                continue
            try:
                self._advance(heard)
            except BaseException as error:
                self._fail(error)
            self._flush()

    def _advance(self, heard: list[tuple[int, Gradients | None]]) -> None:
        phases = self._phases
        if phases is None:
            early = dict(heard)
            if early.keys() >= self._sends.keys():
                self._run_at_once(early)
                return
            sources = [tuple(self.roots), *self._sends.values()]
            phases = self._phases = Phases(sources, self._context.id, self._retain_graph, self._leaves)
            phases.hear(tuple(self.roots), list(self.roots.values()))
            self._answer_none([node for node in self._unanswered if node not in phases])
        for message_id, gradients in heard:
            edges = self._sends.pop(message_id, None)
            if edges is not None:
                phases.hear(edges, gradients)
                if gradients is not None and is_profiled():
                    leave_mark(SEND_NAME)
        if phases.dead:
            dead, phases.dead = phases.dead, []
            self._answer_none(dead)
        if phases.is_due():
            for node, found in phases.run().items():
                self._answer(node, found)
        if not phases.unheard:
            self._finish()

    def _run_at_once(self, heard: dict[int, Gradients | None]) -> None:
        roots = dict(self.roots)
        for message_id, edges in self._sends.items():
            gradients = heard[message_id]
            if gradients is None:
                continue
            for edge, gradient in zip(edges, gradients, strict=True):
                if gradient is not None:
                    roots[edge] = add_gradients(roots.get(edge), gradient)
            if is_profiled():
                leave_mark(SEND_NAME)
        self._sends.clear()
        if roots:
            for node, found in run_whole(roots, self._context.id, self._retain_graph, self._leaves).items():
                self._answer(node, found)
        self._finish()

    def _finish(self) -> None:
        self._answer_none(list(self._unanswered))
        self._phases = None
        leaves, self._leaves = self._leaves, {}
        for node, gradient in leaves.items():
            for hook in post_hooks(node):
                hook((), (gradient,))
        self._context.accumulate(reduce_gradients({node.variable: found for node, found in leaves.items()}))
        if self._profile is not None:
            self._profile.pause()  # another thread may send what was recorded, from the next line on
        with self._lock:
            self._apply(self.machine.handle(PartFinished(), self._port.now()))

    def _answer_none(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._answer(node, None)

    def _answer(self, node: Node, gradients: Gradients | None) -> None:
        if node not in self._unanswered:
            return
        del self._unanswered[node]
        if gradients is not None and all(gradient is None for gradient in gradients):
            gradients = None
        if gradients is not None and is_profiled():
            leave_mark(RECEIVE_NAME)
        letter = Gradient(self._context.id, self.machine.pass_id, node.message_id, gradients)
        with self._lock:
            self._outbox.setdefault(node.from_worker, []).append(letter)

    def _fail(self, error: BaseException) -> None:
        self._broken = True
        self._phases = None
        with self._lock:
            self._apply(self.machine.handle(PartFailed(str(error) or type(error).__name__), self._port.now()))
            if self.failure is not None:
                self.failure.__cause__ = error

    # --- effects ------------------------------------------------------------------------------------------

    def _apply(self, effects: Sequence[protocol.Effect], kind: type[RpcError] = RpcError) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                self._outbox.setdefault(effect.worker, []).append(self._with_profile(effect.worker, effect.message))
            else:
                if isinstance(effect, Failed):
                    self.failure = kind(self._describe(effect))
                    self._phases = None
                if self.tasks is not None:
                    self.tasks.put(_nothing)  # the caller looks at the machine's state

    def _describe(self, failed: Failed) -> str:
        info = self._port.info(failed.worker)
        if info is None:
            return f"Error on Node {failed.worker}: {failed.reason}"
        where = "" if info.name in failed.reason else f" (on {info.name})"
        return f"Error on Node {info.id}: {failed.reason}{where}"

    def _with_profile(self, worker_id: int, message: protocol.Message) -> protocol.Message:
        """``message``, asking for or carrying what is recorded of this pass, if anything is."""
        if isinstance(message, StartPass):
            origin = self.machine.parent is None
            if (origin and is_profiled()) or self._profile is not None or PROFILING.everywhere:
                call = self._port.profile_call(worker_id, self._profile)
                if call is not None:
                    self._profiled_calls[worker_id] = call
                    return msgspec.structs.replace(message, profile=call.sends(b"", ()))
        elif isinstance(message, PassDone) and self._profile is not None and worker_id == self.machine.parent:
            return msgspec.structs.replace(message, profiled=self._profile.finish("backward"))
        return message

    def _flush(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, {}
        for worker_id, letters in outbox.items():
            try:
                self._context.send(worker_id, letters)
            except RpcError as error:
                self.react(WorkerLost(worker_id, str(error)))


def _nothing() -> None:
    pass
