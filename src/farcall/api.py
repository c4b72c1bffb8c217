"""The functions of `torch.distributed.rpc`, over the current runtime of this process.

Each is a few lines; programs that want several nodes in a process use `farcall.Node`. `farcall.runtime.node.current`
keeps the current runtime; kept here are only the futures that a thread collects for `wait_all`, and torch's switch for
leaked references.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from farcall.errors import RpcError
from farcall.ids import MemberInfo, WorkerInfo
from farcall.imports import when_imported
from farcall.node import Node, leave, weights_of
from farcall.observe import torch_profilers as torch_profilers  # from here on they know of remote work
from farcall.options import RpcBackendOptions
from farcall.rpc.call import call_sync
from farcall.rpc.functions import Awaited
from farcall.rpc.future import Future, call_async
from farcall.rpc.references import NodeReferences, call_remote
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.membership.events import MemberEvent
from farcall.runtime.node import current_runtime as current_runtime
from farcall.runtime.node import runtime_of
from farcall.runtime.node.current import STARTED, slot, while_there_are_nodes
from farcall.serialize import Allowance, restrict, use_rpc_pickler

if TYPE_CHECKING:
    from farcall.observe.metrics import Metrics
    from farcall.rpc.handles import Target
    from farcall.rpc.retry import Retry
    from farcall.weights.publication import Publication
    from farcall.weights.subscription import Subscription

T = TypeVar("T")
logger: logging.Logger = logging.getLogger("farcall")

Destination = str | int | WorkerInfo

_ignore_rref_leak = True
"""False: record where each reference is created, and raise in a graceful `shutdown` if any is never given up."""
_collecting = threading.local()


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a member of a cluster, called ``name``; returns when all members are connected.

    With a ``world_size``, from the argument, the url or the environment, the group has that many members from the
    first to the last moment. Without one, this process joins the present members, at any time and with any free rank,
    or is the first; and `shutdown` leaves while the others go on.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        backend: accepted for the sake of programs written for ``torch.distributed.rpc``; farcall has one backend.
        rank: unique number from 0 to ``world_size - 1``; may come from ``init_method`` or the environment instead.
        world_size: number of members; may come from ``init_method`` or the environment. None: no fixed number.
        rpc_backend_options: see `RpcBackendOptions`.
    """
    if isinstance(backend, int) and not isinstance(backend, Enum):
        raise TypeError(f"backend={backend!r} is a number: write rank={backend!r}")
    with slot.lock:
        if slot.runtime is not None:
            raise RpcError(
                f"RPC is already initialized in this process, as {slot.runtime.info.name!r}: call shutdown() first, "
                "or use farcall.Node for more than one"
            )
        node = Node(name, rank, world_size, rpc_backend_options)
        node._connect()
        runtime = runtime_of(node)
        runtime.part(NodeReferences).traced = not _ignore_rref_leak
        slot.runtime = runtime  # before the first function runs: it may ask for it on a thread of its own
        try:
            node._serve()
        except BaseException:
            slot.runtime = None
            raise


def allow(
    functions: Iterable[Any] = (),
    classes: Iterable[Any] = (),
    *,
    trust: Literal["calls", "data"] = "calls",
    publishers: Mapping[str, str | Iterable[str]] = MappingProxyType({}),
) -> None:
    """Let others call, create and unpickle only these in this process. Call it before this process has a node.

    Everything else is refused by its name with ``NotAllowed``, before it is imported; so are callables that are sent by
    value. Plain values, containers, tensors and references always travel. Either all members of a group call this, or
    none: one that takes code cannot join one that does not.

    With "calls", the default, this keeps honest mistakes out, not enemies: arguments are still pickles. Among members
    who must not run code here, say ``trust="data"``.

    Args:
        functions: functions of modules, or their names, ``"module:name"``.
        classes: classes, or their names. Others may create instances and send them here, and call methods of those that
            this process owns through references, except names that begin with an underscore.
        trust: with "calls", arguments are pickles, restricted to the classes named. With "data", this process unpickles
            nothing, whoever sends it: arguments and results are numbers, texts, bytes, tuples, lists, dicts and CPU
            tensors, without classes or references. All members of a group must say the same.
        publishers: who may publish weights that this process subscribes to: the name of a worker, or several, for each
            name of weights. What others publish is ignored.
    """
    if STARTED:
        raise RuntimeError("call farcall.allow before init_rpc: the other members already know what this worker serves")
    restrict(Allowance(functions, classes, trust, publishers))


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave the cluster.

    Graceful: wait until all members have called this and all work everywhere is done; in a group without a fixed size,
    until the calls made and served here are done, and the others know. A ``timeout`` bounds the wait, in seconds; after
    it, `ShutdownTimeout` names the late workers. Not graceful: leave at once. Afterwards this process can call
    `init_rpc` again. A second shutdown does nothing.
    """
    if slot.runtime is None and slot.was_filled:
        return
    if timeout is not None:
        check_timeout(timeout)
    runtime = current_runtime()
    try:
        leave(runtime, graceful, timeout, checks_leaks=not _ignore_rref_leak)
    finally:
        with slot.lock:
            if slot.runtime in (runtime, runtime.newest()):
                slot.clear("it was shut down")


def get_worker_info(worker: Destination | None = None) -> WorkerInfo:
    """The `WorkerInfo` of a name or rank; without one, of this process itself."""
    runtime = current_runtime()
    return runtime.info if worker is None else runtime.peer(worker).info


def members() -> list[MemberInfo]:
    """All workers of the cluster, by rank; in a group without a fixed size, the present ones.

    Each is its `WorkerInfo`, with ``unresponsive_s``: for how long it has answered nobody, or None.
    """
    return current_runtime().members_now()


def on_member(callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
    """Have ``callback`` told of workers that join, leave, fall silent, recover from that, or die.

    It gets a `MemberEvent` (``kind``, ``worker``, ``incarnation``, ``why``), on a worker thread, so it may make calls.
    Call the returned function to end that.
    """
    return current_runtime().member_events.subscribe(callback)


def member_events() -> AsyncIterator[MemberEvent]:
    """The events of `on_member` as an async iterator, which ends with the node: ``async for event in ...``."""
    return current_runtime().member_events.iterate()


def metrics() -> Metrics:
    """The counters and gauges of this worker: calls, latencies, bytes, queues, references."""
    from farcall.observe.metrics import collect

    return collect(current_runtime())


# Two overloads, since mypy does not infer T from one union of coroutine, future and T.
@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., Awaited[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> T: ...
def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result, or raise what it raised.

    Args:
        to: name, rank or `WorkerInfo`; this worker itself is allowed.
        func: anything callable that the callee can import, a builtin operator such as ``torch.add``, a TorchScript
            function, or something picklable such as a bound method or ``functools.partial``.
        timeout: seconds; None for no limit; by default that of the options.
        retry: for a function that may run more than once: call it again where the network failed the call. By default
            a function runs at most once.
    """
    if retry is not None:
        from farcall.rpc.retry import sync_with

        return sync_with(retry, current_runtime(), to, func, args, kwargs, timeout)
    return call_sync(current_runtime(), to, func, args, kwargs, timeout)


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., Awaited[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> Future[T]: ...
def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> Future[Any]:
    """Like `rpc_sync`, but return at once: a ``torch.futures.Future`` that can also be awaited."""
    if retry is not None:
        from farcall.rpc.retry import async_with

        future: Future[Any] = async_with(retry, current_runtime(), to, func, args, kwargs, timeout)
    else:
        future = call_async(current_runtime(), to, func, args, kwargs, timeout)
    collected: list[Future[Any]] | None = getattr(_collecting, "futures", None)
    if collected is not None:
        collected.append(future)
    return future


@overload
def remote(
    to: Destination,
    func: Callable[..., Awaited[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> RRef[T]: ...
def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result; return a reference to it at once.

    An error there is raised where the reference is first used. The arguments are those of `rpc_sync`; ``timeout`` is
    how long the creation may take.
    """
    if retry is not None:
        from farcall.rpc.retry import remote_with

        return remote_with(retry, current_runtime(), to, func, args, kwargs, timeout)
    return call_remote(current_runtime(), to, func, args, kwargs, timeout)


@contextmanager
def wait_all() -> Iterator[None]:
    """At the end of the block, wait for every `rpc_async` that this thread made in it, then raise the first error."""
    outer: list[Future[Any]] | None = getattr(_collecting, "futures", None)
    futures: list[Future[Any]] = []
    _collecting.futures = futures
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error  # the block's own error comes first, but its calls are waited for all the same
    finally:
        _collecting.futures = outer
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


_use_rpc_pickler = use_rpc_pickler


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Give up every reference held by this worker, and free values here that no other worker refers to.

    Waits for references that are on their way, at most ``timeout`` seconds.
    """
    current_runtime().part(NodeReferences).drop_all(timeout)


def _rref_context_get_debug_info() -> dict[str, str]:
    """The numbers of references here, under the names of ``torch.distributed.rpc``."""
    references = current_runtime().part(NodeReferences)
    counts = references.counts()
    return {
        "num_owner_rrefs": str(counts.owners),
        "num_pending_users": str(counts.pending_users),
        "num_pending_futures": str(references.pending_values()),
        "num_forks": str(counts.forks),
        "num_children": str(counts.pending_children),
    }


def all_gather(
    value: T, worker_names: Iterable[Target] | None = None, timeout: float | None = UNSET_TIMEOUT
) -> dict[str, T]:
    """Every worker's ``value`` by name; all of ``worker_names`` (or all there are) must call this equally often."""
    from farcall.rpc.gather import gather

    return gather(current_runtime(), value, worker_names, timeout)


def barrier(worker_names: Iterable[Target] | None = None, timeout: float | None = UNSET_TIMEOUT) -> None:
    """Return when all of ``worker_names`` (or all there are) have called this."""
    all_gather(None, worker_names, timeout)


def shared_empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor in shared memory, which travels to workers on this host without a copy.

    Unlike every other argument it is passed *by reference* there: both sides use the same memory, and each sees the
    other's writes.
    """
    return current_runtime().shared_empty(shape, dtype)


def publish(name: str, source: Any, keep: int = 2) -> Publication:
    """Publish the tensors of ``source``; each `push` of the returned publication makes their values a version.

    This worker is the publisher of ``name`` from now on. If another one is, or was, this one takes over, and the pushes
    of the other are refused. Waits 2 s at most for workers that do not answer.

    Args:
        name: the name that subscribers ask for.
        source: a module, a state dict, or any dicts and lists of tensors inside each other. Other values travel, too;
            tensors that share memory go on doing so.
        keep: how many versions stay readable at least; one that is being read stays in any case.
    """
    return weights_of(current_runtime()).publish(name, source, keep)


def subscribe(name: str) -> Subscription:
    """Read the versions that any worker publishes under ``name``, now or later. Runs no code of the publisher's.

    On one host, all subscribers read a version in the same memory. Close the returned subscription, or drop it, when
    you want no more versions.
    """
    return weights_of(current_runtime()).subscribe(name)


def _set_rpc_timeout(seconds: float | None) -> None:
    """Change the default timeout of this process's calls; None: they have no limit."""
    current_runtime().timeout_s = 0.0 if seconds is None else check_timeout(float(seconds))


def get_rpc_timeout() -> float | None:
    """The default timeout of this process's calls, in seconds; None: they have no limit."""
    return current_runtime().timeout_s or None


@cache  # once for a process
def _leave_out(rules: Any) -> None:
    """A function under torch.compile breaks its graph once at a call; torch does not compile farcall itself."""
    rules.add("farcall")


while_there_are_nodes(lambda: when_imported("torch._dynamo.trace_rules", _leave_out))
