"""Remote calls as an operator of torch's, which ``torch.compile`` takes into its graph instead of breaking it.

    from farcall.torchscript import call
    y = call("worker1", "mypackage.layers.forward", [x, weight])

An operator's arguments and results are tensors, numbers and text, and the shape of its result must be known without a
call. So the function is named, takes tensors and returns one tensor, of the first argument's shape and dtype unless
given otherwise. Gradients do not flow through it: where a distributed autograd context must record a call, make it the
ordinary way. All other calls work in compiled functions, too, with a break in the graph.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall import api
from farcall.errors import RpcError
from farcall.rpc.timeouts import UNSET_TIMEOUT


@torch.library.custom_op("farcall::call", mutates_args=())
def call(
    to: str,
    function: str,
    args: Sequence[torch.Tensor],
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    timeout: float | None = -1.0,
) -> torch.Tensor:
    """Run a function of tensors on worker ``to`` and return its result, one tensor; compiled without a break.

    Args:
        to: name of the worker.
        function: dotted name, ``"package.module.function"``.
        args: its arguments: tensors, at least one.
        shape, dtype: of the result, where they are not those of the first argument.
        timeout: seconds; None for no limit; by default that of the options, which an operator's schema writes as -1.

    Raises:
        RpcError: the result has another type, shape or dtype.
    """
    result: Any = api.rpc_sync(to, _find(function), tuple(args), timeout=UNSET_TIMEOUT if timeout == -1 else timeout)
    if not isinstance(result, torch.Tensor):
        raise RpcError(f"{function} on {to} returned {type(result).__name__}, not a tensor")
    look = _look(args, shape, dtype)
    if result.dtype != look[1] or list(result.shape) != look[0]:
        raise RpcError(
            f"{function} on {to} returned {result.dtype} of shape {list(result.shape)}, and the call said {look[1]} of "
            f"shape {look[0]}: pass shape= and dtype="
        )
    # An operator must return memory of its own; a worker that calls itself may get an argument back.
    return result.detach().clone() if any(result is one for one in args) else result.detach()


@call.register_fake
def _(
    to: str,
    function: str,
    args: Sequence[torch.Tensor],
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    timeout: float | None = -1.0,
) -> torch.Tensor:
    look = _look(args, shape, dtype)
    return args[0].new_empty(look[0], dtype=look[1])


def _look(
    args: Sequence[torch.Tensor], shape: Sequence[int] | None, dtype: torch.dtype | None
) -> tuple[list[int], torch.dtype]:
    return list(args[0].shape if shape is None else shape), dtype or args[0].dtype


@functools.lru_cache(1024)
def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(f"function must be a dotted name, package.module.function, not {name!r}")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
