"""TorchScript code that uses ``torch.distributed.rpc``: it is served by farcall where it is compiled from now on."""

from __future__ import annotations

from collections.abc import Callable

from farcall.compat import autograd, rpc
from farcall.torchscript import bridging, extension, need

__all__ = ["serve"]


def serve() -> list[Callable[[], None]]:
    """Have the extension ready wherever code is compiled that needs it; what is returned ends that."""
    functions = (rpc.rpc_sync, rpc.rpc_async, rpc.remote, autograd.get_gradients, autograd.backward)
    if extension.is_loaded():
        bridging.enable()  # for what was compiled before farcall was taken away, and is put back now

    return [bridging.disable, *need.watch(functions)]
