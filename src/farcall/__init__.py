"""farcall: remote procedure calls for PyTorch, a maintained successor of ``torch.distributed.rpc``."""

from importlib import import_module
from typing import TYPE_CHECKING

from farcall.imports import gc_paused

if TYPE_CHECKING:
    from farcall import autograd, compat, debug, errors, nn, optim, torchscript
    from farcall.api import _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs
    from farcall.api import _rref_context_get_debug_info as _rref_context_get_debug_info
    from farcall.api import _set_rpc_timeout as _set_rpc_timeout
    from farcall.api import _use_rpc_pickler as _use_rpc_pickler
    from farcall.api import (
        all_gather,
        allow,
        barrier,
        get_rpc_timeout,
        get_worker_info,
        init_rpc,
        member_events,
        members,
        metrics,
        on_member,
        publish,
        remote,
        rpc_async,
        rpc_sync,
        shared_empty,
        shutdown,
        subscribe,
        wait_all,
    )
    from farcall.ids import WorkerInfo
    from farcall.launcher.cluster import Cluster
    from farcall.launcher.launch import launch
    from farcall.node import Node
    from farcall.observe.cluster import profile
    from farcall.options import (
        LimitOptions,
        MembershipOptions,
        MemoryOptions,
        ObservingOptions,
        RpcBackendOptions,
        TlsOptions,
    )
    from farcall.rpc import functions
    from farcall.rpc.batches import batched
    from farcall.rpc.combine import as_completed, gather
    from farcall.rpc.future import Future
    from farcall.rpc.handles import Worker, worker
    from farcall.rpc.mapping import map
    from farcall.rpc.remote_tensor import RemoteTensor, share
    from farcall.rpc.retry import Retry
    from farcall.rpc.rref import RRef
    from farcall.rpc.streams import Stream, outgoing
    from farcall.runtime.calls.scope import CurrentCall, current_call
    from farcall.runtime.membership.events import MemberEvent
    from farcall.weights.parts import Part, publish_part, subscribe_parts

__version__ = "0.1.0"

_NAMES = {
    "farcall": "autograd compat debug errors nn optim torchscript",
    "farcall.api": """
        _delete_all_user_and_unforked_owner_rrefs _rref_context_get_debug_info _set_rpc_timeout
        _use_rpc_pickler all_gather allow barrier get_rpc_timeout get_worker_info init_rpc member_events
        members metrics on_member publish remote rpc_async rpc_sync shared_empty shutdown subscribe wait_all""",
    "farcall.ids": "WorkerInfo",
    "farcall.launcher.cluster": "Cluster",
    "farcall.launcher.launch": "launch",
    "farcall.node": "Node",
    "farcall.observe.cluster": "profile",
    "farcall.options": "LimitOptions MembershipOptions MemoryOptions ObservingOptions RpcBackendOptions TlsOptions",
    "farcall.rpc": "functions",
    "farcall.rpc.batches": "batched",
    "farcall.rpc.combine": "as_completed gather",
    "farcall.rpc.future": "Future",
    "farcall.rpc.handles": "Worker worker",
    "farcall.rpc.mapping": "map",
    "farcall.rpc.remote_tensor": "RemoteTensor share",
    "farcall.rpc.retry": "Retry",
    "farcall.rpc.rref": "RRef",
    "farcall.rpc.streams": "outgoing Stream",
    "farcall.runtime.calls.scope": "current_call CurrentCall",
    "farcall.runtime.membership.events": "MemberEvent",
    "farcall.weights.parts": "Part publish_part subscribe_parts",
}
"""The public names, and those that programs for torch use, by the module that each comes from."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_MODULES = (*_NAMES["farcall"].split(), "functions")

__all__ = [
    "Cluster",
    "CurrentCall",
    "Future",
    "LimitOptions",
    "MemberEvent",
    "MembershipOptions",
    "MemoryOptions",
    "Node",
    "ObservingOptions",
    "Part",
    "RRef",
    "RemoteTensor",
    "Retry",
    "RpcBackendOptions",
    "Stream",
    "TlsOptions",
    "Worker",
    "WorkerInfo",
    "all_gather",
    "allow",
    "as_completed",
    "autograd",
    "barrier",
    "batched",
    "compat",
    "current_call",
    "debug",
    "errors",
    "functions",
    "gather",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "launch",
    "map",
    "member_events",
    "members",
    "metrics",
    "nn",
    "on_member",
    "optim",
    "outgoing",
    "profile",
    "publish",
    "publish_part",
    "remote",
    "rpc_async",
    "rpc_sync",
    "share",
    "shared_empty",
    "shutdown",
    "subscribe",
    "subscribe_parts",
    "torchscript",
    "wait_all",
    "worker",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farcall' has no attribute {name!r}")
    with gc_paused():
        found = import_module(f"{home}.{name}") if name in _MODULES else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
