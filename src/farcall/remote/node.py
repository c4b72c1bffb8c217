"""`farcall.Node`: a member of a cluster as an object, for those who want more than one in a process.

The runtime's node plus the vocabulary of calls. The module-level functions of `farcall.api` do the same for the current
node; nothing here knows that there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from farcall.ids import WorkerInfo
from farcall.remote.call import UNSET_TIMEOUT, call_async, call_sync
from farcall.remote.future import Future
from farcall.remote.gather import gather
from farcall.runtime import node

T = TypeVar("T")


class Node(node.Node):
    """One member. A context manager: it starts on entry, and leaves, gracefully unless something was raised, on exit.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        rank: unique number from 0 to ``world_size - 1``.
        world_size: number of members.
        options: see `RpcBackendOptions`.
    """

    def __enter__(self) -> Node:
        super().__enter__()
        return self

    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> T:
        """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result, or raise what it raised."""
        return call_sync(self, to, func, args, kwargs, timeout)  # type: ignore[no-any-return]

    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future[T]:
        """Like `rpc_sync`, but return at once: a ``torch.futures.Future`` that can also be awaited."""
        return call_async(self, to, func, args, kwargs, timeout)

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """The `WorkerInfo` of a name or rank; without one, of this node itself."""
        return self.info if worker is None else self.peer(worker).info

    def all_gather(
        self, value: T, worker_names: Iterable[str] | None = None, timeout: float = UNSET_TIMEOUT
    ) -> dict[str, T]:
        """Every worker's ``value`` by name; all of ``worker_names`` (or all there are) must call this, equally often."""
        return gather(self, value, worker_names, timeout)

    def barrier(self, worker_names: Iterable[str] | None = None, timeout: float = UNSET_TIMEOUT) -> None:
        """Return when all of ``worker_names`` (or all there are) have called this."""
        gather(self, None, worker_names, timeout)

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in shared memory, which workers on this host see instead of a copy of it."""
        return torch.empty(shape, dtype=dtype) if self.pool is None else self.pool.empty(shape, dtype)
