"""``WorkerInfo`` as programs make it: with the name checked. Those that farcall makes itself count as such, too."""

from __future__ import annotations

from typing import Any

from farcall import ids
from farcall.errors import RpcError

__all__ = ["WorkerInfo"]


class _AnyWorkerInfo(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, ids.WorkerInfo)


class WorkerInfo(ids.WorkerInfo, metaclass=_AnyWorkerInfo):
    """A member of the cluster: its unique ``name`` and its rank, called ``id``."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> WorkerInfo:
        if not name:
            raise RpcError("Worker name must be non-empty")
        if len(name) > ids.MAX_NAME_CHARACTERS:
            raise RpcError(f"Worker name must be shorter than 128 characters, this one has {len(name)}")
        try:
            ids.check_worker_name(name)
        except ValueError as error:
            raise RpcError(f"Worker name must match ^[A-Za-z0-9-_:]*$: {error}") from None
        return super().__new__(cls, name, id)
