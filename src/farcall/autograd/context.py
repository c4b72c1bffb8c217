"""One distributed autograd context at one worker: its sends and receives, its passes and its gradients.

Passes come from here (`originate`) or from elsewhere (`join`); gradients for a pass that was not heard of
yet are kept until it is, and those of a pass that is over are dropped. It does not know threads or how
letters travel.

Invariant: under its lock, a receive is either part of a pass's snapshot or answers that pass by itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farcall.autograd.engine import add_gradients
from farcall.autograd.functions import Edge, Node, SendFunction
from farcall.autograd.nodes import Gradients
from farcall.autograd.passes import Gradient, Letter, LocalPass
from farcall.protocol.gradients import AbortPass, BackwardPass, PassId, StartPass
from farcall.serialize.recording import RECORDING, Recording

if TYPE_CHECKING:
    from farcall.autograd.contexts import Contexts

__all__ = ["Context"]


class Context:
    """One distributed autograd context at one worker."""

    def __init__(self, context_id: int, contexts: Contexts) -> None:
        self.id = context_id
        self.contexts = contexts
        self.released: bool = False
        self.lock: threading.RLock = threading.RLock()
        self.sends: dict[int, SendFunction] = {}
        self.receives: dict[int, Node] = {}
        self.declined: list[tuple[int, int]] = []  # (sender, message id) of what arrived and is not used
        self.known_workers: set[int] = set()  # those that were told of this context from here
        self.peers: set[int] = set()  # those, and the senders of what arrived
        self.passes: dict[PassId, LocalPass] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._early: dict[PassId, list[tuple[int, Gradients | None]]] = {}
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

    # --- as a recording: what those who write and read messages call ----------------------------------------

    def admits(self, peer: Any) -> bool:
        """Whether messages to ``peer`` belong to this context: not after it ended, nor where gradients are off."""
        return not self.released and torch.is_grad_enabled() and self.contexts.port.knows(peer)

    def record_send(self, peer: Any, tensors: list[torch.Tensor]) -> int:
        return self.contexts.attach_send(self, peer.number, tensors) or 0

    def withdraw_send(self, message_id: int) -> None:
        self.contexts.detach_send(self, message_id)

    def record_receive(self, peer: Any, message_id: int, tensors: list[torch.Tensor]) -> None:
        self.contexts.attach_receive(self, peer.number, message_id, tensors)

    def decline_receive(self, peer: Any, message_id: int) -> None:
        self.contexts.decline(self, peer.number, message_id)

    def enter(self) -> Recording | None:
        previous = RECORDING.get()
        RECORDING.set(self)
        return previous

    # --------------------------------------------------------------------------------------------------------

    def running_passes(self) -> int:
        return sum(not local.machine.ended for local in self.passes.values())

    def send(self, worker_id: int, letters: Sequence[Letter]) -> None:
        """Send letters, or hand them over at once when they are for this worker."""
        self.contexts.send(worker_id, letters)

    def accumulate(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Add a pass's leaf gradients, each in memory of its own."""
        shared = _shared_memory(gradients) if len(gradients) > 1 else ()
        with self.lock:
            for leaf, gradient in gradients.items():
                known = self.gradients.get(leaf)
                if known is not None:
                    self.gradients[leaf] = add_gradients(known, gradient)
                elif _is_loose(gradient) or (shared and _data_pointer(gradient) in shared):
                    # As torch does for .grad: nobody who changes one gradient in place may change another.
                    self.gradients[leaf] = _own_copy(gradient)
                else:
                    self.gradients[leaf] = gradient

    # --- passes -------------------------------------------------------------------------------------------

    def originate(self, roots: dict[Edge, torch.Tensor], retain_graph: bool, deadline: float | None) -> LocalPass:
        """Make a pass that starts here."""
        port = self.contexts.port
        with self.lock:
            pass_id = PassId(port.worker_id, self._next_number)
            self._next_number += 1
            machine = BackwardPass(self.id, pass_id, port.worker_id, None, deadline)
            local = LocalPass(self, port, machine, roots, retain_graph)
            self.passes[pass_id] = local
            over_below = min(
                (
                    known.number
                    for known, other in self.passes.items()
                    if known.origin == port.worker_id and not other.machine.ended
                ),
                default=pass_id.number,
            )
            self._forget(port.worker_id, over_below)
            local.begin(frozenset(), over_below)
        return local

    def join(self, start: StartPass, sender: int) -> LocalPass | None:
        """Take part in a pass begun elsewhere; None if it is over already."""
        port = self.contexts.port
        with self.lock:
            local = self.passes.get(start.pass_id)
            if local is None:
                if start.pass_id in self._given_up:
                    return None
                self._forget(start.pass_id.origin, start.over_below)
                machine = BackwardPass(self.id, start.pass_id, port.worker_id, sender)
                local = LocalPass(self, port, machine, {}, start.retain_graph, start.profile)
                self.passes[start.pass_id] = local
                for message_id, gradients in self._early.pop(start.pass_id, ()):
                    local.hear(message_id, gradients)
                local.begin(frozenset(start.covered), start.over_below)
                return local
        local.react(start, sender)
        return None

    def hear(self, letter: Gradient) -> LocalPass | None:
        """Put a gradient where its pass finds it; return that pass if it runs here."""
        pass_id = letter.pass_id
        with self.lock:
            local = self.passes.get(pass_id)
            if local is not None:
                local.hear(letter.message_id, letter.gradients)
            elif pass_id not in self._given_up and pass_id.number >= self._over_below.get(pass_id.origin, 0):
                self._early.setdefault(pass_id, []).append((letter.message_id, letter.gradients))
            return local

    def give_up(self, abort: AbortPass, sender: int) -> None:
        with self.lock:
            self._given_up.add(abort.pass_id)
            self._early.pop(abort.pass_id, None)
            local = self.passes.get(abort.pass_id)
        if local is not None:
            local.react(abort, sender)

    def clear(self) -> list[LocalPass]:
        """Let go of the graph and of everything else; return the passes that run, which their owner must end."""
        with self.lock:
            self.released = True
            passes = [local for local in self.passes.values() if not local.machine.ended]
            for table in (self.passes, self.sends, self.receives, self._early, self.gradients):
                table.clear()
        return passes

    def _forget(self, origin: int, over_below: int) -> None:
        self._over_below[origin] = max(over_below, self._over_below.get(origin, 0))

        def is_over(pass_id: PassId) -> bool:
            return pass_id.origin == origin and pass_id.number < over_below

        for pass_id in filter(is_over, list(self.passes)):
            del self.passes[pass_id]
        for pass_id in filter(is_over, list(self._early)):
            del self._early[pass_id]
        self._given_up = {pass_id for pass_id in self._given_up if not is_over(pass_id)}


def _shared_memory(gradients: dict[torch.Tensor, torch.Tensor]) -> set[int]:
    """Where more than one of ``gradients`` lies."""
    uses = Counter(_data_pointer(gradient) for gradient in gradients.values())
    return {pointer for pointer, count in uses.items() if count > 1}


def _data_pointer(gradient: torch.Tensor) -> int:
    return gradient._values().data_ptr() if gradient.layout is torch.sparse_coo else gradient.data_ptr()


def _own_copy(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.clone()  # the other layouts take no format; what they consist of is copied densely


def _is_loose(gradient: torch.Tensor) -> bool:
    if gradient.layout is torch.sparse_coo:
        return not (gradient._values().is_contiguous() and gradient._indices().is_contiguous())
    return gradient.layout is torch.strided and not gradient.is_contiguous()
