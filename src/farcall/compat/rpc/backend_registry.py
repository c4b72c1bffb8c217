"""``torch.distributed.rpc.backend_registry``: kinds of backends by name.

``TENSORPIPE``, the only one that programs normally know, is farcall. Programs can register others, with functions that
make their options and their agent. As in torch, each registration makes a new enumeration `BackendType`; members of an
earlier one are still valid.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from farcall.compat.rpc import api, constants
from farcall.compat.rpc.agent import TensorPipeAgent
from farcall.compat.rpc.options import TensorPipeRpcBackendOptions
from farcall.compat.rpc.unserved import find_unserved

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that make a backend's options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _make_type(members: dict[str, BackendValue]) -> Any:
    make: Any = enum.Enum
    made: Any = make("BackendType", members, module=__name__)
    made.__repr__ = lambda self: f"BackendType.{self.name}"
    made.__doc__ = "All backends: ``TENSORPIPE``, which is farcall, and those that were registered."
    return made


def is_member(backend: Any) -> bool:
    """Is it a member of the present `BackendType`, or of an earlier one?"""
    is_backend = isinstance(backend, enum.Enum) and isinstance(backend.value, BackendValue)
    return is_backend and backend_registered(backend.name)


def backend_registered(backend_name: str) -> bool:
    """Is there a backend of that name?"""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend, and return its member of `BackendType`."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    added = {backend_name: BackendValue(construct_rpc_backend_options_handler, init_backend_handler)}
    BackendType = _make_type({**added, **{member.name: member.value for member in BackendType}})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """The options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend, and return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **kwargs: Any,
) -> Any:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def start_agent(
    kind: type[TensorPipeAgent], store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    """Make an agent of that kind the current one; checks the arguments as torch does."""
    if store is not None and not isinstance(store, dist.Store):  # type: ignore[attr-defined]
        raise TypeError(f"`store` must be a torch.distributed.Store, not {type(store).__name__}")
    if not isinstance(rpc_backend_options, kind.options_class):
        raise TypeError(f"`rpc_backend_options` must be a `{kind.options_class.__name__}`. {rpc_backend_options}")
    agent = kind(store, name, rank, world_size, rpc_backend_options)
    api._init_rpc_states(agent)
    return agent


_tensorpipe_init_backend_handler = partial(start_agent, TensorPipeAgent)
BackendType: Any = _make_type(
    {"TENSORPIPE": BackendValue(_tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)}
)


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
