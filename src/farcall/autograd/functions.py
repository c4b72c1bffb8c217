"""How tensors that cross workers are tied into autograd graphs.

A `SendFunction` is a source: it remembers the edges of the tensors that left, so that their gradients can
be fed in when they come back. A receive is a node made by torch: its outputs are the tensors that arrived,
and the gradients that reach it go to the sender. The engine never runs a receive's `backward`: it stops
there.

Invariant: no user tensor is kept here, only graph nodes; a send keeps its part of the graph alive until its
context is released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import ref

import torch
from torch.autograd.function import FunctionCtx

from farcall.autograd.marks import SEND_NAME

__all__ = ["ACCUMULATE", "RECEIVE", "Edge", "Node", "SendFunction", "gradient_edge", "is_watched", "make_receive"]

Node = Any  # torch.autograd.graph.Node: the concrete classes are C types without stubs
Edge = tuple[Node, int]  # a node, and which of its forward outputs

# Before torch 2.13 the node of a `torch.autograd.Function`, and with it all that is below, dies with the last tensor or
# node of torch's own that leads to it: the Python object that stands for the node does not keep it.
_NODES_LIVE_ALONE: Final = torch.__version__ >= "2.13"


class SendFunction:
    """The source of one message: ``next_functions`` are the edges of its tensors that need a gradient."""

    __slots__ = ("_owners", "message_id", "next_functions", "to_worker")

    def __init__(self, message_id: int, to_worker: int, needing: Sequence[torch.Tensor]) -> None:
        self.message_id: int = message_id
        self.to_worker: int = to_worker
        self.next_functions: tuple[Edge, ...] = tuple([gradient_edge(tensor) for tensor in needing])
        self._owners = None if _NODES_LIVE_ALONE else [_owner(tensor) for tensor in needing]

    def name(self) -> str:
        """The name that programs written for `torch.distributed.autograd` look for."""
        return SEND_NAME

    def __repr__(self) -> str:
        return f"<{SEND_NAME} message_id={self.message_id} to_worker={self.to_worker}>"


def gradient_edge(tensor: torch.Tensor) -> Edge:
    """The edge through which ``tensor`` gets its gradient."""
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    # A leaf's accumulator cannot be asked for, but it is what a view of the leaf leads to.
    return _above(tensor).next_functions[0][0], 0


def _above(tensor: torch.Tensor) -> Node:
    """A node that gradients pass on their way to ``tensor``, and that keeps alive all that is below it."""
    with torch.enable_grad():
        # Sparse tensors have no views.
        return (tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()).grad_fn


def _owner(tensor: torch.Tensor) -> Node:
    """What keeps the graph of ``tensor`` alive."""
    node = tensor.grad_fn
    return _above(tensor) if isinstance(node, torch._C._FunctionBase) else node


def _receive_forward(
    ctx: Any, anchor: torch.Tensor, place: tuple[int, int, int], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    ctx.context_id, ctx.from_worker, ctx.message_id = place
    ctx.output_count = len(tensors)
    # "Dirty" makes torch hang the node on these very tensors; returned as they are they would come out as
    # views, on which torch forbids in-place operations.
    ctx.mark_dirty(*tensors)
    return tensors


def _receive_backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "this graph reaches another worker; use farcall.autograd.backward(context_id, [loss]) "
        "instead of loss.backward()"
    )


# torch names the node after the class, and programs look for this name; no identifier, hence no `class`.
_function_class: Any = type(torch.autograd.Function)
_Receive: Any = _function_class(
    "torch::distributed::autograd::RecvRpc",
    (torch.autograd.Function,),
    {"forward": staticmethod(_receive_forward), "backward": staticmethod(_receive_backward)},
)

# Without what Function.apply does in Python for functorch and default arguments, none of which concerns us.
_apply_receive: Any = super(torch.autograd.Function, _Receive).apply

# A function's outputs need a gradient only if an input does. Nothing is ever accumulated here.
_ANCHOR: Final = torch.empty(0, requires_grad=True)

RECEIVE: Final[type] = _Receive._backward_cls
ACCUMULATE: Final[type] = type(gradient_edge(_ANCHOR)[0])


class _ReceivedHooks(OrderedDict[int, Callable[[Any], Any]]):
    """Hooks of a tensor that arrived.

    torch runs the hooks of all outputs of a node, with None for those that got nothing. Which tensors came
    with the same message is not the user's affair, so such calls are left out.
    """

    def __setitem__(self, number: int, hook: Callable[[Any], Any]) -> None:
        super().__setitem__(number, lambda gradient: None if gradient is None else hook(gradient))


def make_receive(context_id: int, from_worker: int, message_id: int, tensors: Sequence[torch.Tensor]) -> Node:
    """Turn newly arrived ``tensors`` (leaves, not views), in place, into outputs of one receive node."""
    for tensor in tensors:
        tensor.requires_grad_(False)
    if torch.is_grad_enabled():
        _apply_receive(_ANCHOR, (context_id, from_worker, message_id), *tensors)
    else:
        with torch.enable_grad():
            _apply_receive(_ANCHOR, (context_id, from_worker, message_id), *tensors)
    node: Node = tensors[0].grad_fn
    node.outputs = []
    for tensor in tensors:
        hooks = tensor._backward_hooks = _ReceivedHooks()
        node._register_hook_dict(tensor)
        node.outputs.append((hooks, ref(tensor)))
    return node


def is_watched(receive: Node) -> bool:
    """Whether anything is to happen when gradients reach this receive: a hook, or a tensor that keeps its gradient."""
    for hooks, weak_tensor in receive.outputs:
        if hooks:
            return True
        tensor = weak_tensor()
        if tensor is not None and tensor.retains_grad:
            return True
    return False
