"""``torch.distributed.rpc.internal``: the pickler that programs register reducers with, and some names.

`_internal_rpc_pickler` writes bytes plus a list of tensors, as torch's does. Farcall's own serializer writes calls, and
knows the reducers registered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from farcall.compat.rpc.unserved import find_unserved
from farcall.serialize import Encoding, TablePickler, register_reducer
from farcall.serialize.policy import REDUCERS

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception of the other side, as torch describes it; farcall raises the exception itself."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler(TablePickler):
    """Values to bytes plus a list of tensors, and back."""

    def _register_reducer(self, obj_class: type[Any], reducer: Callable[[Any], Any]) -> None:
        """Pickle instances of ``obj_class`` by ``reducer``; the first registration counts."""
        if obj_class in REDUCERS:
            return

        def reduce(value: Any, encoding: Encoding) -> Any:
            return reducer(value)

        register_reducer(obj_class, reduce)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of a value, and its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """The value of bytes and tensors."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call among a profiler's events."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
