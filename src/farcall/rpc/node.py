"""`farcall.Node`: a member of a cluster as an object, for those who want more than one in a process.

The runtime's node plus the vocabulary of calls. The module-level functions of `farcall.api` do the same for the current
node; nothing here knows that there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from farcall.autograd.recorder import attach_to
from farcall.ids import WorkerInfo
from farcall.rpc.call import UNSET_TIMEOUT, call_sync
from farcall.rpc.future import Future, call_async
from farcall.rpc.gather import gather
from farcall.rpc.references import NodeReferences, call_remote
from farcall.rpc.retry import Retry, async_with, remote_with, sync_with
from farcall.rpc.rref import RRef
from farcall.runtime import node
from farcall.runtime.rendezvous.rendezvous import Membership

T = TypeVar("T")


class Node(node.Node):
    """One member. A context manager: it starts on entry, and leaves, gracefully unless something was raised, on exit.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        rank: unique number, below ``world_size`` if there is one.
        world_size: number of members; None: the group has no fixed size, unless the environment or the url says one.
        options: see `RpcBackendOptions`.
    """

    checks_leaks = False
    """Should a graceful shutdown raise `ReferenceLeak` if references to values of this node are never given up?"""

    def __enter__(self) -> Node:
        super().__enter__()
        return self

    def _become_member(self, membership: Membership) -> None:
        super()._become_member(membership)
        attach_to(self)
        self.part(NodeReferences)  # before anybody can send one here

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        if not self.running:
            super().shutdown(graceful, timeout_s)  # one that was expelled is ending by itself: wait for that
            return
        parting = self.part(NodeReferences).parting
        parting.checks_leaks = self.checks_leaks and graceful
        super().shutdown(graceful, timeout_s)
        parting.raise_leaks()

    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> T:
        """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result, or raise what it raised."""
        if retry is not None:
            return sync_with(retry, self, to, func, args, kwargs, timeout)  # type: ignore[no-any-return]
        return call_sync(self, to, func, args, kwargs, timeout)  # type: ignore[no-any-return]

    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[T]:
        """Like `rpc_sync`, but return at once: a ``torch.futures.Future`` that can also be awaited."""
        if retry is not None:
            return async_with(retry, self, to, func, args, kwargs, timeout)
        return call_async(self, to, func, args, kwargs, timeout)

    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[T]:
        """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result; return a reference to it at once."""
        if retry is not None:
            return remote_with(retry, self, to, func, args, kwargs, timeout)
        return call_remote(self, to, func, args, kwargs, timeout)

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """The `WorkerInfo` of a name or rank; without one, of this node itself."""
        return self.info if worker is None else self.peer(worker).info

    def all_gather(
        self, value: T, worker_names: Iterable[str] | None = None, timeout: float = UNSET_TIMEOUT
    ) -> dict[str, T]:
        """Every worker's ``value`` by name; all of ``worker_names`` (or all there are) must call this equally often."""
        return gather(self, value, worker_names, timeout)

    def barrier(self, worker_names: Iterable[str] | None = None, timeout: float = UNSET_TIMEOUT) -> None:
        """Return when all of ``worker_names`` (or all there are) have called this."""
        gather(self, None, worker_names, timeout)

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in shared memory, which workers on this host see instead of a copy of it."""
        return torch.empty(shape, dtype=dtype) if self.pool is None else self.pool.empty(shape, dtype)
