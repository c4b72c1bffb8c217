"""Running nodes of an autograd graph: many by torch's engine, up to given edges, or a single one outside it.

`run_node` repeats the engine's work around one node: the node's own hooks, zeros for undefined gradients of a Python
function, the search for nan in anomaly mode, and results reduced to the edges that need them, in their dtype and shape.
It calls no tensor hooks: the engine ran those when it stopped at the node. (For a node that only undefined gradients
reach, torch would call its tensor hooks with None; here nothing calls them, because a node does not list them.)

`torch.utils.checkpoint` with use_reentrant=True always runs by `run_node`: it starts a backward pass of its own, which
torch allows only outside `inputs=` passes, and which would add the gradients of its recomputed part to `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from farcall.autograd.functions import Edge, Node, gradient_edge, hooks_of

Gradients = list[torch.Tensor | None]
Roots = dict[Edge, torch.Tensor]
RunInner = Callable[[Roots, Sequence[Edge]], Gradients]

_new_tuple: Any = tuple.__new__  # quicker than GradientEdge's own __new__, a Python function
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def _is_checkpoint(kind: Any) -> bool:
    return issubclass(kind, BackwardCFunction) and issubclass(kind._forward_cls, CheckpointFunction)


is_checkpoint: Callable[[Any], bool] = lru_cache(maxsize=1024)(_is_checkpoint)
"""Are nodes of this class reentrant checkpoints, torch's or of a class derived from it?"""


def run_engine(roots: Roots, inputs: Iterable[Edge], keep_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients that arrive at ``inputs``. torch.autograd.grad does the same and takes 25 us longer."""
    # With `inputs`, the engine runs only nodes on the way to one of them, and captures the gradients there. It does not
    # run the accumulators of leaves, so `.grad` stays as it is; `LocalPass._finish` calls their hooks.
    wanted: list[GradientEdge] = []
    starts: list[GradientEdge] = []
    for node, index in inputs:
        wanted.append(_new_tuple(GradientEdge, (node, index, None)))
    if not wanted or not roots:
        return (None,) * len(wanted)
    for node, index in roots:
        starts.append(_new_tuple(GradientEdge, (node, index, None)))
    result: tuple[torch.Tensor | None, ...] = _run_backward(
        tuple(starts),
        tuple(roots.values()),
        keep_graph,
        False,
        tuple(wanted),
        allow_unreachable=True,  # an input that no root reaches gets None
        accumulate_grad=False,
    )
    return result


def run_node(node: Node, gradients: Gradients, run_inner: RunInner) -> Iterator[tuple[Edge, torch.Tensor]]:
    """Call ``node``; yield the gradient of each of its edges. ``run_inner`` runs a recomputed graph."""
    with torch.no_grad():
        for hook in hooks_of(node.register_prehook):
            gradients = replaced(gradients, hook(tuple(gradients)))
        results = _call(node, gradients, run_inner)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            _refuse_nan(node, results)
        for hook in hooks_of(node.register_hook):
            results = replaced(results, hook(tuple(results), tuple(gradients)))
        edges = node.next_functions
        for edge, gradient in zip(edges, results, strict=True):
            if edge[0] is not None and gradient is not None:
                yield edge, _fitted(gradient, edge)


def replaced(values: Gradients, result: Any) -> Gradients:
    """Return the values after a hook that returned ``result``: None, one tensor, or a tuple of all."""
    if result is None:
        return values
    return list(result) if isinstance(result, tuple) else [result]


def _call(node: Node, gradients: Gradients, run_inner: RunInner) -> Gradients:
    if not isinstance(node, BackwardCFunction):
        return _as_list(node(*gradients))
    # torch does not tell whether the function asked for None instead of zeros. Zeros give the same gradients, and
    # torch.distributed.autograd passes them to every function behind a worker's edge.
    filled: Gradients = [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if gradient is None else gradient
        for gradient, meta in zip(gradients, node._input_metadata, strict=True)  # type: ignore[attr-defined]
    ]
    plain: Any = node.apply
    results = _call_checkpoint(node, filled, run_inner) if is_checkpoint(type(node)) else _as_list(plain(*filled))
    # The function returns one result for each argument, but only tensors have edges. Arguments that need a gradient and
    # edges with a node correspond, in order.
    wanted = iter([result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed])
    return [None if child is None else next(wanted, None) for child, _ in node.next_functions]


def _refuse_nan(node: Node, results: Gradients) -> None:
    for number, gradient in enumerate(results):
        if gradient is not None and gradient.layout is torch.strided and gradient.isnan().any():
            error = RuntimeError(f"Function '{node.name()}' returned nan values in its {number}th output.")
            made = "".join(node.metadata.get("traceback_", ()))
            error.add_note(f"Traceback of the forward call that made it (most recent call last):\n{made}")
            raise error


def _as_list(results: Any) -> Gradients:
    return list(results) if isinstance(results, tuple) else [results]


def _fitted(gradient: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Convert ``gradient`` to the dtype and the shape of its tensor, as the engine does between nodes."""
    meta = edge[0]._input_metadata[edge[1]]
    if gradient.dtype is not meta.dtype:
        gradient = gradient.to(meta.dtype)
    if gradient.layout is torch.strided and gradient.shape != torch.Size(meta.shape):
        gradient = gradient.sum_to_size(tuple(meta.shape))
    return gradient


class _Divert(torch.autograd.Function):
    """A stand-in for recomputed outputs: ``run_inner`` runs their graph, instead of the checkpoint's own pass."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[Any], run_inner: RunInner, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.outputs = outputs
        ctx.run_inner = run_inner
        ctx.edges = [gradient_edge(tensor) if tensor.requires_grad else None for tensor in inputs]
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        roots = {
            gradient_edge(output): gradient
            for output, gradient in zip(ctx.outputs, gradients, strict=True)
            if gradient is not None
        }
        edges = [edge for edge in ctx.edges if edge is not None]
        found = iter(ctx.run_inner(roots, edges))
        return None, None, *(None if edge is None else next(found) for edge in ctx.edges)


def _call_checkpoint(node: Any, gradients: Gradients, run_inner: RunInner) -> Gradients:
    function = node.run_function

    def diverted(*arguments: Any) -> Any:
        recomputed = function(*arguments)
        outputs = list(recomputed) if isinstance(recomputed, tuple) else [recomputed]
        places = [i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
        inputs = [value for value in arguments if isinstance(value, torch.Tensor)]
        stands = _Divert.apply([outputs[place] for place in places], run_inner, *inputs)  # type: ignore[no-untyped-call]
        for place, stand in zip(places, stands, strict=True):
            outputs[place] = stand
        return tuple(outputs) if isinstance(recomputed, tuple) else outputs[0]

    node.run_function = diverted
    try:
        with torch.enable_grad():
            return _as_list(node.apply(*gradients))
    finally:
        node.run_function = function
