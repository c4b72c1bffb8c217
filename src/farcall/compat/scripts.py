"""TorchScript code that uses ``torch.distributed.rpc``: it is served by farcall where it is compiled from now on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from farcall import api
from farcall.compat import autograd, rpc
from farcall.compat.rpc.internal import RPCExecMode, _build_rpc_profiling_key
from farcall.torchscript import bridging, extension, handlers, need

__all__ = ["serve"]

_autograd: Any = torch.autograd


def serve() -> list[Callable[[], None]]:
    """Have the extension ready wherever code is compiled that needs it; what is returned ends that."""
    functions = (rpc.rpc_sync, rpc.rpc_async, rpc.remote, autograd.get_gradients, autograd.backward)
    handlers.issue_async = _issue_async
    if extension.is_loaded():
        bridging.enable()  # for what was compiled before farcall was taken away, and is put back now

    def issue_as_before() -> None:
        handlers.issue_async = api.rpc_async

    return [issue_as_before, bridging.disable, *need.watch(functions)]


def _issue_async(to: str, function: Any, *request: Any) -> Any:
    """A call of a script's, as an event in the profile that is being made, if any."""
    if not _autograd._profiler_enabled():
        return api.rpc_async(to, function, *request)
    key = _build_rpc_profiling_key(
        RPCExecMode.ASYNC_JIT, function.qualified_name, api.get_worker_info().name, api.get_worker_info(to).name
    )
    with record_function(key) as event:
        future = api.rpc_async(to, function, *request)
        event._call_end_callbacks_on_future(future)  # what it returns would take an error for a value
        return future
