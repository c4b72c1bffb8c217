"""``torch._C._distributed_rpc``, which torch has in C++, and ``torch.distributed.rpc._utils``, over farcall."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farcall.api import (
    _delete_all_user_and_unforked_owner_rrefs,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
)
from farcall.compat.rpc.agent import RpcAgent, TensorPipeAgent, WorkerInfo, enable_gil_profiling
from farcall.compat.rpc.agent import current_agent as _get_current_rpc_agent
from farcall.compat.rpc.agent import is_agent_set as _is_current_rpc_agent_set
from farcall.compat.rpc.agent import reset_agent as _reset_current_rpc_agent
from farcall.compat.rpc.agent import set_agent as _set_and_start_rpc_agent
from farcall.compat.rpc.constants import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farcall.compat.rpc.constants import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farcall.compat.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from farcall.compat.rpc.options import RpcBackendOptions, _TensorPipeRpcBackendOptionsBase
from farcall.compat.rpc.unserved import find_unserved
from farcall.rpc.rref import RRef as PyRRef
from farcall.runtime.node import current_runtime
from farcall.torchscript import bridging

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_enable_jit_rref_pickle",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]


def get_rpc_timeout() -> float:
    """The default timeout of this process's calls, in seconds; 0: they have no limit."""
    return current_runtime().timeout_s


def _set_profiler_node_id(node_id: int) -> None:
    """Give the profiler's events of this process a number."""
    import torch

    set_node_id = getattr(torch.autograd, "_set_profiler_node_id", None)  # not in a torch without RPC
    if set_node_id is not None:
        set_node_id(node_id)


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Do nothing: a node's references end with it."""


def _cleanup_python_rpc_handler() -> None:
    """Do nothing: farcall keeps no Python objects outside of Python."""


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold nothing: farcall's members agree among themselves."""
    yield


def _update_group_membership(worker_info: Any, my_devices: Any, reverse_device_map: Any, is_join: bool) -> Any:
    return _get_current_rpc_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)


def _enable_jit_rref_pickle() -> None:
    """Let TorchScript write references into files; see `farcall.torchscript.bridging.allow_pickling`."""
    bridging.allow_pickling(True)


def _disable_jit_rref_pickle() -> None:
    """Let TorchScript write no references any more."""
    bridging.allow_pickling(False)


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
