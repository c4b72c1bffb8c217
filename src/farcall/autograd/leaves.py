"""Gradients at the ends of a worker's graph: how those of leaves add up, where they lie; and the hooks of end nodes.

The engine stops before a leaf's accumulator, so `.grad` stays as it is, and before a receive. What else it would have
done there is done here, once for each of them that a pass reached with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from farcall.autograd.functions import ACCUMULATE, Edge, Node, Reached, hooks_of
from farcall.autograd.nodes import Gradients, Roots, replaced

Leaves = dict[Node, torch.Tensor]
"""The gradients of leaves, by accumulator."""

_own_handles = -1  # 1 once farcall's own hook was the first that anybody registered in this process


def add_gradients(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """The sum, never in place: either tensor may be in use elsewhere."""
    if first is None:
        return second
    if first.layout is not second.layout and second.layout is torch.strided:
        return second + first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second


def feed(edge: Edge, gradient: torch.Tensor, buffers: Roots, leaves: Leaves) -> None:
    """Add a gradient for an edge to the ``buffers`` of a graph, or to its ``leaves``."""
    node = edge[0]
    if type(node) is ACCUMULATE and not node.variable._backward_hooks:
        # No hook is to see the sum, so a leaf's gradients need not wait for each other.
        known = leaves.get(node)
        leaves[node] = gradient if known is None else add_gradients(known, gradient)
    else:
        known = buffers.get(edge)
        buffers[edge] = gradient if known is None else add_gradients(known, gradient)


def in_own_memory(gradients: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """``gradients``, dense, of which none shares memory with another; as torch does for ``.grad``."""
    found: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    uses: dict[int, int] = {}
    for leaf, gradient in gradients.items():
        parts: tuple[torch.Tensor, ...] = ()
        if gradient.layout is torch.strided:
            parts = (gradient,)
        elif gradient.layout is torch.sparse_coo:
            parts = (gradient._values(), gradient._indices())
        is_dense = bool(parts) and all(map(torch.Tensor.is_contiguous, parts))
        address = parts[0].data_ptr() if is_dense else -1
        uses[address] = uses.get(address, 0) + 1
        found.append((leaf, gradient, address))
    for leaf, gradient, address in found:
        # Of several that share memory all are copied: a backward function may have kept that memory.
        if address != -1 and uses[address] == 1:
            continue
        if gradient.layout is torch.strided:
            gradients[leaf] = gradient.clone(memory_format=torch.contiguous_format)
        else:
            gradients[leaf] = gradient.clone()  # the other layouts take no format; their parts are copied densely
    return gradients


def register_own_hook(register: Callable[[], object]) -> None:
    """Call ``register``, which registers farcall's one hook, and note if there was no other before."""
    global _own_handles
    is_first = RemovableHandle.next_id == 0
    register()
    _own_handles = 1 if is_first else -1


def is_watched(receive: Node) -> bool:
    """Whether a hook may be there to see the gradients of a receive, or a tensor keeps its own."""
    if RemovableHandle.next_id != _own_handles:
        return True
    for weak_tensor in receive.tensors:
        tensor = weak_tensor()
        if tensor is not None and tensor.retains_grad:
            return True
    return False


def call_end_hooks(node: Node, gradients: Reached) -> Reached:
    """Call the hooks of an accumulator or a receive, where the engine stops; the gradients as they leave them."""
    # The look for hooks takes ten functions for each node. torch numbers all hooks of a process, whatever they are for,
    # and in many programs there is none.
    if RemovableHandle.next_id == _own_handles:
        return gradients
    before, after = hooks_of(node.register_prehook), hooks_of(node.register_hook)
    if not before and not after:
        return gradients
    seen: Gradients = [gradients.get(place) for place in range(len(node._input_metadata))]
    with torch.no_grad():
        for hook in before:
            seen = replaced(seen, hook(tuple(seen)))
        for hook in after:
            hook((), tuple(seen))
    return {place: seen[place] for place in gradients}
