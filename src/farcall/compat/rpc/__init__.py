"""``torch.distributed.rpc``, served by farcall: `farcall.compat.install` puts this package in its place.

Torch's names at torch's places. Each module here is named like torch's; `unserved` stands for parts of the old agent
that farcall does not have.
"""

from __future__ import annotations

import logging
import numbers
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from farcall.compat import autograd as dist_autograd
from farcall.compat.rpc import api, backend_registry, native, server_process_global_profiler
from farcall.compat.rpc.api import (
    AllGatherStates,
    RRef,
    get_worker_info,
    method_factory,
    new_method,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farcall.compat.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farcall.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from farcall.compat.rpc.unserved import find_unserved

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "method_factory",
    "new_method",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

# Torch's package has the names of torch._C._distributed_rpc, too.
globals().update({name: getattr(native, name) for name in native.__all__})
_utils = native
_server_process_global_profile = server_process_global_profiler._server_process_global_profile

logger: logging.Logger = logging.getLogger("farcall")
_is_tensorpipe_available = True
_init_counter = 0
_init_counter_lock = threading.Lock()


def is_available() -> bool:
    """Is RPC there? farcall is."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a member of a cluster, called ``name``.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        backend: a member of `BackendType`; by default that of the options, else ``TENSORPIPE``, which is farcall.
        rank: unique number of this worker.
        world_size: number of workers.
        rpc_backend_options: see `TensorPipeRpcBackendOptions`.
    """
    if backend is not None and not backend_registry.is_member(backend):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _find_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    # farcall opens its store itself, so that it can name missing workers; other backends get one.
    store = None if backend.name == "TENSORPIPE" else _open_store(rpc_backend_options, rank, world_size)
    dist_autograd._init(rank)
    _start(backend, store, name, rank, world_size, rpc_backend_options)


def _find_backend(rpc_backend_options: Any) -> Any:
    """The backend to which the options belong."""
    if rpc_backend_options is None:
        return backend_registry.BackendType["TENSORPIPE"]
    for candidate in backend_registry.BackendType:
        try:
            kind = type(backend_registry.construct_rpc_backend_options(candidate))
        except TypeError:
            continue  # a backend whose options have no defaults
        if isinstance(rpc_backend_options, kind):
            if candidate.name != "TENSORPIPE":
                logger.warning(
                    "no backend was given; the options belong to %s, so it is used. Pass backend=%s to avoid this",
                    candidate,
                    candidate,
                )
            return candidate
    raise TypeError(f"Could not infer backend for options {rpc_backend_options}")


def _open_store(rpc_backend_options: Any, rank: int, world_size: int | None) -> Any:
    global _init_counter
    if world_size:
        store, _, _ = next(dist.rendezvous(rpc_backend_options.init_method, rank=rank, world_size=world_size))  # type: ignore[attr-defined]
    else:
        store = dist._create_store_from_options(rpc_backend_options, rank)  # type: ignore[attr-defined,no-untyped-call]
    store.set_timeout(timedelta(seconds=rpc_backend_options.rpc_timeout))
    with _init_counter_lock:
        _init_counter += 1
        return dist.PrefixStore(f"rpc_prefix_{_init_counter - 1}", store)  # type: ignore[attr-defined]


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    wanted: list[tuple[Any, Any]] = [
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    if not backend_registry.is_member(backend):
        raise RuntimeError(f"Argument {backend} must be a member of BackendType but got type {type(backend)}")
    for argument, kind in wanted:
        if not isinstance(argument, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got type {type(argument)}")


def _init_rpc_backend(
    backend: Any = backend_registry.BackendType["TENSORPIPE"],
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start a backend whose members meet at ``store``."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    _start(backend, store, name, rank, world_size, rpc_backend_options)


def _start(backend: Any, store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> None:
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)
    native._set_profiler_node_id(agent.get_worker_info().id if isinstance(agent, native.RpcAgent) else rank)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """Numbers about references, the agent and autograd, as text."""
    info = dict(native._rref_context_get_debug_info())
    info.update(api._get_current_rpc_agent().get_debug_info())
    info.update(dist_autograd._get_debug_info())
    return info


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # made anew by each registration
        return backend_registry.BackendType
    return find_unserved(__name__, name)
