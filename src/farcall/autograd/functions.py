"""Sends and receives: how tensors that cross workers are tied into autograd graphs.

A `SendFunction` is a source: it keeps the edges of the tensors that left, so that their gradients can be fed in when
they come back. A receive is a node made by torch: its outputs are the tensors that arrived, and the gradients that
reach it go to the sender. The engine never runs a receive's `backward`: it stops there.

Invariant: graph nodes are kept here, no tensors of the user; a send keeps its part of the graph alive until its context
is released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import ref

import torch
from torch.autograd.function import FunctionCtx

from farcall.errors import RpcError

# The names that programs and profilers written for torch.distributed.autograd look for.
SEND_NAME: Final = "torch::distributed::autograd::SendRpcBackward"
RECEIVE_NAME: Final = "torch::distributed::autograd::RecvRpcBackward"

Node = Any  # torch.autograd.graph.Node: the concrete classes are C types without stubs
Edge = tuple[Node, int]  # a node, and which of its forward outputs
Reached = dict[int, torch.Tensor | None]
"""The gradients of the tensors of one message that a pass reached, by their place; None: reached, and undefined."""
Hook = Callable[..., Any]

# Before torch 2.13 the node of a `torch.autograd.Function`, and with it all that is below, dies with the last tensor or
# node of torch's own that leads to it: the Python object that stands for the node does not keep it.
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
    if torch.is_grad_enabled() and tensor.layout is torch.strided:
        return tensor.view_as(tensor).grad_fn.next_functions[0][0], 0  # type: ignore[union-attr]
    return _above(tensor).next_functions[0][0], 0


def _above(tensor: torch.Tensor) -> Node:
    """A node that gradients pass on their way to ``tensor``, and that keeps alive all that is below it."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _above(tensor)
    # Sparse tensors have no views.
    return (tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()).grad_fn


def _owner(tensor: torch.Tensor) -> Node:
    """The node that keeps the graph of ``tensor`` alive."""
    node = tensor.grad_fn
    return _above(tensor) if isinstance(node, torch._C._FunctionBase) else node


def hooks_of(register: Callable[[Hook], Any]) -> list[Hook]:
    """The Python hooks that were registered by ``register``, a method of a node."""
    # torch has no way to list a node's hooks, but the handle of a new one leads to all of them.
    handle = register(hooks_of)
    found = handle.hooks_dict_ref()
    handle.remove()
    return list(found.values()) if found else []


def root_edges(context_id: Any, roots: Any) -> dict[Edge, torch.Tensor]:
    """The edges of the roots of a pass, each with its first gradient, 1; or an error that says what cannot be."""
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
    # "Dirty" makes torch hang the node on these very tensors; returned as they are they would come out as
    # views, on which torch forbids in-place operations. (`mark_dirty` does the same.)
    ctx.dirty_tensors = tensors
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

# Function.apply of C: the one of Python also sees to functorch and default arguments, which receives do not have.
_apply_receive: Any = super(torch.autograd.Function, _Receive).apply

# A function's outputs need a gradient only if an input does. Nothing is ever accumulated here.
_ANCHOR: Final = torch.empty(0, requires_grad=True)

RECEIVE: Final[Any] = _Receive._backward_cls
ACCUMULATE: Final[Any] = type(gradient_edge(_ANCHOR)[0])


class _ReceivedHooks(OrderedDict[int, Callable[[Any], Any]]):
    """The hooks of a tensor that arrived together with others.

    torch runs the hooks of all outputs of a node, with None for those that got nothing. A program cannot know which
    tensors came with the same message, so such calls are left out.
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
