"""One distributed autograd context at one worker: its sends and receives, its passes and its gradients.

A context records the messages that leave and arrive in it. A pass begins here (`originate`) or by a message (`take`).
The context keeps gradients for a pass that this worker has not joined yet, and drops those of a pass that is over.
`Contexts` is the table of contexts.

Threads that touch a context: those that are in it (`RECORDING`, a context variable), the readers and senders of its
messages, the I/O thread when a peer is lost, and those that run passes. Its lock guards all its tables; no thread sends
or runs a graph under it. It is re-entrant: a garbage collection under the lock may run a destructor, which may make a
call that is recorded here.

Invariant: under the lock, a receive is either part of a pass's snapshot or answers that pass by itself.
"""

from __future__ import annotations

import threading
from _thread import RLock  # the type: threading.RLock is a function around it
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from farcall.autograd.functions import Edge, Node, SendFunction, make_receive
from farcall.autograd.leaves import add_gradients
from farcall.autograd.passes import Event, Gradient, LocalPass
from farcall.protocol.gradients import AbortPass, BackwardPass, Begin, PassId, StartPass
from farcall.serialize.recording import RECORDING, Recording

if TYPE_CHECKING:
    from farcall.autograd.contexts import Contexts

_requires_grad = attrgetter("requires_grad")


class Context:
    """One distributed autograd context at one worker.

    Mutable, under its lock: the recorded sends and receives, the passes that this worker joined, the gradients of
    leaves, and ``released``, after which the context records nothing.
    """

    def __init__(self, context_id: int, contexts: Contexts, brought_by: int | None = None) -> None:
        """``brought_by``: the worker whose message made it here; None: it was opened here."""
        self.id = context_id
        self.brought_by = brought_by
        self.contexts = contexts
        self.released: bool = False
        self.lock: threading.RLock = RLock()
        self.sends: dict[int, SendFunction] = {}
        self.receives: dict[int, Node] = {}
        self.declined: list[tuple[int, int]] = []  # (sender, message id) of arrived messages that need no gradient
        self.known_workers: set[int] = set()  # workers that this one sent messages of this context
        self.peers: set[int] = set()  # the known workers, and the senders of messages that arrived
        self.passes: dict[PassId, LocalPass] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._early: dict[PassId, list[Event]] = {}  # events of passes that this worker has not joined yet
        self._over_below: dict[int, int] = {}  # by origin: passes with smaller numbers are over
        self._given_up: set[PassId] = set()
        self._next_number = 0

    # These names are those of torch.distributed.autograd; programs use them.
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
        """Do messages to ``peer`` belong to this context? Not after its release, nor while gradients are disabled."""
        return not self.released and torch.is_grad_enabled() and self.contexts.port.knows(peer)

    def record_send(self, peer: Any, tensors: Sequence[torch.Tensor]) -> int:
        """Record a message that leaves; return the id to send with it, 0 if no tensor needs a gradient.

        A context that was released meanwhile records nothing.
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
        """Forget a message that did not leave: no receive will answer for it, so the passes hear "none" here."""
        with self.lock:
            send = self.sends.pop(message_id, None)
            passes = list(self.passes.values())
        if send is not None:
            for local in passes:
                local.post(Gradient(self.id, local.machine.pass_id, message_id, {}))

    def record_receive(self, peer: Any, message_id: int, tensors: Sequence[torch.Tensor]) -> None:
        """Tie the tensors of an arrived message that need a gradient to their sender, in place."""
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
        """Record that a message needs no gradient here: every pass answers "none" to its sender."""
        with self.lock:
            self.peers.add(peer.number)
            self.declined.append((peer.number, message_id))
            passes = list(self.passes.values())
        for local in passes:
            local.answer_late(message_id, peer.number)

    def enter(self) -> Recording | None:
        """Put this thread into the context; return its previous context, which the caller restores."""
        previous = RECORDING.get()
        RECORDING.set(self)
        return previous

    # --- passes ---------------------------------------------------------------------------------------------

    def originate(self, roots: dict[Edge, torch.Tensor], retain_graph: bool, deadline: float | None) -> LocalPass:
        """Make a pass whose origin is this worker."""
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
        """Put a message into the inbox of its pass and return the pass, if one runs here. A StartPass makes it."""
        pass_id = message.pass_id
        with self.lock:
            local = self.passes.get(pass_id)
            if local is not None:  # another thread made it since the caller looked
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
                local.working.release()  # made locked; `deliver` claims it, as after any other message
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
        """Add a pass's leaf gradients. The context takes over the dictionary."""
        with self.lock:
            if not self.gradients:
                self.gradients = gradients
                return
            for leaf, gradient in gradients.items():
                known = self.gradients.get(leaf)
                self.gradients[leaf] = gradient if known is None else add_gradients(known, gradient)

    def clear(self) -> dict[PassId, LocalPass]:
        """Drop the graph and all tables; return the passes. The caller must end those that still run."""
        with self.lock:
            self.released = True
            dropped = self.passes, self.sends, self.receives, self._early, self.gradients
            self.passes, self.sends, self.receives, self._early, self.gradients = {}, {}, {}, {}, {}
        # The graph dies when this function returns, outside the lock: its destructors may take long.
        return dropped[0]
