"""`farcall.Node`: a member of a cluster as an object, for programs that want more than one in a process.

A node *has* a runtime, from its start on, and offers the vocabulary of calls over it. The module-level functions of
`farcall.api` do the same over the current runtime. Owns the list of layers that every runtime starts with.

A program pays only for the layers it uses: those beyond plain calls are imported at their first use. By then the
program's threads run, so each import is a function's first line, and each layer is one `Runtime.part`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args, overload

import torch

from farcall.autograd.recorder import Recorder
from farcall.errors import InitError, NotInitialized
from farcall.html import table
from farcall.ids import MemberInfo, WorkerInfo, check_worker_name
from farcall.imports import UNGUARDED, child_imports_program
from farcall.observe.logs import log_as_told
from farcall.observe.observability import Observability
from farcall.observe.snapshot import WorkerSnapshot, take_snapshot
from farcall.options import RpcBackendOptions
from farcall.protocol.streams import StreamClosed, StreamCredit
from farcall.protocol.weights import messages as weights_messages
from farcall.rpc.call import call_sync
from farcall.rpc.functions import Awaited
from farcall.rpc.future import Future, call_async
from farcall.rpc.references import NodeReferences, call_remote
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.membership.events import MemberEvent
from farcall.runtime.node import Runtime, serve, start_runtime
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.node.rejoin import join_again
from farcall.runtime.rendezvous.dynamic import GroupIsOver, Meeting
from farcall.serialize import restrict
from farcall.serialize.allowance import read_table

if TYPE_CHECKING:
    from farcall.observe.metrics import Metrics
    from farcall.rpc.handles import Target, Worker
    from farcall.rpc.node_streams import Streams
    from farcall.rpc.retry import Retry
    from farcall.weights.node import Weights
    from farcall.weights.publication import Publication
    from farcall.weights.subscription import Subscription

T = TypeVar("T")


class Node:
    """One member. A context manager: it starts on entry, and leaves, gracefully unless something was raised, on exit.

    ``async with`` does the same without holding up the event loop.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        rank: unique number, below ``world_size`` if there is one.
        world_size: number of members; None: that of the environment or the url, else the group has no fixed size.
        options: see `RpcBackendOptions`.
    """

    checks_leaks: bool = False
    """Should a graceful shutdown raise `ReferenceLeak` if references to values of this node are never given up?"""

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
    ) -> None:
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise TypeError(f"the options must be a farcall.RpcBackendOptions, not {type(options).__name__}")
        self._lifecycle = Lifecycle(check_worker_name(name))
        self._rank = rank
        self._world_size = world_size
        self._options = options or RpcBackendOptions()
        self._started: Runtime | None = None

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("state", self._lifecycle.state)]
        if self._started is not None and self._started.running:
            node = self._started
            rows += [("rank", node.info.id), ("members", ", ".join(worker.name for worker in node.workers()))]
            rows += [("live page", self.dashboard_url)] if self.dashboard_url else []
        return table(f"Node {self._lifecycle.name}", rows)

    def __repr__(self) -> str:
        if self._started is not None:
            return repr(self._started)
        return f"<Node {self._lifecycle.name!r}: {self._lifecycle.state}>"

    @property
    def _runtime(self) -> Runtime:
        if self._started is None:
            raise self._lifecycle.why_ended or NotInitialized(f"the node {self._lifecycle.name} is starting")
        return self._started

    def start(self) -> None:
        """Meet the other members and connect to each; raises within the options' start timeout."""
        self._connect()
        self._serve()

    def _connect(self) -> None:
        if not self._lifecycle.move("start"):
            raise RuntimeError(f"node {self._lifecycle.name!r} was started before; make a new one")
        if child_imports_program():
            self._lifecycle.end()
            raise InitError(UNGUARDED)
        options = self._options
        try:
            log_as_told(options.observing.log)
            if options.allowed is not None:
                restrict(read_table(options.allowed))
            self._started = self._become_member()
        except BaseException:
            self._lifecycle.end()
            raise

    def _serve(self) -> None:
        """Make and serve calls from now on."""
        try:
            serve(self._runtime)
        except BaseException:
            self._lifecycle.end()
            raise

    def _become_member(self) -> Runtime:
        try:
            return self._start(self._lifecycle)
        except GroupIsOver as error:
            # The group's last members left just now. A worker that comes back to this place makes a new group.
            self._lifecycle = Lifecycle(self._lifecycle.name)
            self._lifecycle.move("start")
            return self._start(self._lifecycle, over=error.cluster_id)

    def _start(self, lifecycle: Lifecycle, way_back: Meeting | None = None, over: str = "") -> Runtime:
        make_calls: Callable[..., CallTable] = CallTable
        if self._options.observing.opentelemetry:
            from farcall.observe.telemetry import Telemetry, TracedCalls

            make_calls = partial(TracedCalls, telemetry=Telemetry(lifecycle.name))
        return start_runtime(
            lifecycle,
            self._rank,
            self._world_size,
            self._options,
            parts=(Recorder, NodeReferences, _start_engine, _load_later, Observability),
            make_calls=make_calls,
            come_back=self._come_back,
            way_back=way_back,
            over=over,
        )

    def _come_back(self, expelled: Runtime, way_back: Meeting) -> None:
        def hold(successor: Runtime) -> None:
            successor.part(NodeReferences).traced = expelled.part(NodeReferences).traced
            self._lifecycle, self._started = successor.lifecycle, successor

        def start(lifecycle: Lifecycle) -> Runtime:
            successor = self._start(lifecycle, way_back)
            serve(successor)
            return successor

        join_again(expelled, way_back, start, hold)

    def __enter__(self) -> Self:
        if self._lifecycle.state == "new":
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the others may wait for calls that never come: do not wait for them.
        self.shutdown(graceful=kind is None)

    async def __aenter__(self) -> Self:
        # On a thread of its own: the others may take long to come, and the event loop must go on meanwhile.
        await asyncio.to_thread(self.__enter__)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.aclose(graceful=kind is None)

    async def aclose(self, graceful: bool = True, timeout: float | None = None) -> None:
        """`shutdown` for a coroutine: the event loop goes on meanwhile."""
        await asyncio.to_thread(self.shutdown, graceful, timeout)

    def shutdown(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leave the cluster. Graceful: wait until all work everywhere is done, at most ``timeout`` seconds if given."""
        if self._started is not None:
            leave(self._started, graceful, timeout, self.checks_leaks)

    def __getitem__(self, to: str | int | WorkerInfo) -> Worker:
        """A handle of the worker ``to``, called by this node: ``node["ps"].call(function, argument)``."""
        from farcall.rpc.handles import handle_of

        return handle_of(self._runtime, to)

    @overload
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Awaited[T]],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> T: ...
    @overload
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> T: ...
    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> Any:
        """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result, or raise what it raised."""
        if retry is not None:
            from farcall.rpc.retry import sync_with

            return sync_with(retry, self._runtime, to, func, args, kwargs, timeout)
        return call_sync(self._runtime, to, func, args, kwargs, timeout)

    @overload
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Awaited[T]],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[T]: ...
    @overload
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[T]: ...
    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[Any]:
        """Like `rpc_sync`, but return at once: a ``torch.futures.Future`` that can also be awaited."""
        if retry is not None:
            from farcall.rpc.retry import async_with

            return async_with(retry, self._runtime, to, func, args, kwargs, timeout)
        return call_async(self._runtime, to, func, args, kwargs, timeout)

    @overload
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Awaited[T]],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[T]: ...
    @overload
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[T]: ...
    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[Any]:
        """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result; return a reference to it at once."""
        if retry is not None:
            from farcall.rpc.retry import remote_with

            return remote_with(retry, self._runtime, to, func, args, kwargs, timeout)
        return call_remote(self._runtime, to, func, args, kwargs, timeout)

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """The `WorkerInfo` of a name or rank; without one, of this node itself."""
        runtime = self._runtime
        return runtime.info if worker is None else runtime.peer(worker).info

    def workers(self) -> list[WorkerInfo]:
        """All members, by rank; where members come and go, the present ones."""
        return self._runtime.workers()

    def members(self) -> list[MemberInfo]:
        """All members, each with ``unresponsive_s``: for how long it has answered nobody, or None."""
        return self._runtime.members_now()

    def on_member(self, callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
        """Have ``callback`` told, on a worker thread, of members that join, leave, fall silent, recover or die.

        Call the returned function to end that.
        """
        return self._runtime.member_events.subscribe(callback)

    def member_events(self) -> AsyncIterator[MemberEvent]:
        """The events of `on_member` as an async iterator, from now on until the node ends."""
        return self._runtime.member_events.iterate()

    def all_gather(
        self, value: T, worker_names: Iterable[Target] | None = None, timeout: float | None = UNSET_TIMEOUT
    ) -> dict[str, T]:
        """Every worker's ``value`` by name; all of ``worker_names`` (or all there are) must call this equally often."""
        from farcall.rpc.gather import gather

        return gather(self._runtime, value, worker_names, timeout)

    def barrier(self, worker_names: Iterable[Target] | None = None, timeout: float | None = UNSET_TIMEOUT) -> None:
        """Return when all of ``worker_names`` (or all there are) have called this."""
        self.all_gather(None, worker_names, timeout)

    def shared_empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in shared memory, which workers on this host see instead of a copy of it."""
        return self._runtime.shared_empty(shape, dtype)

    def publish(self, name: str, source: Any, keep: int = 2) -> Publication:
        """Publish the tensors of ``source`` from this worker; see `farcall.publish`."""
        return weights_of(self._runtime).publish(name, source, keep)

    def subscribe(self, name: str) -> Subscription:
        """Read what any worker publishes under ``name``; see `farcall.subscribe`."""
        return weights_of(self._runtime).subscribe(name)

    def metrics(self) -> Metrics:
        """The counters and gauges of this worker: see `farcall.observe.metrics.Metrics`."""
        from farcall.observe.metrics import collect

        return collect(self._runtime)

    def snapshot(self) -> WorkerSnapshot:
        """The calls that this worker makes and serves at this moment, and the stacks of its threads."""
        return take_snapshot(self._runtime)

    @property
    def metrics_port(self) -> int | None:
        """The port that serves metrics for Prometheus, if any."""
        return None if self._started is None else self._started.part(Observability).metrics_port

    @property
    def dashboard_url(self) -> str | None:
        """The address of the live page, if it is served."""
        return None if self._started is None else self._started.part(Observability).dashboard_url


def weights_of(runtime: Runtime) -> Weights:
    """The published weights of a node."""
    from farcall.weights.node import Weights

    return runtime.part(Weights)


def _streams_of(runtime: Runtime) -> Streams:
    from farcall.rpc.node_streams import Streams

    return runtime.part(Streams)


def _load_later(runtime: Runtime) -> None:
    """Have the first message for a layer that most programs never use load it."""
    runtime.hooks.on_first(get_args(weights_messages.Message), lambda: weights_of(runtime))
    credit = (StreamCredit, StreamClosed)
    runtime.hooks.on_first(credit, lambda: _streams_of(runtime))
    runtime.server.stream_request = lambda server, peer, frame: _streams_of(runtime).request(server, peer, frame)


def _start_engine(runtime: Runtime) -> None:
    """Start the transfer engine, if the options name one: its errors are errors of `init_rpc`, not of a later copy."""
    if runtime.options.memory.transfer_engine is not None:
        from farcall.rpc.transfers import Transfers

        runtime.part(Transfers)


def leave(runtime: Runtime, graceful: bool, timeout: float | None, checks_leaks: bool) -> None:
    """Have the node leave its cluster; with ``checks_leaks``, raise if references were held to the last."""
    timeout_s = 0.0 if timeout is None else check_timeout(timeout)
    if not runtime.running:
        runtime.shutdown(graceful, timeout_s)  # waits for an expelled node, which ends by itself
        return
    references = runtime.part(NodeReferences).shutdown
    references.checks_leaks = checks_leaks and graceful
    runtime.shutdown(graceful, timeout_s)
    references.raise_leaks()
