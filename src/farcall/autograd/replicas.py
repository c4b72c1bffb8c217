"""DistributedDataParallel inside a context: leaf gradients pass through the reducer on their way into the context.

The reducer hooks its parameters' accumulators, reads `.grad`, and works within an engine pass. Passes of contexts stop
before the accumulators. So when a worker's part is finished, the gradients of each replicated module's parameters go
through their accumulators in a small pass of their own, with the user's `.grad` set aside: the reducer averages them
as usual, and the result goes to the context. Communication does not overlap with the part's computation.

A parameter does not tell whether it is replicated, so a hook, which begins with farcall, registers replicated modules
when they are built; those built before are looked for among the objects that the garbage collector lists. They are
reduced in one order on all ranks: those that were found by what they replicate, behind them the others as they were
built. `static_graph=True` raises an error: it reduces at the end of the pass that computes the gradients.
"""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from farcall.autograd.leaves import register_own_hook

logger: logging.Logger = logging.getLogger("farcall")
LeafGradients = dict[torch.Tensor, torch.Tensor]

# State of the process, because modules belong to no node. Weak keys: the table must not keep a module alive.
REPLICAS: Final[WeakKeyDictionary[DistributedDataParallel, threading.Lock]] = WeakKeyDictionary()
_watching = threading.Lock()
_is_watching = False
_may_miss = False
"""Were there frozen objects, perhaps replicated modules among them, when the hook began?"""


def watch_replicas() -> None:
    """Register every replicated module that is built from now on."""
    global _is_watching, _may_miss
    with _watching:
        if not _is_watching:
            _is_watching = True
            _may_miss = _has_processes() and gc.get_freeze_count() > 0
            register_own_hook(lambda: register_module_module_registration_hook(_note))


def find_replicas() -> None:
    """Register the replicated modules that exist; it takes tens of milliseconds if there may be any."""
    if not _has_processes():
        return
    found = [thing for thing in gc.get_objects() if _is_replica(thing) and thing not in REPLICAS]
    # Collections reorder what they list, at each rank in another way.
    if len(set(map(_form, found))) < len(found):
        found.sort(key=_values)
    for replica in sorted(found, key=_form):
        REPLICAS.setdefault(replica, threading.Lock())


def _is_replica(thing: object) -> bool:
    """A whole one. The hook notes those that are being built; ``issubclass``, since `isinstance` asks proxies."""
    return issubclass(type(thing), DistributedDataParallel) and "reducer" in vars(thing)


def _form(replica: DistributedDataParallel) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in replica.named_parameters())


def _values(replica: DistributedDataParallel) -> list[float]:
    """The same on all ranks, and of no two modules, unless a program gave two the very same ones."""
    return [parameter.detach().abs().double().sum().item() for parameter in replica.parameters()]


def warn_of_frozen_replicas() -> None:
    """The first context: warn, once, if `find_replicas` may have overlooked some."""
    global _may_miss
    if _may_miss:
        _may_miss = False
        logger.warning(
            "gc.freeze() was called before init_rpc, and there was a process group: a DistributedDataParallel built "
            "before that is not found, and its gradients are not averaged in autograd contexts. Call gc.freeze(), or "
            "build the replica, after init_rpc"
        )


def _has_processes() -> bool:
    """Is there a process group? Without one no replicated module can be built."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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
        # Without a reducer it is being built, by another thread, or never was: the traceback of an error keeps it.
        if "reducer" in vars(replica) and replica.require_backward_grad_sync:
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
