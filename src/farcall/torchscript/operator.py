"""Remote calls as an operator of torch's: ``torch.compile`` takes it into its graph instead of breaking it.

    y = farcall.torchscript.call("worker1", "mypackage.layers.forward", [x, weight], like=x)

An operator's arguments and results are tensors, numbers and text, and its result's shape must be known while nobody is
called: so the function is given by its dotted name, takes tensors and returns one tensor, which looks like ``like``.
Gradients do not flow through it by themselves: inside a distributed autograd context make the call outside of the
compiled function. Everything else that a call can be works in compiled functions, too, with a break in the graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall import api
from farcall.errors import RpcError

__all__ = ["call"]

UNSET_TIMEOUT = -1.0


def call(
    to: str,
    function: str,
    args: Sequence[torch.Tensor],
    like: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> torch.Tensor:
    """Run a function of tensors on worker ``to`` and return its result, one tensor; may be compiled without a break.

    Args:
        to: name of the worker.
        function: dotted name, ``"package.module.function"``.
        args: its arguments, all tensors.
        like: a tensor that the result has the type, device and shape of; by default the first argument.
        shape: the result's shape, where it is not that of ``like``.
        timeout: seconds; 0 for none; by default that of the options.

    Raises:
        RpcError: the result is not what ``like`` and ``shape`` said.
    """
    if like is None:
        if not args:
            raise ValueError("say what the result looks like: like= a tensor")
        like = args[0]
    wanted = list(like.shape if shape is None else shape)
    result: torch.Tensor = torch.ops.farcall.call(to, function, list(args), like, wanted, timeout)
    return result


@torch.library.custom_op("farcall::call", mutates_args=())
def _call(
    to: str, function: str, args: Sequence[torch.Tensor], like: torch.Tensor, shape: Sequence[int], timeout: float
) -> torch.Tensor:
    result: Any = api.rpc_sync(to, _find(function), tuple(args), timeout=timeout)
    if not isinstance(result, torch.Tensor):
        raise RpcError(f"{function} on {to} returned {type(result).__name__}, not a tensor")
    if result.dtype != like.dtype or list(result.shape) != list(shape):
        raise RpcError(
            f"{function} on {to} returned {result.dtype} of shape {tuple(result.shape)}, and the call said "
            f"{like.dtype} of shape {tuple(shape)}: give like= and shape="
        )
    # What an operator returns must be memory of its own.
    return result.clone() if any(result is one for one in args) else result


@_call.register_fake
def _look_of_result(
    to: str, function: str, args: Sequence[torch.Tensor], like: torch.Tensor, shape: Sequence[int], timeout: float
) -> torch.Tensor:
    return like.new_empty(shape)


@functools.lru_cache(1024)
def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(f"function must be a dotted name, package.module.function, not {name!r}")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
