"""The agent of this process and its `WorkerInfo`, as programs know them: farcall's node under the old names.

One `TensorPipeAgent` belongs to one node. `current_agent` finds it, also for a node that ``farcall.init_rpc`` made.
The agent keeps the device maps of its options only to show them; farcall's node has its own.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from farcall import api as farcall_api
from farcall import ids
from farcall.compat.rpc.options import TensorPipeRpcBackendOptions, to_farcall
from farcall.errors import NotInitialized, RpcError, UnknownWorker
from farcall.runtime.node.current import slot

_ATTRIBUTE = "_agent_of_old"
"""The attribute of a node that holds its agent: the two refer to each other, and end together."""


class _AnyWorkerInfo(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, ids.WorkerInfo)


class WorkerInfo(ids.WorkerInfo, metaclass=_AnyWorkerInfo):
    """A member of the cluster: its unique ``name``, checked here, and its rank, called ``id``.

    Instances of farcall's own `WorkerInfo` count as instances of this one, too.
    """

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


class RpcAgent:
    """The interface of every agent."""

    def get_worker_info(self, worker: str | int | None = None) -> ids.WorkerInfo:
        raise NotImplementedError

    def get_worker_infos(self) -> list[ids.WorkerInfo]:
        raise NotImplementedError

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class TensorPipeAgent(RpcAgent):
    """farcall's node, under the old name."""

    options_class: ClassVar[type[Any]] = TensorPipeRpcBackendOptions

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        rpc_backend_options: TensorPipeRpcBackendOptions,
        reverse_device_maps: Any = None,
        devices: Any = None,
    ) -> None:
        from farcall.compat.rpc import api

        if isinstance(name, str):
            WorkerInfo(name, rank)  # raises a RuntimeError, as torch does; farcall's own init_rpc raises a ValueError
        self._options = rpc_backend_options
        self.store = store
        if not is_agent_set():
            api._forget_gathers()
        with _meeting_at(store, rpc_backend_options.init_method) as init_method:
            options = to_farcall(rpc_backend_options, init_method)
            # 0 means "not given" in programs written before torch had groups without a size.
            farcall_api.init_rpc(name, rank=rank, world_size=world_size or None, rpc_backend_options=options)
        node = slot.runtime
        assert node is not None
        self._node = node
        node.server.on_failure = self._print_failure
        self.is_static_group: bool = bool(world_size)
        setattr(node, _ATTRIBUTE, self)

    @classmethod
    def _of(cls, node: Any) -> TensorPipeAgent:
        """The agent of a node that was not made through one."""
        agent: TensorPipeAgent = cls.__new__(cls)
        agent._node = node
        agent.store = node.membership.store
        agent.is_static_group = node.is_static
        agent._options = TensorPipeRpcBackendOptions(
            num_worker_threads=node.options.num_worker_threads,
            rpc_timeout=node.timeout_s,
            init_method=node.options.init_method,
        )
        return agent

    def _print_failure(self, error: BaseException) -> None:
        """Print the error of a function where it ran, as torch does; its caller gets it in any case."""
        text = "".join(traceback.format_exception(error))
        print(f"On {self._node.info}:\n{text}", file=sys.stderr)

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self._node.info.name

    def get_worker_info(self, worker: str | int | None = None) -> ids.WorkerInfo:
        """The worker of that name or rank; without one, this worker."""
        if worker is None:
            return self._node.info
        try:
            return self._node.peer(worker).info
        except UnknownWorker as error:
            raise UnknownWorker(f"could not find destination {worker!r}: {error}") from None

    def get_worker_infos(self) -> list[ids.WorkerInfo]:
        """All workers."""
        return self._node.workers()

    def get_debug_info(self) -> dict[str, str]:
        """Numbers about this worker, as text."""
        executor = self._node.executor
        info = {
            "agent.num_pending_requests": str(len(self._node.calls)),
            "agent.thread_pool_size": str(self._options.num_worker_threads),
            "agent.num_idle_threads": str(executor.threads - executor.busy),
            "agent.client_active_calls": str(len(self._node.calls)),
            "agent.server_active_calls": str(len(self._node.server.active)),
            "agent.server_active_async_calls": str(sum(one.deferred for one in self._node.server.active)),
        }
        if _gil_profiling:
            info["agent.gil_average_wait_time_us"] = f"{_interpreter_wait_us():.3f}"
        return info

    def get_metrics(self) -> dict[str, str]:
        """The same numbers as `get_debug_info`."""
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers are here and all work everywhere is done."""
        from farcall.compat.rpc import api

        api._all_gather(None, timeout=timeout)

    def sync(self) -> None:
        """Wait until the calls that this worker has under way are done."""
        from farcall.compat.rpc import api

        api._all_gather(None)

    def shutdown(self) -> None:
        """Leave at once."""
        self._node.shutdown(graceful=False)

    def _get_device_map(self, worker: ids.WorkerInfo | str | int) -> dict[torch.device, torch.device]:
        """From devices here to devices of ``worker``."""
        name = worker.name if isinstance(worker, ids.WorkerInfo) else self.get_worker_info(worker).name
        return dict(self._options.device_maps.get(name, {}))

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
        return self._options

    def _update_group_membership(self, *args: Any) -> None:
        raise RpcError("farcall keeps the table of members itself: workers join by init_rpc and leave by shutdown")

    def __repr__(self) -> str:
        return f"<TensorPipeAgent over farcall: {self._node.info}>"


_DATA = bytes(1 << 19)
_TRIES = 5
_gil_profiling = False


def enable_gil_profiling(flag: bool) -> None:
    """Let `get_debug_info` measure how long a thread waits for the interpreter."""
    global _gil_profiling
    _gil_profiling = flag


def _interpreter_wait_us() -> float:
    """How long a thread that let go of the interpreter's lock waits for it: the average of a few tries."""
    began, computed = perf_counter(), thread_time()
    for _ in range(_TRIES):
        zlib.crc32(_DATA)  # without the interpreter's lock, and for long enough that another thread takes it
    return max(0.0, (perf_counter() - began) - (thread_time() - computed)) / _TRIES * 1e6


# ---------------------------------------------------------------------- the current agent

_foreign: list[Any] = []
"""The agent of another registered backend, if that is current."""


def is_agent_set() -> bool:
    """Is RPC initialized in this process?"""
    try:
        return bool(_foreign) or farcall_api.current_runtime() is not None
    except NotInitialized:
        return False


def current_agent() -> Any:
    """The agent of the current node."""
    if _foreign:
        return _foreign[-1]
    try:
        node = farcall_api.current_runtime()
    except NotInitialized as error:
        raise NotInitialized(
            f"Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)? "
            f"({error})"
        ) from None
    agent = getattr(node, _ATTRIBUTE, None)
    if agent is None:
        agent = TensorPipeAgent._of(node)
        setattr(node, _ATTRIBUTE, agent)
    return agent


def set_agent(agent: Any) -> None:
    """Make an agent of another backend the current one."""
    if not isinstance(agent, TensorPipeAgent):
        _foreign.append(agent)


def reset_agent() -> None:
    """End the current agent, at once."""
    if _foreign:
        _foreign.clear()
    elif is_agent_set():
        farcall_api.shutdown(graceful=False)


# ---------------------------------------------------------------------- meeting at a store that the program made

_SCHEME = "farcall-store"
_stores: dict[int, Any] = {}
_store_numbers = itertools.count()


@contextmanager
def _meeting_at(store: Any, init_method: str) -> Iterator[str]:
    """The url under which farcall finds ``store``; without a store, ``init_method``."""
    if store is None:
        yield init_method
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    if _SCHEME not in rendezvous._rendezvous_handlers:
        rendezvous.register_rendezvous_handler(_SCHEME, _open_given_store)
    number = next(_store_numbers)
    _stores[number] = store
    try:
        yield f"{_SCHEME}://{number}"
    finally:
        del _stores[number]


def _open_given_store(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    number = int(url.partition("://")[2].partition("?")[0].strip("/"))
    yield dist.PrefixStore("farcall", _stores[number]), rank, world_size  # type: ignore[attr-defined]
