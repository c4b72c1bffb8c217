"""Gradients of leaves: how they add up, where they lie, and the hooks of the accumulators that would have taken them.

The engine stops before a leaf's accumulator, so `.grad` stays as it is. What the accumulator would have done besides is
done here, once for each leaf that a pass reached with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from farcall.autograd.functions import Node, hooks_of
from farcall.autograd.nodes import replaced

__all__ = ["add_gradients", "call_leaf_hooks", "in_own_memory", "make_own_handle"]

_own_handles = -1  # 1 once farcall's own hook was the first that anybody registered in this process


def add_gradients(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """The sum, never in place: either tensor may be in use elsewhere."""
    if first is None:
        return second
    if first.layout is not second.layout and second.layout is torch.strided:
        return second + first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second


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


def make_own_handle(register: Callable[[], object]) -> None:
    """Call ``register``, which registers farcall's one hook, and note if there was no other before."""
    global _own_handles
    is_first = RemovableHandle.next_id == 0
    register()
    _own_handles = 1 if is_first else -1


def call_leaf_hooks(accumulator: Node, gradient: torch.Tensor) -> torch.Tensor:
    """Call the hooks of a leaf's accumulator, which the engine does not run; the gradient as they leave it."""
    # The look for hooks takes ten functions for each leaf. torch numbers all hooks of a process, whatever they are for,
    # and in many programs there is none.
    if RemovableHandle.next_id == _own_handles:
        return gradient
    before, after = hooks_of(accumulator.register_prehook), hooks_of(accumulator.register_hook)
    for hook in before:
        (replacement,) = replaced([gradient], hook((gradient,)))
        gradient = gradient if replacement is None else replacement
    for hook in after:
        hook((), (gradient,))
    return gradient
