"""``torch.distributed.autograd``, served by farcall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farcall import autograd as farcall_autograd
from farcall.autograd.context import Context

__all__ = ["context", "is_available"]


DistAutogradContext = Context
_current_context = farcall_autograd._current_context
_get_debug_info = farcall_autograd._get_debug_info
_get_max_id = farcall_autograd._get_max_id
_init = farcall_autograd._init
_is_valid_context = farcall_autograd._is_valid_context
_new_context = farcall_autograd._new_context
_release_context = farcall_autograd._release_context
_retrieve_context = farcall_autograd._retrieve_context
get_gradients: Callable[[int], dict[torch.Tensor, torch.Tensor]] = farcall_autograd.get_gradients


def is_available() -> bool:
    """Is distributed autograd there? farcall's is."""
    return True


class context(farcall_autograd.context):
    """``with context() as context_id:`` records the calls made inside."""

    @property
    def autograd_context(self) -> Any:
        """The context itself."""
        return self._context


def backward(context_id: int, roots: Any, retain_graph: bool = False) -> None:
    """Run a backward pass from ``roots`` over all workers; their gradients are in the context when this returns."""
    if isinstance(context_id, bool) or not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError("incompatible function arguments: backward takes the number of a context and a list of tensors")
    if not all(isinstance(root, torch.Tensor) for root in roots):
        raise TypeError("incompatible function arguments: the roots of backward must be tensors")
    farcall_autograd.backward(context_id, roots, retain_graph)
