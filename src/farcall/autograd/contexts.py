"""A node's table of contexts, and which of them each thread is in.

This is what the runtime talks to: it records messages that leave and arrive, takes delivered letters, and
runs `backward`. A context is created by the thread that opens it, and on other workers by the first call or
letter that names it. It does not know how letters travel: that is the `Port`'s business.

Which context code is in is a context variable, so each thread and each coroutine has its own.

Invariant: a context that was released here does not come back, whatever still arrives for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from farcall.autograd.context import Context
from farcall.autograd.engine import add_gradients
from farcall.autograd.functions import Edge, SendFunction, make_receive
from farcall.autograd.marks import BACKWARD_NAME, is_profiled, record_function
from farcall.autograd.passes import Gradient, Letter, LocalPass, Port
from farcall.autograd.replicas import watch_replicas
from farcall.errors import RpcError
from farcall.protocol.gradients import AbortPass, PassFailed, ReleaseContext, StartPass, WorkerLost
from farcall.serialize.recording import RECORDING, Recording

__all__ = ["Contexts"]

_RELEASED_KEPT = 4096
_ID_BITS = 32  # below the worker's origin, in ids of contexts and of messages
_RANK_SHIFT = 48


class Contexts:
    """All contexts of a node."""

    def __init__(self, port: Port, first_number: int = 0) -> None:
        """``first_number``: where to begin to count; at random where another one may have had this worker's rank."""
        self.port = port
        watch_replicas()
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()  # the latest ones: letters may still be on their way
        self._first_id = port.origin << _ID_BITS
        self._next_context_id = self._first_id + first_number + 1  # 0 is no context,
        self._next_message_id = self._first_id + first_number + 1  # and no message
        self._gone: set[int] = set()
        self._gone_origins: set[int] = set()
        self._backward_lock = threading.Lock()
        self.backward_calls: int = 0
        """How many threads of this worker are inside `backward`."""

    # --- which context ------------------------------------------------------------------------------------

    def new_context(self) -> Context:
        """Open a context and put this thread into it."""
        if self.current_or_none() is not None:
            raise RpcError(
                "Already have an autograd context id for this thread: contexts do not nest; leave that one first, or "
                "work in it"
            )
        with self._lock:
            context = Context(self._next_context_id, self)
            self._next_context_id += 1
            self._contexts[context.id] = context
        RECORDING.set(context)
        return context

    def current_or_none(self) -> Context | None:
        """The context this thread is in."""
        context = RECORDING.get()
        return context if isinstance(context, Context) and context.contexts is self else None

    def current(self) -> Context:
        context = self.current_or_none()
        if context is None:
            raise RpcError("this thread is in no autograd context; use: with farcall.autograd.context() as context_id")
        return context

    def exchange_current(self, context: Recording | None) -> Recording | None:
        """Put this thread into ``context``; return where it was, to be put back afterwards."""
        previous = RECORDING.get()
        RECORDING.set(context)
        return previous

    def retrieve(self, context_id: int) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise RpcError(
                f"Could not find autograd context with id: {context_id}; its `with` block has ended, or it never came "
                "to this worker"
            )
        return context

    def find(self, context_id: int) -> Context | None:
        """The context of that id, if there is one here."""
        return self._contexts.get(context_id)

    def admit(self, context_id: int) -> Context | None:
        """For a call that came with a context: that context, made if need be; None if it was released already."""
        context = self._contexts.get(context_id)
        if context is None:
            with self._lock:
                if context_id in self._released or context_id >> _ID_BITS in self._gone_origins:
                    return None
                context = self._contexts.setdefault(context_id, Context(context_id, self))
        return context

    def find_or_create(self, context_id: int) -> Context:
        """Like `admit`, where the caller knows that the context was not released."""
        context = self.admit(context_id)
        assert context is not None
        return context

    def is_valid(self, context_id: int) -> bool:
        return context_id in self._contexts

    def max_id(self) -> int:
        """The largest id that a context or message of this worker may have."""
        return self._first_id | ((1 << _RANK_SHIFT) - 1)

    def release(self, context_id: int) -> frozenset[int]:
        """Forget a context here, ending its passes; return the workers to be told to do the same."""
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
        for local in context.clear():
            local.give_up(f"Could not find autograd context with id: {context_id}; its `with` block has ended")
        return frozenset(context.peers - {self.port.worker_id})

    def release_everywhere(self, context_id: int, told_by: int = -1) -> None:
        """Forget a context here and at all that know it from here, who do the same."""
        workers = self.release(context_id)
        if workers & self._gone:
            workers |= self.port.workers()  # somebody may know the context only from one that is dead
        for worker_id in workers - self._gone - {self.port.worker_id, told_by}:
            try:
                self.port.send(worker_id, [ReleaseContext(context_id)])
            except RpcError:
                pass  # it is gone, and its contexts with it

    def ids(self) -> list[int]:
        """The contexts there are here."""
        return list(self._contexts)

    def debug_info(self) -> dict[str, str]:
        """Counts, under the names that torch.distributed.autograd gives them."""
        contexts = list(self._contexts.values())
        running = sum(context.running_passes() for context in contexts)
        return {"num_current_backward_passes": str(running), "num_autograd_contexts": str(len(contexts))}

    # --- recording ----------------------------------------------------------------------------------------

    def attach_send(self, context: Context, to_worker: int, tensors: Iterable[torch.Tensor]) -> int | None:
        """Record a message that leaves; return the id to send with it, None if no tensor needs a gradient.

        Nothing is recorded in a context that was released meanwhile.
        """
        needing = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        send = None
        if needing:
            with self._lock:
                message_id = self._next_message_id
                self._next_message_id += 1
            send = SendFunction(message_id, to_worker, needing)
        with context.lock:
            if context.released:
                return None
            context.known_workers.add(to_worker)
            context.peers.add(to_worker)
            if send is None:
                return None
            context.sends[send.message_id] = send
        return send.message_id

    def detach_send(self, context: Context, message_id: int) -> None:
        """Forget a message that did not leave after all: nobody would ever answer for it."""
        with context.lock:
            send = context.sends.pop(message_id, None)
            passes = list(context.passes.values())
        if send is not None:
            for local in passes:
                local.hear(message_id, None)
                local.wake()

    def attach_receive(
        self, context: Context, from_worker: int, message_id: int, tensors: Iterable[torch.Tensor]
    ) -> None:
        """Tie the tensors of an arrived message that need a gradient, in place, to their sender."""
        needing = [tensor for tensor in tensors if tensor.requires_grad]
        if not needing:
            self.decline(context, from_worker, message_id)
            return
        node = make_receive(context.id, from_worker, message_id, needing)
        with context.lock:
            if context.released:
                return
            context.peers.add(from_worker)
            context.receives[message_id] = node
            passes = list(context.passes.values())
        self._answer_none(passes, context.id, from_worker, message_id)

    def decline(self, context: Context, from_worker: int, message_id: int) -> None:
        """Say that a message with this id will never be used here: its sender hears "none" in every pass."""
        with context.lock:
            context.peers.add(from_worker)
            context.declined.append((from_worker, message_id))
            passes = list(context.passes.values())
        self._answer_none(passes, context.id, from_worker, message_id)

    def _answer_none(self, passes: list[LocalPass], context_id: int, worker_id: int, message_id: int) -> None:
        for local in passes:
            local.answer_late(Gradient(context_id, local.machine.pass_id, message_id, None), worker_id)

    # --- letters ------------------------------------------------------------------------------------------

    def send(self, worker_id: int, letters: Sequence[Letter]) -> None:
        if worker_id == self.port.worker_id:
            self.deliver(worker_id, letters)
        else:
            self.port.send(worker_id, letters)

    def deliver(self, from_worker: int, letters: Sequence[Letter]) -> None:
        """Take letters that arrived together. Runs no graph, so the thread that reads may call it."""
        new: list[LocalPass] = []
        heard: list[LocalPass] = []
        for letter in letters:
            context = self._contexts.get(letter.context_id)
            if isinstance(letter, ReleaseContext):
                self.release_everywhere(letter.context_id, from_worker)
            elif isinstance(letter, StartPass):
                if context is None:
                    if letter.context_id in self._released:
                        reason = f"Could not find autograd context with id: {letter.context_id}"
                        self.send(
                            letter.pass_id.origin,
                            [PassFailed(letter.context_id, letter.pass_id, self.port.worker_id, reason)],
                        )
                        continue
                    # The call that will bring the context here has not arrived yet.
                    context = self.admit(letter.context_id)
                    if context is None:
                        continue
                joined = context.join(letter, from_worker)
                if joined is not None:
                    new.append(joined)
            elif context is None:
                continue
            elif isinstance(letter, Gradient):
                local = context.hear(letter)
                if local is not None:
                    heard.append(local)
            elif isinstance(letter, AbortPass):
                context.give_up(letter, from_worker)
            else:
                known = context.passes.get(letter.pass_id)
                if known is not None:
                    known.react(letter, from_worker)
        for local in new:
            local.start()
        for local in heard:
            local.wake()

    def worker_lost(self, worker_id: int, reason: str, origin: int) -> None:
        """Fail the passes that cannot end without that worker, and release the contexts that it opened.

        ``origin`` is what the ids of its contexts begin with.
        """
        with self._lock:
            self._gone.add(worker_id)
            self._gone_origins.add(origin)
        for context in list(self._contexts.values()):
            if context.id >> _ID_BITS == origin:
                self.release(context.id)
                continue
            for local in list(context.passes.values()):
                local.react(WorkerLost(worker_id, reason))

    def worker_joined(self, origin: int) -> None:
        """A new worker, perhaps with the rank, and by chance the ``origin``, of one that is gone."""
        with self._lock:
            self._gone_origins.discard(origin)

    # --- backward -----------------------------------------------------------------------------------------

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        context = self.retrieve(context_id)
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
        edges = _checked_roots(context_id, roots)
        context = self.retrieve(context_id)
        deadline = None if timeout_s is None else self.port.now() + timeout_s
        with self._backward_lock:
            self.backward_calls += 1
        try:
            local = context.originate(edges, retain_graph, deadline)
            if is_profiled():
                with record_function(BACKWARD_NAME):
                    local.run_here()
            else:
                local.run_here()
        finally:
            with self._backward_lock:
                self.backward_calls -= 1
            self.port.pass_ended()
        if local.failure is not None:
            raise local.failure


def _checked_roots(context_id: Any, roots: Any) -> dict[Edge, torch.Tensor]:
    if (
        not isinstance(context_id, int)
        or not isinstance(roots, list | tuple)
        or not all(isinstance(root, torch.Tensor) for root in roots)
    ):
        raise TypeError(
            "backward(): incompatible function arguments: expected a context id (int) and a list of tensors, "
            f"not {type(context_id).__name__} and {type(roots).__name__}"
        )
    if not roots:
        raise RpcError("No tensors provided for gradient computation: roots is empty")
    edges: dict[Edge, torch.Tensor] = {}
    for number, root in enumerate(roots):
        if not root.requires_grad:
            raise RpcError(
                f"requires_grad not set on root {number}: no gradient can start there; was it computed in this "
                "context, from tensors that require gradients?"
            )
        if root.numel() != 1:
            raise RpcError(
                f"root {number} of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: add it up "
                "or average it first"
            )
        if root.grad_fn is None:
            raise RpcError(f"root {number} does not have a valid gradient function: it is a leaf, not a result")
        edge = (root.grad_fn, root.output_nr)
        edges[edge] = add_gradients(edges.get(edge), torch.ones_like(root, requires_grad=False))
    return edges
