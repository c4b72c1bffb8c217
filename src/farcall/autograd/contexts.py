"""The table of one worker's distributed autograd contexts: it routes messages to them, and runs `backward` here.

The thread that opens a context makes it; on other workers the first call or message that names it does. Must not know
how messages travel: that is the `Port`.

The table's lock guards the table. It is re-entrant, like a context's: a garbage collection under the lock may run a
destructor, which may make a call that is recorded here. No thread takes the table's lock under a context's lock.

Invariant: a context that was released here does not come back, whatever messages still arrive for it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch.autograd.profiler import record_function

from farcall.autograd.context import Context
from farcall.autograd.functions import root_edges
from farcall.autograd.passes import LocalPass, Message, Port
from farcall.autograd.replicas import find_replicas, warn_of_frozen_replicas, watch_replicas
from farcall.errors import RpcError
from farcall.protocol.gradients import PartFailed, PassFailed, ReleaseContext, StartPass, WorkerLost
from farcall.runtime.observing.profiling import is_profiled
from farcall.serialize.recording import RECORDING

_RELEASED_KEPT = 4096
MOST_BROUGHT = 1 << 16
"""How many contexts that messages of one worker made may be here: it can make up as many ids as it likes."""
_ID_BITS = 32  # ids of contexts and messages: the worker's origin, then a count of this many bits
_RANK_SHIFT = 48
_BACKWARD_NAME = "torch::distributed::autograd::backward"  # the name of a pass in profiles of its origin


class Contexts:
    """All contexts of a node, by id.

    Mutable, under its lock: the contexts, the ids of recently released ones, and the workers that are gone.
    """

    def __init__(self, port: Port, first_number: int = 0) -> None:
        """``first_number``: the first number of the ids; random if an earlier worker may have had this rank."""
        self.port = port
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self.find: Callable[[int], Context | None] = self._contexts.get
        """Return the context with an id, if this worker has it."""
        self._released: OrderedDict[int, None] = OrderedDict()  # recently released: messages may still arrive for them
        self._first_id = port.origin << _ID_BITS
        first = self._first_id + first_number + 1  # id 0 means no context, or no message
        self._next_context_id = count(first).__next__
        self.next_message_id: Callable[[], int] = count(first).__next__
        self._brought: Counter[int] = Counter()  # by worker: the contexts that its messages made
        self._gone: set[int] = set()
        self._gone_origins: set[int] = set()
        self._knows_replicas = False
        watch_replicas()
        find_replicas()
        self.running: set[LocalPass] = set()
        """The passes of this worker's calls of `backward` that run now."""

    # --- which context ------------------------------------------------------------------------------------

    def new_context(self) -> Context:
        """Open a context and put this thread into it."""
        current = RECORDING.get()
        if type(current) is Context and current.contexts is self:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts do not nest; leave that one first, or "
                "use it"
            )
        if not self._knows_replicas:
            self._look_for_replicas()
        context_id = self._next_context_id()
        context = self._contexts[context_id] = Context(context_id, self)
        RECORDING.set(context)
        return context

    def _look_for_replicas(self) -> None:
        find_replicas()  # again: no hook sees those that are copied or unpickled
        warn_of_frozen_replicas()
        self._knows_replicas = True

    def current(self) -> Context:
        """Return the context of this node that the thread is in."""
        context = RECORDING.get()
        if not isinstance(context, Context) or context.contexts is not self:
            raise RpcError("this thread is in no autograd context; use: with farcall.autograd.context() as context_id")
        return context

    def retrieve(self, context_id: int) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise RpcError(
                f"Could not find autograd context with id: {context_id}; its `with` block has ended, or no call of "
                "it has reached this worker"
            )
        return context

    def admit(self, context_id: int, worker_id: int) -> Context | None:
        """Return the context with that id; make it if necessary.

        None: it was released, its opener is gone, or ``worker_id``, whose message names it, has brought too many. No
        error, which would end its link: it may only pass on what a third worker made up.
        """
        context = self._contexts.get(context_id)
        if context is None:
            if not self._knows_replicas:
                self._look_for_replicas()
            with self._lock:
                if context_id in self._released or context_id >> _ID_BITS in self._gone_origins:
                    return None
                context = self._contexts.get(context_id)
                if context is None:
                    if self._brought[worker_id] >= MOST_BROUGHT:
                        return None
                    self._brought[worker_id] += 1
                    context = self._contexts[context_id] = Context(context_id, self, worker_id)
        return context

    def is_valid(self, context_id: int) -> bool:
        return context_id in self._contexts

    def max_id(self) -> int:
        """Return the largest id that a context or message of this worker may have."""
        return self._first_id | ((1 << _RANK_SHIFT) - 1)

    def release(self, context_id: int) -> frozenset[int]:
        """Forget a context here and end its passes; return the other workers that exchanged messages of it."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            if context is not None and context.brought_by is not None:
                self._brought[context.brought_by] -= 1
            # Also an unknown id: the call that would make the context may still be queued here.
            self._released[context_id] = None
            if len(self._released) > _RELEASED_KEPT:
                self._released.popitem(last=False)
        if context is None:
            return frozenset()
        if RECORDING.get() is context:
            RECORDING.set(None)
        # A context and its passes form a cycle: without this the graph would live until a garbage collection.
        for local in context.clear().values():
            if not local.machine.ended:
                reason = f"Could not find autograd context with id: {context_id}; its `with` block has ended"
                local.post(PartFailed(reason))
        return frozenset(context.peers)

    def release_everywhere(self, context_id: int, told_by: int = -1) -> None:
        """Forget a context here and at all workers that it reached from here, which do the same.

        Nobody waits for the release, so it travels with other messages: a message of its own would wake each worker
        once more in every training step.
        """
        workers = self.release(context_id)
        if workers & self._gone:
            workers |= self.port.workers()  # a dead worker may have spread the context and cannot release it
        for worker_id in workers:
            if worker_id != self.port.worker_id and worker_id != told_by and worker_id not in self._gone:
                self.port.send_later(worker_id, ReleaseContext(context_id))

    def ids(self) -> list[int]:
        """Return the ids of all contexts here."""
        return list(self._contexts)

    def debug_info(self) -> dict[str, str]:
        """Return counts, under the names of torch.distributed.autograd."""
        contexts = list(self._contexts.values())
        running = sum(not local.machine.ended for context in contexts for local in list(context.passes.values()))
        return {"num_current_backward_passes": str(running), "num_autograd_contexts": str(len(contexts))}

    # --- messages and deaths ------------------------------------------------------------------------------

    def deliver(self, from_worker: int, messages: Sequence[Message]) -> list[LocalPass]:
        """Take messages that arrived together; return the claimed passes, which the caller must have run.

        Runs no graph, so the thread that reads a link may call it.
        """
        claimed: list[LocalPass] = []
        touched: dict[LocalPass, None] = {}
        for message in messages:
            context_id = message.context_id
            if isinstance(message, ReleaseContext):
                self.release_everywhere(context_id, from_worker)
                continue
            context = self._contexts.get(context_id)
            if context is None and type(message) is StartPass:
                # The call that brings the context may not have arrived yet.
                context = None if context_id in self._released else self.admit(context_id, from_worker)
                if context is None:
                    reason = f"Could not find autograd context with id: {context_id}"
                    failed = PassFailed(context_id, message.pass_id, self.port.worker_id, reason)
                    try:
                        self.port.send(message.pass_id.origin, [failed])
                    except RpcError:
                        pass  # the origin is gone, and its pass with it
            if context is not None:
                local = context.passes.get(message.pass_id)
                if local is None:
                    local = context.take(message, from_worker)
                else:
                    local.inbox.put((message, from_worker))
                if local is not None:
                    touched[local] = None
        # Claim only now: a pass claimed at its StartPass would run before its gradients are in the inbox.
        for local in touched:
            if local.working.acquire(False):
                claimed.append(local)
        return claimed

    def worker_lost(self, worker_id: int, reason: str, origin: int) -> None:
        """Fail the passes that cannot end without that worker, and release the contexts that it opened.

        ``origin``: the leading bits of the ids of its contexts.
        """
        with self._lock:
            self._gone.add(worker_id)
            self._gone_origins.add(origin)
        for context in list(self._contexts.values()):
            if context.id >> _ID_BITS == origin:
                self.release(context.id)
                continue
            for local in list(context.passes.values()):
                local.post(WorkerLost(worker_id, reason))

    def worker_joined(self, origin: int) -> None:
        """A new worker joined, perhaps with the rank, and by chance the ``origin``, of one that is gone."""
        with self._lock:
            self._gone_origins.discard(origin)

    # --- backward -----------------------------------------------------------------------------------------

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        context = self._contexts.get(context_id) or self.retrieve(context_id)
        with context.lock:
            return dict(context.gradients)

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Run a pass from ``roots``; return when the contexts of all workers have their gradients."""
        edges = root_edges(context_id, roots)
        context = self._contexts.get(context_id) or self.retrieve(context_id)
        deadline = None if timeout_s is None else self.port.now() + timeout_s
        local = context.originate(edges, retain_graph, deadline)
        self.running.add(local)
        try:
            if is_profiled():
                with record_function(_BACKWARD_NAME):
                    local.run_to_end()
            else:
                local.run_to_end()
        finally:
            self.running.discard(local)
            self.port.pass_ended()
        if local.failure is not None:
            raise local.failure
