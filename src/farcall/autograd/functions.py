"""Sends and receives: they tie tensors that cross workers into autograd graphs.

A `SendFunction` is a source: it keeps the edges of the tensors that left, so that a pass can feed in their gradients
when those come back. A receive is a node made by torch: its outputs are the tensors that arrived, and the gradients
that reach it go to the sender. The engine never runs a receive's `backward`: it stops there.

Invariant: this file keeps graph nodes, no tensors of the user; a send keeps its part of the graph alive until its
context is released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import ref

import torch
from torch.autograd.function import FunctionCtx

from farcall.errors import RpcError

# Programs and profilers for torch.distributed.autograd look for these names.
SEND_NAME: Final = "torch::distributed::autograd::SendRpcBackward"
RECEIVE_NAME: Final = "torch::distributed::autograd::RecvRpcBackward"

Node = Any  # torch.autograd.graph.Node: the concrete classes are C types without stubs
Edge = tuple[Node, int]  # a node, and the number of its forward output
Reached = dict[int, torch.Tensor | None]
"""The gradients of the tensors of one message that a pass reached, by their place; None: reached but undefined."""
Hook = Callable[..., Any]

# Before torch 2.13 the Python object of a `torch.autograd.Function` node does not keep the C++ node alive: the node,
# with everything below it, dies with the last tensor or C++ node that leads to it.
_NODES_LIVE_ALONE: Final = torch.__version__ >= "2.13"


class SendFunction:
    """The source of one message: ``next_functions`` are the edges of its tensors that need a gradient."""

    __slots__ = ("_owners", "message_id", "next_functions", "to_worker")

    def __init__(self, message_id: int, to_worker: int, needing: Sequence[torch.Tensor]) -> None:
        self.message_id: int = message_id
        self.to_worker: int = to_worker
        edges: list[Edge] = []
        for tensor in needing:
            node = tensor.grad_fn
            edges.append(gradient_edge(tensor) if node is None else (node, tensor.output_nr))
        self.next_functions: tuple[Edge, ...] = tuple(edges)
        self._owners = None if _NODES_LIVE_ALONE else [_owner(tensor) for tensor in needing]

    def name(self) -> str:
        """Return the name that programs for `torch.distributed.autograd` look for."""
        return SEND_NAME

    def __repr__(self) -> str:
        return f"<{SEND_NAME} message_id={self.message_id} to_worker={self.to_worker}>"


def gradient_edge(tensor: torch.Tensor) -> Edge:
    """Return the edge through which ``tensor`` gets its gradient."""
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    # torch does not expose a leaf's accumulator, but the node of a view of the leaf leads to it.
    if torch.is_grad_enabled() and tensor.layout is torch.strided:
        return tensor.view_as(tensor).grad_fn.next_functions[0][0], 0  # type: ignore[union-attr]
    return _above(tensor).next_functions[0][0], 0


def _above(tensor: torch.Tensor) -> Node:
    """Make a C++ node above ``tensor``, which keeps alive the graph below it."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _above(tensor)
    # Sparse tensors have no views, so clone them.
    return (tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()).grad_fn


def _owner(tensor: torch.Tensor) -> Node:
    """Return a node that keeps the graph of ``tensor`` alive."""
    node = tensor.grad_fn
    return _above(tensor) if isinstance(node, torch._C._FunctionBase) else node


def hooks_of(register: Callable[[Hook], Any]) -> list[Hook]:
    """Return the Python hooks that were registered with ``register``, a method of a node."""
    # torch cannot list a node's hooks, but the handle of a new hook leads to the dict of all of them.
    handle = register(hooks_of)
    found = handle.hooks_dict_ref()
    handle.remove()
    return list(found.values()) if found else []


def root_edges(context_id: Any, roots: Any) -> dict[Edge, torch.Tensor]:
    """Return the edges of the roots of a pass, each with the gradient 1. Raise if a tensor cannot be a root."""
    is_right = isinstance(context_id, int) and isinstance(roots, list | tuple)
    for root in roots if is_right else ():
        is_right = is_right and isinstance(root, torch.Tensor)
    if not is_right:
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
        one = torch.ones_like(root, requires_grad=False)
        edges[edge] = edges[edge] + one if edge in edges else one
    return edges


def _receive_forward(
    ctx: Any, anchor: torch.Tensor, from_worker: int, message_id: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    ctx.from_worker = from_worker
    ctx.message_id = message_id
    # "Dirty" makes torch attach the node to these very tensors. Without it torch would return views, on which it
    # forbids in-place operations. (`mark_dirty` does the same.)
    ctx.dirty_tensors = tensors
    return tensors


def _receive_backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "this graph reaches another worker; use farcall.autograd.backward(context_id, [loss]) "
        "instead of loss.backward()"
    )


# torch names the node after the class, and programs look for this name. It is no identifier, hence no `class`.
_function_class: Any = type(torch.autograd.Function)
_Receive: Any = _function_class(
    "torch::distributed::autograd::RecvRpc",
    (torch.autograd.Function,),
    {"forward": staticmethod(_receive_forward), "backward": staticmethod(_receive_backward)},
)

# Function.apply of C: Python's also handles functorch and default arguments, which receives do not need.
_apply_receive: Any = super(torch.autograd.Function, _Receive).apply

# A function's outputs need a gradient only if an input does. The anchor itself never gets a gradient.
_ANCHOR: Final = torch.empty(0, requires_grad=True)

RECEIVE: Final[Any] = _Receive._backward_cls
ACCUMULATE: Final[Any] = type(gradient_edge(_ANCHOR)[0])


class _ReceivedHooks(OrderedDict[int, Callable[[Any], Any]]):
    """The hooks of a tensor that arrived together with others.

    torch runs the hooks of all outputs of a node, with None for outputs without a gradient. A program cannot know which
    tensors came with the same message, so this class suppresses calls with None.
    """

    def __setitem__(self, number: int, hook: Callable[[Any], Any]) -> None:
        super().__setitem__(number, lambda gradient: None if gradient is None else hook(gradient))


def make_receive(from_worker: int, message_id: int, tensors: Sequence[torch.Tensor]) -> Node:
    """Turn newly arrived ``tensors`` (leaves, not views), in place, into outputs of one receive node."""
    for tensor in tensors:
        tensor.requires_grad_(False)
    if torch.is_grad_enabled():
        _apply_receive(_ANCHOR, from_worker, message_id, *tensors)
    else:
        with torch.enable_grad():
            _apply_receive(_ANCHOR, from_worker, message_id, *tensors)
    node: Node = tensors[0].grad_fn
    node.tensors = list(map(ref, tensors))
    if len(tensors) > 1:
        for tensor in tensors:
            tensor._backward_hooks = _ReceivedHooks()
            node._register_hook_dict(tensor)
    return node
