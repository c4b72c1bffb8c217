"""The distributed autograd contexts of one worker, by id; what arrives for them, and the calls of `backward` here.

A context is made by the thread that opens it, and on other workers by the first call or message that names it. How
messages travel is the `Port`'s business.

The table's lock guards the table. It is reentrant, as a context's is: garbage may be collected under it, and a
destructor may make a call that is recorded here. No thread takes a context's lock and then the table's.

Invariant: a context that was released here does not come back, whatever still arrives for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch.autograd.profiler import record_function

from farcall.autograd.context import Context
from farcall.autograd.functions import root_edges
from farcall.autograd.passes import LocalPass, Message, Port
from farcall.autograd.replicas import watch_replicas
from farcall.errors import RpcError
from farcall.protocol.gradients import PartFailed, PassFailed, ReleaseContext, StartPass, WorkerLost
from farcall.runtime.observing.profiling import is_profiled
from farcall.serialize.recording import RECORDING

_RELEASED_KEPT = 4096
_ID_BITS = 32  # below the worker's origin, in ids of contexts and of messages
_RANK_SHIFT = 48
_BACKWARD_NAME = "torch::distributed::autograd::backward"  # what profilers show of a pass at its origin


class Contexts:
    """All contexts of a node, by id.

    Mutable, under its lock: the contexts, the ids of those released last, and the workers that are gone.
    """

    def __init__(self, port: Port, first_number: int = 0) -> None:
        """``first_number``: where to begin to count; at random where another one may have had this worker's rank."""
        self.port = port
        self._lock = threading.RLock()
        self._contexts: dict[int, Context] = {}
        self.find: Callable[[int], Context | None] = self._contexts.get
        """The context of that id, if there is one here."""
        self._released: OrderedDict[int, None] = OrderedDict()  # the latest ones: messages may still be on their way
        self._first_id = port.origin << _ID_BITS
        first = self._first_id + first_number + 1  # 0 is no context, and no message
        self._next_context_id = count(first).__next__
        self.next_message_id: Callable[[], int] = count(first).__next__
        self._gone: set[int] = set()
        self._gone_origins: set[int] = set()
        self._watches_replicas = False
        self.running: set[LocalPass] = set()
        """The passes that calls of `backward` at this worker run now."""

    # --- which context ------------------------------------------------------------------------------------

    def new_context(self) -> Context:
        """Open a context and put this thread into it."""
        current = RECORDING.get()
        if type(current) is Context and current.contexts is self:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts do not nest; leave that one first, or "
                "use it"
            )
        if not self._watches_replicas:
            self._watch_replicas()
        context_id = self._next_context_id()
        context = self._contexts[context_id] = Context(context_id, self)
        RECORDING.set(context)
        return context

    def _watch_replicas(self) -> None:
        watch_replicas()  # not before the first context: most programs have neither
        self._watches_replicas = True

    def current_or_none(self) -> Context | None:
        """The context that this thread is in."""
        context = RECORDING.get()
        return context if isinstance(context, Context) and context.contexts is self else None

    def current(self) -> Context:
        context = self.current_or_none()
        if context is None:
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

    def admit(self, context_id: int) -> Context | None:
        """The context of that id, made if need be; None if it was released already, or its opener is gone."""
        context = self._contexts.get(context_id)
        if context is None:
            if not self._watches_replicas:
                self._watch_replicas()
            with self._lock:
                if context_id in self._released or context_id >> _ID_BITS in self._gone_origins:
                    return None
                context = self._contexts.setdefault(context_id, Context(context_id, self))
        return context

    def is_valid(self, context_id: int) -> bool:
        return context_id in self._contexts

    def max_id(self) -> int:
        """The largest id that a context or message of this worker may have."""
        return self._first_id | ((1 << _RANK_SHIFT) - 1)

    def release(self, context_id: int) -> frozenset[int]:
        """Forget a context here, ending its passes; return the other workers that know it from here."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            # Also one that is not known yet: the call that would bring it may still be queued here.
            self._released[context_id] = None
            if len(self._released) > _RELEASED_KEPT:
                self._released.popitem(last=False)
        if context is None:
            return frozenset()
        if RECORDING.get() is context:
            RECORDING.set(None)
        # A context and its passes know each other: without this the graph would wait for the collector.
        for local in context.clear().values():
            if not local.machine.ended:
                reason = f"Could not find autograd context with id: {context_id}; its `with` block has ended"
                local.post(PartFailed(reason))
        return frozenset(context.peers)

    def release_everywhere(self, context_id: int, told_by: int = -1) -> None:
        """Forget a context here and at all workers that know it from here, which do the same.

        Nothing waits for that, so it travels with other messages: one of its own would wake each worker once more a
        step.
        """
        workers = self.release(context_id)
        if workers & self._gone:
            workers |= self.port.workers()  # a worker may know the context only from one that is dead
        for worker_id in workers:
            if worker_id != self.port.worker_id and worker_id != told_by and worker_id not in self._gone:
                self.port.send_later(worker_id, ReleaseContext(context_id))

    def ids(self) -> list[int]:
        """The contexts there are here."""
        return list(self._contexts)

    def debug_info(self) -> dict[str, str]:
        """Counts, under the names that torch.distributed.autograd gives them."""
        contexts = list(self._contexts.values())
        running = sum(not local.machine.ended for context in contexts for local in list(context.passes.values()))
        return {"num_current_backward_passes": str(running), "num_autograd_contexts": str(len(contexts))}

    # --- messages and deaths ------------------------------------------------------------------------------

    def deliver(self, from_worker: int, messages: Sequence[Message]) -> list[LocalPass]:
        """Take messages that arrived together; return the passes that the caller must have run.

        Runs no graph, so the thread that reads may call it.
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
                if context_id in self._released:
                    reason = f"Could not find autograd context with id: {context_id}"
                    failed = PassFailed(context_id, message.pass_id, self.port.worker_id, reason)
                    try:
                        self.port.send(message.pass_id.origin, [failed])
                    except RpcError:
                        pass  # the origin is gone, and its pass with it
                else:  # the call that will bring the context here has not arrived yet
                    context = self.admit(context_id)
            if context is not None:
                local = context.passes.get(message.pass_id)
                if local is None:
                    local = context.take(message, from_worker)
                else:
                    local.inbox.put((message, from_worker))
                if local is not None:
                    touched[local] = None
        # Only now: a pass that is claimed with its start alone would run before its gradients are in the inbox.
        for local in touched:
            if local.working.acquire(False):
                claimed.append(local)
        return claimed

    def worker_lost(self, worker_id: int, reason: str, origin: int) -> None:
        """Fail the passes that cannot end without that worker, and release the contexts that it opened.

        ``origin``: the first bits of the ids of its contexts.
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
        """A new worker, perhaps with the rank, and by chance the ``origin``, of one that is gone."""
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
        """Run a pass from ``roots``; returns when all workers have their gradients in place."""
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
