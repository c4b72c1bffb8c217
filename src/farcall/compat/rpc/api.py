"""``torch.distributed.rpc.api``: calls, gathers and the end, over farcall.

Programs and tests replace names of this module, so every function here looks names up in the module when it runs. A
gather keeps torch's protocol (tell the leader, hear from the leader), since programs know its parts by name; the end
keeps torch's order: all have come, references are given up, the node leaves.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import torch

from farcall import api as farcall_api
from farcall.compat.rpc import internal, native
from farcall.compat.rpc.agent import TensorPipeAgent, WorkerInfo
from farcall.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.compat.rpc.unserved import find_unserved
from farcall.errors import NotInitialized, PeerDead, RpcError, RpcTimeout
from farcall.rpc.references import NodeReferences
from farcall.rpc.rref import RRef
from farcall.runtime.node.current import slot
from farcall.serialize import use_rpc_pickler

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")

logger: logging.Logger = logging.getLogger("farcall")

# Names that programs take from here, and set here.
PyRRef = RRef
PythonUDF = internal.PythonUDF
RPCExecMode = internal.RPCExecMode
_internal_rpc_pickler = internal._internal_rpc_pickler
_build_rpc_profiling_key = internal._build_rpc_profiling_key
_cleanup_python_rpc_handler = native._cleanup_python_rpc_handler
_delete_all_user_and_unforked_owner_rrefs = native._delete_all_user_and_unforked_owner_rrefs
_destroy_rref_context = native._destroy_rref_context
_group_membership_management = native._group_membership_management
_update_group_membership = native._update_group_membership
_get_current_rpc_agent = native._get_current_rpc_agent
_is_current_rpc_agent_set = native._is_current_rpc_agent_set
_reset_current_rpc_agent = native._reset_current_rpc_agent
_set_and_start_rpc_agent = native._set_and_start_rpc_agent
get_rpc_timeout: Callable[[], float] = native.get_rpc_timeout

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_LOOK_AGAIN_S = 0.2


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """``func``, raising where RPC is not initialized."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise NotInitialized(
                f"RPC has not been initialized. Call torch.distributed.rpc.init_rpc first ({slot.why_none})."
            )
        return func(*args, **kwargs)

    return wrapper


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Let ``rpc_pickler`` write the arguments of calls inside the block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        with use_rpc_pickler(rpc_pickler):
            yield
    finally:
        _default_pickler = _internal_rpc_pickler


# ---------------------------------------------------------------------- calls


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result, or raise what it raised."""
    if args.__class__ is not tuple or to.__class__ is not str:
        args = _checked(to, args)
    return farcall_api.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Like `rpc_sync`, but return at once: a ``torch.futures.Future``."""
    if args.__class__ is not tuple or to.__class__ is not str:
        args = _checked(to, args)
    future: Any = farcall_api.rpc_async(to, func, args, kwargs, timeout)
    collected = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result; return a reference to it at once."""
    if args.__class__ is not tuple or to.__class__ is not str:
        args = _checked(to, args)
    return farcall_api.remote(to, func, args, kwargs, timeout)


def _checked(to: Any, args: Any) -> tuple[Any, ...]:
    """``args`` as a tuple: torch takes anything that can be unpacked. Raises at once for a bad ``to``, as torch."""
    if not isinstance(to, str | int | WorkerInfo):
        raise ValueError(f"a worker is given by its name, its rank or its WorkerInfo, not by {to!r}")
    return () if args is None else tuple(args)


@contextmanager
def _wait_all() -> Iterator[None]:
    """On leaving the block, wait for every `rpc_async` that this thread made in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@_require_initialized
def get_worker_info(worker_name: Any = None) -> Any:
    """The `WorkerInfo` of a name; without one, of this worker."""
    agent = _get_current_rpc_agent()
    return agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)


def _to_worker_info(to: Any) -> Any:
    _checked(to, None)
    return to if isinstance(to, WorkerInfo) else get_worker_info(to)


def _rref_typeof_on_owner(rref: Any, blocking: bool = True) -> Any:
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(rref: Any, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    return rref._get_type(timeout=timeout, blocking=blocking)


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """A function that calls the method of that name."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method: Callable[..., Any] = method_factory("to_here", RRef.to_here.__doc__ or "")


# ---------------------------------------------------------------------- gathers


class AllGatherStates:
    """The objects of one gather that have come, and a signal when all have."""

    def __init__(self) -> None:
        self.gathered_objects: Mapping[str, Any] | dict[str, Any] = {}
        self.proceed_signal: threading.Event = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: Counter[str] = Counter()
_all_gather_sequence_id_to_states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)
_lost_gathers: dict[str, str] = {}  # the latest that failed because a worker died, and the text that says so
_MOST_LOST = 64


if hasattr(os, "register_at_fork"):
    # A thread that holds the lock may exist only in the parent.
    os.register_at_fork(after_in_child=lambda: globals().update(_all_gather_dict_lock=threading.RLock()))


def _forget_gathers() -> None:
    """Forget the gathers of the former agent, before there is a new one, whose peers may gather at once."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id.clear()
        _all_gather_sequence_id_to_states.clear()
        _lost_gathers.clear()


def _init_rpc_states(agent: Any) -> None:
    """Take a new agent, and the names of its workers."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """At the leader: take the object of ``worker_name``."""
    with _all_gather_dict_lock:
        worker_names = worker_names or _ALL_WORKER_NAMES
        if worker_name not in worker_names:
            raise AssertionError(f"{worker_name} is not part of this gather, which is of {sorted(worker_names)}")
        if sequence_id in _lost_gathers:
            raise PeerDead(_lost_gathers[sequence_id])
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} has given its object for gather {sequence_id} before")
        states.gathered_objects[worker_name] = obj  # type: ignore[index]
        if worker_names == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: Mapping[str, Any]) -> None:
    """At a follower: take the objects of all."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(f"the result of gather {sequence_id} has come before")
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _tell_loss(sequence_id: str, why: str) -> None:
    """At each worker: give up a gather, because a worker died before it came."""
    with _all_gather_dict_lock:
        _lost_gathers[sequence_id] = why
        while len(_lost_gathers) > _MOST_LOST:
            del _lost_gathers[next(iter(_lost_gathers))]
        states = _all_gather_sequence_id_to_states.get(sequence_id)
    if states is not None:
        states.proceed_signal.set()


@_require_initialized
def _all_gather(obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Every worker's ``obj`` by name; all workers (or all of ``worker_names``) must call this, equally often.

    Without a timeout a slow worker is waited for as long as it lives; with 0, the calls of the gather have none either.
    """
    group = set(worker_names or {info.name for info in _get_current_rpc_agent().get_worker_infos()})
    leader = min(group)
    name = _get_current_rpc_agent().get_worker_info().name
    with _all_gather_dict_lock:
        joined = "".join(sorted(group))
        sequence_id = f"{joined}{_all_gather_sequence_id[joined]}"
        _all_gather_sequence_id[joined] += 1
    call_timeout_s = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    waiting_s = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    if name == leader:
        _gather_to_leader(sequence_id, name, obj, group)
    else:
        rpc_sync(leader, _gather_to_leader, args=(sequence_id, name, obj, group), timeout=call_timeout_s)
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    try:
        _wait_for_proceed(states, group, name, waiting_s)
        if sequence_id in _lost_gathers:
            raise PeerDead(_lost_gathers[sequence_id])
        if name == leader:
            result = (sequence_id, states.gathered_objects)
            futures = {
                follower: rpc_async(follower, _broadcast_to_followers, args=result, timeout=call_timeout_s)
                for follower in sorted(group - {leader})
            }
            errors: dict[str, RuntimeError] = {}
            for follower, future in futures.items():
                try:
                    future.wait()
                except RuntimeError as error:
                    errors[follower] = error
            if errors and all(isinstance(error, PeerDead) for error in errors.values()):
                raise PeerDead(f"lost {', '.join(errors)} in _all_gather")
            if errors:
                raise RpcError(
                    f"{', '.join(errors)} failed or timed out in _all_gather after {call_timeout_s:.2f} seconds; "
                    f"the first said: {next(iter(errors.values()))}"
                )
    except PeerDead as error:
        if name == leader and not states.proceed_signal.is_set():
            # Not all have come: tell the workers that wait now; latecomers hear it when they come.
            _tell_loss(sequence_id, str(error))
            for follower in sorted(set(states.gathered_objects) - {leader}):
                rpc_async(follower, _tell_loss, args=(sequence_id, str(error)))
        raise
    finally:
        with _all_gather_dict_lock:
            _all_gather_sequence_id_to_states.pop(sequence_id, None)
    return states.gathered_objects


def _wait_for_proceed(states: AllGatherStates, group: set[str], name: str, waiting_s: float | None) -> None:
    """Wait until all have come; raise if one cannot come any more."""
    leader = min(group)
    node = farcall_api.current_runtime()
    deadline = None if waiting_s is None else monotonic() + waiting_s
    with node.calls.waiting():
        while not states.proceed_signal.wait(_LOOK_AGAIN_S if deadline is None else min(_LOOK_AGAIN_S, waiting_s or 0)):
            missing = sorted(group - set(states.gathered_objects)) if name == leader else [leader]
            gone = [worker for worker in missing if getattr(node.peer(worker), "broken", False)]
            if states.proceed_signal.is_set():
                return
            if gone:
                raise PeerDead(f"lost {', '.join(gone)} in _all_gather")
            if deadline is not None and monotonic() >= deadline:
                raise RpcTimeout(
                    f"RPC ran for more than set timeout: {name} timed out in _all_gather after {waiting_s:.2f} "
                    f"seconds. Missing: {', '.join(missing)}"
                )


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Return when all of ``worker_names`` have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("not all workers came to the barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Return when all workers have called this."""
    _all_gather(None, timeout=timeout)


# ---------------------------------------------------------------------- the end


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the cluster; graceful: when all workers have called this and all work everywhere is done."""
    agent = _get_current_rpc_agent()
    if not isinstance(agent, TensorPipeAgent):  # an agent of another backend ends by itself
        try:
            if graceful:
                agent.join(shutdown=True, timeout=timeout)
            agent.shutdown()
        finally:
            _reset_current_rpc_agent()
        return
    if not graceful:
        farcall_api.shutdown(graceful=False)
        return
    node: Any = farcall_api.current_runtime()
    farcall_api._ignore_rref_leak = _ignore_rref_leak
    failures: list[Exception] = []

    def give_up() -> None:
        # Runs when all work is done everywhere, in the middle of the shutdown, which goes on whatever happens here.
        try:
            _delete_all_user_and_unforked_owner_rrefs()
        except Exception as error:
            failures.append(error)

    node.part(NodeReferences).shutdown.give_up = give_up
    agreed = False
    try:
        if agent.is_static_group:
            try:
                _wait_all_workers(timeout)
            except PeerDead as error:
                # Raised below: the other workers may still need this one, and leave with it.
                failures.append(PeerDead(f"shutdown: {error}; shutdown(graceful=False) leaves without the dead"))
        agreed = True
    finally:
        farcall_api.shutdown(agreed, timeout if timeout > 0 else None)
    if failures:
        raise failures[0]


def _finalize_shutdown() -> None:
    """Leave at once."""
    _reset_current_rpc_agent()


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
