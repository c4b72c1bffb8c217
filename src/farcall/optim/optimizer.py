"""`DistributedOptimizer`: a torch optimizer on each worker that owns parameters, stepped together.

A parameter and its optimizer state stay where they are; only the order to step travels. Gradients of a distributed
autograd context are in ``.grad`` during the step; afterwards the former ``.grad`` is back.

Invariant: one optimizer of a node steps at a time, since they may share parameters and each needs ``.grad``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from farcall.autograd.recorder import Recorder
from farcall.ids import WorkerInfo
from farcall.rpc.future import call_async
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.runtime.node import Runtime, current_runtime
from farcall.serialize import RECORDING

Parameters = Sequence[RRef[torch.Tensor]]
Group = dict[str, Any]


class DistributedOptimizer:
    """Runs a ``torch.optim`` optimizer where the parameters are.

        with farcall.autograd.context() as context_id:
            loss = model(inputs).sum()
            farcall.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Args:
        optimizer_class: any class of ``torch.optim``, or one like them, that all owners of parameters can import.
        params_rref: references to the parameters, or a list of groups, as ``torch.optim`` has them, of references.
        *args: for ``optimizer_class``, on every worker.
        **kwargs: for ``optimizer_class``, too.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[RRef[torch.Tensor] | Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._node = current_runtime()
        by_owner = _groups_by_owner(params_rref)
        futures = {
            owner: call_async(
                self._node, owner, _make_local, (optimizer_class, groups, args, kwargs), None, UNSET_TIMEOUT
            )
            for owner, groups in by_owner.items()
        }
        self._warned = False
        self._locals: list[RRef[_LocalOptimizer]] = _wait_for_all(futures, "the optimizer could not be made")

    def step(self, context_id: int) -> None:
        """Step every worker's optimizer with the gradients of a context; returns when all have done so.

        Parameters without a gradient in the context stay as they are; if none has one, a warning says so, once. If
        workers fail, the first error is raised; its notes name all workers that failed, and the others have stepped.
        """
        self._node.part(Recorder).contexts.retrieve(context_id)
        inside = RECORDING.get()
        RECORDING.set(None)  # the calls that step are no part of the graph
        try:
            had_gradients = self._step(context_id)
        finally:
            RECORDING.set(inside)
        if not had_gradients and not self._warned:
            self._warned = True
            warnings.warn(
                "optimizer.step changed nothing: no parameter has a gradient in this context. Make the calls, and "
                "backward(context_id, [loss]), inside the context; loss.backward() does not reach other workers",
                stacklevel=2,
            )

    def _step(self, context_id: int) -> bool:
        """Step; return whether any parameter had a gradient."""
        if len(self._locals) == 1:
            (local,) = self._locals
            try:
                return local.rpc_sync().step(context_id)  # quicker than a future
            except Exception as error:
                _note_failures({local.owner(): error}, 1, "the optimizer could not step")
                raise
        futures = {local.owner(): local.rpc_async().step(context_id) for local in self._locals}
        return any(_wait_for_all(futures, "the optimizer could not step"))


def _groups_by_owner(parameters: Iterable[RRef[torch.Tensor] | Mapping[str, Any]]) -> dict[WorkerInfo, list[Group]]:
    groups = list(parameters)
    if not groups:
        raise ValueError("the optimizer got no parameters: params_rref is empty")
    if not any(isinstance(group, Mapping) for group in groups):
        groups = [{"params": groups}]
    found: dict[WorkerInfo, list[Group]] = {}
    for group in groups:
        if not isinstance(group, Mapping):
            raise TypeError("params_rref must hold references or groups of them, not both")
        options = {key: value for key, value in group.items() if key != "params"}
        of_owner: dict[WorkerInfo, list[RRef[torch.Tensor]]] = {}
        for rref in group["params"]:
            if not isinstance(rref, RRef):
                raise TypeError(
                    f"params_rref must hold references to parameters (farcall.RRef), not {type(rref).__name__}"
                )
            of_owner.setdefault(rref.owner(), []).append(rref)
        for owner, rrefs in of_owner.items():
            found.setdefault(owner, []).append({"params": rrefs, **options})
    return found


def _wait_for_all(futures: Mapping[WorkerInfo, torch.futures.Future[Any]], what: str) -> list[Any]:
    """All results. Waits until all have ended, then raises the first error, with a note that names all of them."""
    results = []
    errors: dict[WorkerInfo, Exception] = {}
    for owner, future in futures.items():
        try:
            results.append(future.wait())
        except Exception as error:
            errors[owner] = error
    if errors:
        raise _note_failures(errors, len(futures), what)
    return results


def _note_failures(errors: Mapping[WorkerInfo, Exception], among: int, what: str) -> Exception:
    """The first error, with a note that names all workers that failed."""
    first = next(iter(errors.values()))
    failed = ", ".join(f"{owner.name} ({type(error).__name__}: {error})" for owner, error in errors.items())
    first.add_note(f"{what} on {len(errors)} of {among} workers: {failed}")
    return first


# ---------------------------------------------------------------------- at the owners


def steps_of(node: Runtime) -> threading.Lock:
    """The lock under which optimizers step on a node: hold it to see weights that belong together."""
    return node.part(_make_lock)


def _make_lock(node: Runtime) -> threading.Lock:
    return threading.Lock()


class _LocalOptimizer:
    """The optimizer of one worker's parameters."""

    def __init__(self, node: Runtime, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        self._node = node
        self._optimizer = optimizer
        self._parameters = parameters

    def step(self, context_id: int) -> bool:
        """Step; return whether any parameter had a gradient."""
        recorder = self._node.part(Recorder)
        # A worker whose parameters took no part in the loss may not know the context.
        context = recorder.contexts.find(context_id)
        gradients = {} if context is None else recorder.get_gradients(context_id)
        with steps_of(self._node):
            kept = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(self._parameters, kept, strict=True):
                    parameter.grad = gradient
        return any(parameter in gradients for parameter in self._parameters)


def _make_local(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: list[Group],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[_LocalOptimizer]:
    local_groups = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in groups]
    parameters = [parameter for group in local_groups for parameter in group["params"]]
    # Classes that only look like torch's may know no groups: give a single group without options as a plain list.
    plain = len(local_groups) == 1 and local_groups[0].keys() == {"params"}
    optimizer = optimizer_class(parameters if plain else local_groups, *args, **kwargs)
    return RRef(_LocalOptimizer(current_runtime(), optimizer, parameters))
