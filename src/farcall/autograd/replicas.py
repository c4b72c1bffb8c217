"""DistributedDataParallel inside a context: leaf gradients pass through the reducer on their way into the context.

The reducer hooks its parameters' accumulators, reads `.grad`, and works within an engine pass. Passes of contexts stop
before the accumulators. So when a worker's part is finished, the gradients of each replicated module's parameters go
through their accumulators in a small pass of their own, with the user's `.grad` set aside: the reducer averages them
as usual, and the result goes to the context. Communication does not overlap with the part's computation.

A parameter does not tell whether it is replicated, so a hook registers replicated modules when they are built. They are
reduced in that order, the same on all ranks. `static_graph=True` raises an error: it reduces at the end of the pass
that computes the gradients.
"""

from __future__ import annotations

import gc
import threading
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from farcall.autograd.leaves import register_own_hook

LeafGradients = dict[torch.Tensor, torch.Tensor]

# State of the process, because modules belong to no node. Weak keys: the table must not keep a module alive.
REPLICAS: Final[WeakKeyDictionary[DistributedDataParallel, threading.Lock]] = WeakKeyDictionary()
_watching = threading.Lock()
_is_watching = False


def watch_replicas() -> None:
    """Register all replicated modules that exist, and from now on every new one."""
    global _is_watching
    with _watching:
        if _is_watching:
            return
        _is_watching = True
        register_own_hook(lambda: register_module_module_registration_hook(_note))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # This takes tens of milliseconds; without a process group no replicated module can exist.
        for thing in gc.get_objects():
            if type(thing) is DistributedDataParallel:
                REPLICAS.setdefault(thing, threading.Lock())


def _note(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    # torch calls this for every submodule set anywhere; a replicated module sets its only one while it is built.
    if isinstance(module, DistributedDataParallel):
        REPLICAS.setdefault(module, threading.Lock())


class _Deliver(torch.autograd.Function):
    """A scalar whose backward returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gradients


def reduce_gradients(leaves: LeafGradients) -> LeafGradients:
    """Return ``leaves`` with the gradients of replicated parameters averaged by their reducers."""
    for replica, lock in list(REPLICAS.items()):
        if replica.require_backward_grad_sync:
            leaves = _reduced(replica, lock, leaves)
    return leaves


def _reduced(replica: DistributedDataParallel, lock: threading.Lock, leaves: LeafGradients) -> LeafGradients:
    ignored = replica.parameters_to_ignore
    named = replica.module.named_parameters()
    parameters = [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]
    given = [parameter for parameter in parameters if parameter in leaves]
    if not given:
        return leaves
    if replica.static_graph:
        raise RuntimeError(
            "DistributedDataParallel(static_graph=True) cannot be used in an autograd context: leave static_graph out"
        )
    leaves = dict(leaves)
    with lock:
        kept = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                scalar = _Deliver.apply([leaves[p] for p in given], *given)  # type: ignore[no-untyped-call]
            torch.autograd.backward([scalar])
            for parameter in parameters:
                # Also parameters unused here: another rank may have used them.
                if parameter.grad is not None:
                    is_view = replica.gradient_as_bucket_view
                    leaves[parameter] = parameter.grad.clone() if is_view else parameter.grad
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
    return leaves
