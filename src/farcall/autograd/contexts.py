"""Distributed autograd contexts at one worker: their sends and receives, passes and gradients, and the table of them.

A context is made by the thread that opens it, and on other workers by the first call or message that names it. Calls
that leave and arrive are recorded in it; passes come from here (`backward`) or from elsewhere (`deliver`). Gradients
for a pass that this worker has not joined yet are kept until it joins, those of a pass that is over are dropped. How
messages travel is the `Port`'s business.

Threads that touch a context: those that are in it (`RECORDING`, a context variable), the readers and senders of its
messages, the I/O thread when a peer is lost, and those that run passes. A context's lock guards all its tables;
nothing is sent and no graph runs under it. It is reentrant, as the table's is: garbage may be collected under it, and
a destructor may make a call that is recorded here. No thread takes a context's lock and then the table's.

Invariants: under the context's lock, a receive is either part of a pass's snapshot or answers that pass by itself. A
context that was released here does not come back, whatever still arrives for it.

Over 400 lines: a context and the table share the rules above, and a cut between them would have to repeat those.
"""

from __future__ import annotations

import threading
from _thread import RLock  # the type: threading.RLock is a function around it
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.profiler import record_function

from farcall.autograd.functions import Edge, Node, SendFunction, make_receive, root_edges
from farcall.autograd.leaves import add_gradients
from farcall.autograd.passes import Event, Gradient, LocalPass, Message, Port
from farcall.autograd.replicas import watch_replicas
from farcall.errors import RpcError
from farcall.protocol.gradients import (
    AbortPass,
    BackwardPass,
    Begin,
    PartFailed,
    PassFailed,
    PassId,
    ReleaseContext,
    StartPass,
    WorkerLost,
)
from farcall.runtime.observing.profiling import is_profiled
from farcall.serialize.recording import RECORDING, Recording

__all__ = ["Context", "Contexts"]

_requires_grad = attrgetter("requires_grad")
_RELEASED_KEPT = 4096
_ID_BITS = 32  # below the worker's origin, in ids of contexts and of messages
_RANK_SHIFT = 48
_BACKWARD_NAME = "torch::distributed::autograd::backward"  # what profilers show of a pass at its origin


class Context:
    """One distributed autograd context at one worker.

    Mutable, under its lock: the sends and receives recorded, the passes joined, the gradients of leaves, and
    ``released``, after which nothing is recorded any more.
    """

    def __init__(self, context_id: int, contexts: Contexts) -> None:
        self.id = context_id
        self.contexts = contexts
        self.released: bool = False
        self.lock: threading.RLock = RLock()
        self.sends: dict[int, SendFunction] = {}
        self.receives: dict[int, Node] = {}
        self.declined: list[tuple[int, int]] = []  # (sender, message id) of messages that arrived and are not used
        self.known_workers: set[int] = set()  # workers that were told of this context from here
        self.peers: set[int] = set()  # these, and the senders of what arrived
        self.passes: dict[PassId, LocalPass] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._early: dict[PassId, list[Event]] = {}  # for passes that this worker has not joined yet
        self._over_below: dict[int, int] = {}  # by origin: all its passes with smaller numbers are over
        self._given_up: set[PassId] = set()
        self._next_number = 0

    # The names that programs written for torch.distributed.autograd use.
    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, SendFunction]:
        with self.lock:
            return dict(self.sends)

    def _recv_functions(self) -> dict[int, Node]:
        with self.lock:
            return dict(self.receives)

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.known_workers)

    def __repr__(self) -> str:
        return f"<Context {self.id}: {len(self.sends)} sends, {len(self.receives)} receives>"

    # --- as a `Recording`: called while messages are written and read -------------------------------------------

    def admits(self, peer: Any) -> bool:
        """Whether messages to ``peer`` belong to this context: not after it ended, nor where gradients are off."""
        return not self.released and torch.is_grad_enabled() and self.contexts.port.knows(peer)

    def record_send(self, peer: Any, tensors: Sequence[torch.Tensor]) -> int:
        """Record a message that leaves; return the id to send with it, 0 if no tensor needs a gradient.

        Nothing is recorded in a context that was released meanwhile.
        """
        send = None
        if torch.is_grad_enabled():
            needing = list(filter(_requires_grad, tensors))
            if needing:
                send = SendFunction(self.contexts.next_message_id(), peer.number, needing)
        with self.lock:
            if self.released:
                return 0
            self.known_workers.add(peer.number)
            self.peers.add(peer.number)
            if send is None:
                return 0
            self.sends[send.message_id] = send
        return send.message_id

    def withdraw_send(self, message_id: int) -> None:
        """Forget a message that did not leave after all: no receive would ever answer for it."""
        with self.lock:
            send = self.sends.pop(message_id, None)
            passes = list(self.passes.values())
        if send is not None:
            for local in passes:
                local.post(Gradient(self.id, local.machine.pass_id, message_id, {}))

    def record_receive(self, peer: Any, message_id: int, tensors: Sequence[torch.Tensor]) -> None:
        """Tie the tensors of an arrived message that need a gradient, in place, to their sender."""
        needing = list(filter(_requires_grad, tensors))
        if not needing:
            self.decline_receive(peer, message_id)
            return
        node = make_receive(peer.number, message_id, needing)
        with self.lock:
            if self.released:
                return
            self.peers.add(peer.number)
            self.receives[message_id] = node
            passes = list(self.passes.values())
        for local in passes:
            local.answer_late(message_id, peer.number)

    def decline_receive(self, peer: Any, message_id: int) -> None:
        """Note that a message will never be used here: its sender hears "none" in every pass."""
        with self.lock:
            self.peers.add(peer.number)
            self.declined.append((peer.number, message_id))
            passes = list(self.passes.values())
        for local in passes:
            local.answer_late(message_id, peer.number)

    def enter(self) -> Recording | None:
        """Put this thread into the context; return the one it was in, to be set again afterwards."""
        previous = RECORDING.get()
        RECORDING.set(self)
        return previous

    # --- passes ---------------------------------------------------------------------------------------------

    def originate(self, roots: dict[Edge, torch.Tensor], retain_graph: bool, deadline: float | None) -> LocalPass:
        """Make a pass that starts here."""
        me = self.contexts.port.worker_id
        with self.lock:
            pass_id = PassId(me, self._next_number)
            self._next_number += 1
            over_below = pass_id.number
            for known, other in self.passes.items():
                if known.origin == me and known.number < over_below and not other.machine.ended:
                    over_below = known.number
            if over_below:
                self._forget_passes(me, over_below)
            local = self.passes[pass_id] = LocalPass(
                self,
                BackwardPass(self.id, pass_id, me, None, deadline),
                Begin(frozenset(self.peers), frozenset(), retain_graph, over_below),
                roots=roots,
            )
        return local

    def take(self, message: Gradient | StartPass | AbortPass | Any, sender: int) -> LocalPass | None:
        """Put a message into the inbox of its pass, which StartPass makes; return the pass, None if there is none."""
        pass_id = message.pass_id
        with self.lock:
            local = self.passes.get(pass_id)
            if local is not None:  # made a moment ago, by another thread
                local.inbox.put((message, sender))
                return local
            if pass_id in self._given_up or pass_id.number < self._over_below.get(pass_id.origin, 0):
                return None
            if type(message) is StartPass:
                if message.over_below:
                    self._forget_passes(pass_id.origin, message.over_below)
                local = self.passes[pass_id] = LocalPass(
                    self,
                    BackwardPass(self.id, pass_id, self.contexts.port.worker_id, sender),
                    Begin(frozenset(self.peers), frozenset(message.covered), message.retain_graph, message.over_below),
                    profile=message.profile,
                )
                for event in self._early.pop(pass_id, ()):
                    local.inbox.put(event)
                local.working.release()  # to be claimed as after any other message
            elif type(message) is AbortPass:
                self._given_up.add(pass_id)
                self._early.pop(pass_id, None)
            elif type(message) is Gradient:
                self._early.setdefault(pass_id, []).append((message, sender))
            return local

    def _forget_passes(self, origin: int, over_below: int) -> None:
        if over_below <= self._over_below.get(origin, 0):
            return
        self._over_below[origin] = over_below
        for pass_id in (*self.passes, *self._early, *self._given_up):
            if pass_id.origin == origin and pass_id.number < over_below:
                self.passes.pop(pass_id, None)
                self._early.pop(pass_id, None)
                self._given_up.discard(pass_id)

    def accumulate(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Add a pass's leaf gradients; the dictionary is the context's from now on."""
        with self.lock:
            if not self.gradients:
                self.gradients = gradients
                return
            for leaf, gradient in gradients.items():
                known = self.gradients.get(leaf)
                self.gradients[leaf] = gradient if known is None else add_gradients(known, gradient)


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
                "work in it"
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
                f"Could not find autograd context with id: {context_id}; its `with` block has ended, or it never came "
                "to this worker"
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
        with context.lock:
            context.released = True
            dropped = context.passes, context.sends, context.receives, context._early, context.gradients
            context.passes, context.sends, context.receives, context._early, context.gradients = {}, {}, {}, {}, {}
        # The graph dies when this returns, not under the lock: its destructors may take long.
        for local in dropped[0].values():
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
