"""farcall: remote procedure calls for PyTorch, a maintained successor of ``torch.distributed.rpc``."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall import errors as errors
    from farcall.api import _all_gather as _all_gather
    from farcall.api import _barrier as _barrier
    from farcall.api import _set_rpc_timeout as _set_rpc_timeout
    from farcall.api import _use_rpc_pickler as _use_rpc_pickler
    from farcall.api import _wait_all as _wait_all
    from farcall.api import get_rpc_timeout as get_rpc_timeout
    from farcall.api import get_worker_info as get_worker_info
    from farcall.api import init_rpc as init_rpc
    from farcall.api import rpc_async as rpc_async
    from farcall.api import rpc_sync as rpc_sync
    from farcall.api import shared_empty as shared_empty
    from farcall.api import shutdown as shutdown
    from farcall.ids import WorkerInfo as WorkerInfo
    from farcall.options import RpcBackendOptions as RpcBackendOptions
    from farcall.remote import functions as functions
    from farcall.remote.future import Future as Future
    from farcall.remote.node import Node as Node

_HOMES = {
    "Future": "farcall.remote.future",
    "Node": "farcall.remote.node",
    "RpcBackendOptions": "farcall.options",
    "WorkerInfo": "farcall.ids",
    "_all_gather": "farcall.api",
    "_barrier": "farcall.api",
    "_set_rpc_timeout": "farcall.api",
    "_use_rpc_pickler": "farcall.api",
    "_wait_all": "farcall.api",
    "errors": "farcall",
    "functions": "farcall.remote",
    "get_rpc_timeout": "farcall.api",
    "get_worker_info": "farcall.api",
    "init_rpc": "farcall.api",
    "rpc_async": "farcall.api",
    "rpc_sync": "farcall.api",
    "shared_empty": "farcall.api",
    "shutdown": "farcall.api",
}
_MODULES = ("errors", "functions")

__all__ = [
    "Future",
    "Node",
    "RpcBackendOptions",
    "WorkerInfo",
    "errors",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "rpc_async",
    "rpc_sync",
    "shared_empty",
    "shutdown",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farcall' has no attribute {name!r}")
    found = import_module(f"{home}.{name}") if name in _MODULES else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
