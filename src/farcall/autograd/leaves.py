"""Gradients at the ends of a worker's graph: sums and memory of leaf gradients, and the hooks of end nodes.

The engine stops before a leaf's accumulator, so that `.grad` stays as it is, and before a receive. This file does the
rest of the engine's work there, once for each accumulator or receive that a pass reached with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from farcall.autograd.functions import ACCUMULATE, Edge, Node, Reached, hooks_of
from farcall.autograd.nodes import Gradients, Roots, replaced

Leaves = dict[Node, torch.Tensor]
"""The gradients of leaves, by accumulator."""

_own_handles = -1  # 1 if farcall's own hook was the first one registered in this process


def add_gradients(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """Return the sum, never in place: either tensor may be in use elsewhere."""
    if first is None:
        return second
    if first.layout is not second.layout and second.layout is torch.strided:
        return second + first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second


def feed(edge: Edge, gradient: torch.Tensor, buffers: Roots, leaves: Leaves) -> None:
    """Add a gradient for an edge to the ``buffers`` of a graph, or to its ``leaves``."""
    node = edge[0]
    if type(node) is ACCUMULATE and not node.variable._backward_hooks:
        # No hook sees the sum, so a leaf's gradients need not wait for each other.
        known = leaves.get(node)
        leaves[node] = gradient if known is None else add_gradients(known, gradient)
    else:
        known = buffers.get(edge)
        buffers[edge] = gradient if known is None else add_gradients(known, gradient)


def in_own_memory(gradients: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Make all ``gradients`` dense, and copy those that share memory; torch does the same for ``.grad``."""
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
        # Copy all gradients that share memory, the first too: a backward function may have kept that memory.
        if address != -1 and uses[address] == 1:
            continue
        if gradient.layout is torch.strided:
            gradients[leaf] = gradient.clone(memory_format=torch.contiguous_format)
        else:
            gradients[leaf] = gradient.clone()  # other layouts accept no memory format; clone() makes their parts dense
    return gradients


def register_own_hook(register: Callable[[], object]) -> None:
    """Call ``register``, which registers farcall's only hook, and record whether it is the first in this process."""
    global _own_handles
    is_first = RemovableHandle.next_id == 0
    register()
    _own_handles = 1 if is_first else -1


def is_watched(receive: Node) -> bool:
    """May a hook see the gradients of a receive, or does one of its tensors retain its gradient?"""
    if RemovableHandle.next_id != _own_handles:
        return True
    for weak_tensor in receive.tensors:
        tensor = weak_tensor()
        if tensor is not None and tensor.retains_grad:
            return True
    return False


def call_end_hooks(node: Node, gradients: Reached) -> Reached:
    """Call the hooks of an accumulator or a receive, where the engine stops; return the gradients that they leave."""
    # The search for hooks costs ten calls for each node. torch numbers all hooks of a process, of every kind, and many
    # programs have none: then skip the search.
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
