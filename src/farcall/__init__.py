"""farcall: remote procedure calls for PyTorch, a maintained successor of ``torch.distributed.rpc``."""

from importlib import import_module
from typing import TYPE_CHECKING

from farcall.imports import importing_much

if TYPE_CHECKING:
    from farcall import autograd as autograd
    from farcall import debug as debug
    from farcall import errors as errors
    from farcall import nn as nn
    from farcall import optim as optim
    from farcall.api import (
        _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
    )
    from farcall.api import _rref_context_get_debug_info as _rref_context_get_debug_info
    from farcall.api import _set_rpc_timeout as _set_rpc_timeout
    from farcall.api import _use_rpc_pickler as _use_rpc_pickler
    from farcall.api import all_gather as all_gather
    from farcall.api import allow as allow
    from farcall.api import barrier as barrier
    from farcall.api import get_rpc_timeout as get_rpc_timeout
    from farcall.api import get_worker_info as get_worker_info
    from farcall.api import init_rpc as init_rpc
    from farcall.api import member_events as member_events
    from farcall.api import members as members
    from farcall.api import metrics as metrics
    from farcall.api import on_member as on_member
    from farcall.api import publish as publish
    from farcall.api import remote as remote
    from farcall.api import rpc_async as rpc_async
    from farcall.api import rpc_sync as rpc_sync
    from farcall.api import shared_empty as shared_empty
    from farcall.api import shutdown as shutdown
    from farcall.api import subscribe as subscribe
    from farcall.api import wait_all as wait_all
    from farcall.ids import WorkerInfo as WorkerInfo
    from farcall.launcher.cluster import Cluster as Cluster
    from farcall.launcher.launch import launch as launch
    from farcall.node import Node as Node
    from farcall.observe.cluster import profile as profile
    from farcall.options import LimitOptions as LimitOptions
    from farcall.options import MembershipOptions as MembershipOptions
    from farcall.options import MemoryOptions as MemoryOptions
    from farcall.options import ObservingOptions as ObservingOptions
    from farcall.options import RpcBackendOptions as RpcBackendOptions
    from farcall.options import TlsOptions as TlsOptions
    from farcall.rpc import functions as functions
    from farcall.rpc.batches import batched as batched
    from farcall.rpc.combine import as_completed as as_completed
    from farcall.rpc.combine import gather as gather
    from farcall.rpc.future import Future as Future
    from farcall.rpc.handles import Worker as Worker
    from farcall.rpc.handles import worker as worker
    from farcall.rpc.mapping import map as map
    from farcall.rpc.remote_tensor import RemoteTensor as RemoteTensor
    from farcall.rpc.remote_tensor import share as share
    from farcall.rpc.retry import Retry as Retry
    from farcall.rpc.rref import RRef as RRef
    from farcall.rpc.streams import Stream as Stream
    from farcall.rpc.streams import outgoing as outgoing
    from farcall.runtime.calls.scope import CurrentCall as CurrentCall
    from farcall.runtime.calls.scope import current_call as current_call
    from farcall.runtime.membership.events import MemberEvent as MemberEvent
    from farcall.weights.parts import Part as Part
    from farcall.weights.parts import publish_part as publish_part
    from farcall.weights.parts import subscribe_parts as subscribe_parts

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "farcall.launcher.cluster",
    "CurrentCall": "farcall.runtime.calls.scope",
    "Future": "farcall.rpc.future",
    "LimitOptions": "farcall.options",
    "MemberEvent": "farcall.runtime.membership.events",
    "MembershipOptions": "farcall.options",
    "MemoryOptions": "farcall.options",
    "Node": "farcall.node",
    "ObservingOptions": "farcall.options",
    "Part": "farcall.weights.parts",
    "RRef": "farcall.rpc.rref",
    "RemoteTensor": "farcall.rpc.remote_tensor",
    "Retry": "farcall.rpc.retry",
    "RpcBackendOptions": "farcall.options",
    "Stream": "farcall.rpc.streams",
    "TlsOptions": "farcall.options",
    "Worker": "farcall.rpc.handles",
    "WorkerInfo": "farcall.ids",
    "_delete_all_user_and_unforked_owner_rrefs": "farcall.api",
    "_rref_context_get_debug_info": "farcall.api",
    "_set_rpc_timeout": "farcall.api",
    "_use_rpc_pickler": "farcall.api",
    "all_gather": "farcall.api",
    "allow": "farcall.api",
    "as_completed": "farcall.rpc.combine",
    "autograd": "farcall",
    "barrier": "farcall.api",
    "batched": "farcall.rpc.batches",
    "current_call": "farcall.runtime.calls.scope",
    "debug": "farcall",
    "errors": "farcall",
    "functions": "farcall.rpc",
    "gather": "farcall.rpc.combine",
    "get_rpc_timeout": "farcall.api",
    "get_worker_info": "farcall.api",
    "init_rpc": "farcall.api",
    "launch": "farcall.launcher.launch",
    "map": "farcall.rpc.mapping",
    "member_events": "farcall.api",
    "members": "farcall.api",
    "metrics": "farcall.api",
    "nn": "farcall",
    "on_member": "farcall.api",
    "optim": "farcall",
    "outgoing": "farcall.rpc.streams",
    "profile": "farcall.observe.cluster",
    "publish": "farcall.api",
    "publish_part": "farcall.weights.parts",
    "remote": "farcall.api",
    "rpc_async": "farcall.api",
    "rpc_sync": "farcall.api",
    "share": "farcall.rpc.remote_tensor",
    "shared_empty": "farcall.api",
    "shutdown": "farcall.api",
    "subscribe": "farcall.api",
    "subscribe_parts": "farcall.weights.parts",
    "wait_all": "farcall.api",
    "worker": "farcall.rpc.handles",
}
_MODULES = ("autograd", "debug", "errors", "functions", "nn", "optim")

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
    "wait_all",
    "worker",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farcall' has no attribute {name!r}")
    with importing_much():
        found = import_module(f"{home}.{name}") if name in _MODULES else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
