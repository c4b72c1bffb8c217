"""A worker as an object to call: ``farcall.worker("ps").call(function, argument)``.

A handle is a value: a worker's name and the options of its calls. It holds no connection, so it can be compared, kept
in a set and sent to other workers, and it stays valid when its worker restarts. `farcall.api` and this module call the
same functions; handles add precise types and take the arguments of the called function directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

import torch

from farcall.ids import WorkerInfo
from farcall.rpc.call import call_sync
from farcall.rpc.future import Future, call_async
from farcall.rpc.references import call_remote
from farcall.rpc.retry import Retry, async_with, check_retry, remote_with, sync_with
from farcall.rpc.rref import RRef
from farcall.rpc.streams import Stream, open_stream
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.scope import CURRENT, Labelled
from farcall.runtime.node import Runtime, current_runtime

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A worker to call, by name. `farcall.worker` and ``node[name]`` make it."""

    __slots__ = ("_metadata", "_node", "_retry", "_serial", "_timeout", "name")

    def __init__(
        self,
        name: str,
        *,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
        metadata: Mapping[str, str] | None = None,
        serial: bool = False,
        node: Runtime | None = None,
    ) -> None:
        """``node``: the node that calls. None: the node that is current at each call."""
        if timeout is not UNSET_TIMEOUT:
            check_timeout(timeout)
        if retry is not None:
            check_retry(retry)
        self.name: str = name
        self._timeout = timeout
        self._retry = retry
        self._metadata = None if metadata is None else _check_metadata(metadata)
        self._serial = serial
        self._node = node

    def _calling(self) -> Runtime:
        return current_runtime() if self._node is None else self._node.newest()

    def options(
        self,
        *,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
        metadata: Mapping[str, str] | None = None,
        serial: bool | None = None,
    ) -> Worker:
        """Return a handle of the same worker with other options; options that are not given stay as they are.

        Args:
            timeout: seconds; within a served call, never more than that call has left. None: no limit at all.
            retry: for functions that may run more than once: call again when the network fails the call.
            metadata: travels with the call and with the calls that its function makes; see `farcall.current_call`.
            serial: for `create`: calls of the object's methods run one at a time, those of one caller in the order in
                which it made them. An ``async def`` yields its turn at each ``await``, a generator after each item.
        """
        return Worker(
            self.name,
            timeout=self._timeout if timeout is UNSET_TIMEOUT else timeout,
            retry=self._retry if retry is None else retry,
            metadata=self._metadata if metadata is None else {**(self._metadata or {}), **metadata},
            serial=self._serial if serial is None else serial,
            node=self._node,
        )

    # The overloads unwrap the results that the callee awaits: a coroutine, or the future of `async_execution`.

    @overload
    def call(self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def call(self, func: Callable[P, torch.futures.Future[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def call(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)`` on the worker; return its result or raise its error."""
        if self._metadata is not None:
            return self._labelled(Worker.call, func, args, kwargs)
        if self._retry is not None:
            return sync_with(self._retry, self._calling(), self.name, func, args, kwargs, self._timeout)
        node = current_runtime() if self._node is None else self._node.newest()  # `_calling`, inlined: the hot path
        return call_sync(node, self.name, func, args, kwargs, self._timeout)

    @overload
    def start(self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def start(self, func: Callable[P, torch.futures.Future[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def start(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def start(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Like `call`, but return a future at once; await it, or ask for its ``result()``."""
        if self._metadata is not None:
            return self._labelled(Worker.start, func, args, kwargs)  # type: ignore[no-any-return]
        if self._retry is not None:
            return async_with(self._retry, self._calling(), self.name, func, args, kwargs, self._timeout)
        node = current_runtime() if self._node is None else self._node.newest()  # `_calling`, inlined: the hot path
        return call_async(node, self.name, func, args, kwargs, self._timeout)

    @overload
    def create(self, func: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    @overload
    def create(self, func: Callable[P, torch.futures.Future[T]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    @overload
    def create(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]: ...
    def create(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Run ``func(*args, **kwargs)``, most often a class, on the worker; return a reference to its result there."""
        if self._metadata is not None:
            return self._labelled(Worker.create, func, args, kwargs)  # type: ignore[no-any-return]
        node = self._calling()
        if self._retry is not None:
            return remote_with(self._retry, node, self.name, func, args, kwargs, self._timeout, serial=self._serial)
        return call_remote(node, self.name, func, args, kwargs, self._timeout, serial=self._serial)

    @overload
    def stream(self, func: Callable[P, AsyncIterable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
    @overload
    def stream(self, func: Callable[P, Iterable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
    def stream(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Run ``func(*args, **kwargs)``, most often a generator, on the worker; iterate over its items as they arrive.

        The callee runs ahead of the reader by at most a window of items and bytes. A ``timeout`` of `options` bounds
        the whole stream; without one, each wait for an item has the default timeout.
        """
        if self._metadata is not None:
            return self._labelled(Worker.stream, func, args, kwargs)  # type: ignore[no-any-return]
        if self._retry is not None:
            raise ValueError("a stream cannot be retried once items were read: use a handle without retry")
        return open_stream(self._calling(), self.name, func, args, kwargs, self._timeout)

    def _labelled(self, make: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``make``, a method of `Worker`, in a scope with this handle's metadata."""
        plain = Worker(self.name, timeout=self._timeout, retry=self._retry, serial=self._serial, node=self._node)
        token = CURRENT.set(Labelled(CURRENT.get(), self._metadata or {}))
        try:
            return make(plain, func, *args, **kwargs)
        finally:
            CURRENT.reset(token)

    def __repr__(self) -> str:
        timeout = "" if self._timeout is UNSET_TIMEOUT else f", timeout={self._timeout!r}"
        retry = "" if self._retry is None else f", retry={self._retry!r}"
        metadata = "" if self._metadata is None else f", metadata={self._metadata!r}"
        serial = ", serial=True" if self._serial else ""
        return f"farcall.worker({self.name!r}{timeout}{retry}{metadata}{serial})"

    def _key(self) -> tuple[object, ...]:
        metadata = None if self._metadata is None else tuple(sorted(self._metadata.items()))
        return self.name, self._timeout, self._retry, metadata, self._serial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Worker) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return _arrived, self._key()


def _arrived(
    name: str,
    timeout: float | None,
    retry: Retry | None,
    metadata: tuple[tuple[str, str], ...] | None,
    serial: bool,
) -> Worker:
    texts = None if metadata is None else dict(metadata)
    return Worker(name, timeout=timeout, retry=retry, metadata=texts, serial=serial)


def _check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise TypeError(f"metadata must be a dict of str to str, not {metadata!r}")
    return dict(metadata)


Target: TypeAlias = str | int | WorkerInfo | Worker
"""What names a worker: its name, its rank, its `WorkerInfo`, or a handle."""


def worker(to: Target) -> Worker:
    """Return a handle of the worker ``to``: a name, a `WorkerInfo`, a member's rank, or a handle, without its options.

    The name need not belong to a member yet: each call looks it up.
    """
    return handle_of(None, to)


def handle_of(node: Runtime | None, to: Target) -> Worker:
    """Return a handle of the worker ``to`` that calls from ``node``. None: from the node current at each call."""
    if isinstance(to, (WorkerInfo, Worker)):
        return Worker(to.name, node=node)
    if isinstance(to, int):
        return Worker((node or current_runtime()).peer(to).info.name, node=node)
    if not isinstance(to, str):
        raise TypeError(f"a worker is named by a str, a rank, a WorkerInfo or a handle, not by {type(to).__name__}")
    return Worker(to, node=node)
