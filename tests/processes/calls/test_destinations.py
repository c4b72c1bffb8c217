"""Calls between real processes: every kind of destination, callable and error."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from typing import Any

import pytest
import torch
from tests.processes.calls.callees import Gate, add, fail, whoami

import farcall
from farcall.errors import (
    FunctionNotFound,
    NotInitialized,
    RemoteError,
    RpcError,
    RpcTimeout,
    SerializationError,
    UnknownWorker,
)
from farcall.testing.cluster import finish, run_cluster, start_processes


class Counter:
    """A value with every kind of method."""

    made = 0

    def __init__(self, start: int) -> None:
        self.count = start

    def plus(self, more: int) -> int:
        return self.count + more

    def __call__(self, more: int) -> int:
        return self.count * more

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def named(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value

    @staticmethod
    @farcall.functions.async_execution
    def double_elsewhere(worker: str, value: int) -> torch.futures.Future[int]:
        return farcall.rpc_async(worker, Counter.double, (value,)).then(lambda done: done.wait() + 1)

    @classmethod
    @farcall.functions.async_execution
    def named_elsewhere(cls, worker: str, value: int) -> torch.futures.Future[Any]:
        return farcall.rpc_async(worker, cls.named, (value,))

    @farcall.functions.async_execution
    @staticmethod
    def decorated_above(worker: str, value: int) -> torch.futures.Future[int]:
        return farcall.rpc_async(worker, Counter.double, (value,))

    @farcall.functions.async_execution
    def plus_elsewhere(self, worker: str, more: int) -> torch.futures.Future[int]:
        return farcall.rpc_async(worker, add, (self.count, more))


def _scripted(left: torch.Tensor, right: int = 3) -> torch.Tensor:
    return left * right


scripted = torch.jit.script(_scripted)


async def add_slowly(left: int, right: int) -> tuple[str, int]:
    await asyncio.sleep(0)
    return farcall.get_worker_info().name, left + right


async def add_elsewhere(worker: str, left: int, right: int) -> int:
    first, second = await asyncio.gather(
        farcall.rpc_async(worker, add, (left, 0)), farcall.rpc_async(worker, add, (0, right))
    )
    return int(first + second)


async def fail_slowly() -> None:
    await asyncio.sleep(0)
    raise KeyError("slowly")


@farcall.functions.async_execution
def returns_no_future() -> int:
    return 7


@farcall.functions.async_execution
def chain(worker: str, value: int) -> torch.futures.Future[int]:
    """A future of a future's callback of a future's callback."""
    first = farcall.rpc_async(worker, add, (value, 1))
    return first.then(lambda done: done.wait() + 10).then(lambda done: done.wait() + 100)


@farcall.functions.async_execution
def gather_here(workers: list[str], value: int) -> torch.futures.Future[int]:
    calls = [farcall.rpc_async(worker, add, (value, index)) for index, worker in enumerate(workers)]
    return torch.futures.collect_all(calls).then(lambda all_done: sum(done.wait() for done in all_done.wait()))


@farcall.functions.async_execution
def fail_later(worker: str) -> torch.futures.Future[int]:
    return farcall.rpc_async(worker, fail)


def call_every_way(rank: int) -> None:
    if rank:
        return
    me, other = farcall.get_worker_info(), farcall.get_worker_info("w1")
    assert (me.name, me.id, other.name, other.id) == ("w0", 0, "w1", 1)
    for to in ("w1", 1, other):
        assert farcall.rpc_sync(to, whoami) == "w1"
        assert farcall.rpc_async(to, whoami).wait() == "w1"
    for to in ("w0", 0, me):
        assert farcall.rpc_sync(to, whoami) == "w0"
        assert farcall.rpc_async(to, whoami).wait() == "w0"
    for to in ("w0", "w1"):
        check_callables(to)
        check_async_execution(to)
        check_errors(to)
    check_awaiting()
    check_wrong_destinations()


def check_callables(to: str) -> None:
    rpc_sync = farcall.rpc_sync
    assert rpc_sync(to, add, (1, 2)) == 3
    assert rpc_sync(to, add, [1], {"right": 5}) == 6
    assert rpc_sync(to, add, kwargs={"left": 1}) == 101
    counter = Counter(10)
    assert rpc_sync(to, counter.plus, (5,)) == 15
    assert rpc_sync(to, counter, (5,)) == 50
    assert rpc_sync(to, Counter.double, (5,)) == 10
    assert rpc_sync(to, counter.double, (5,)) == 10
    assert rpc_sync(to, Counter.named, (5,)) == ("Counter", 5)
    assert rpc_sync(to, Counter, (3,)).count == 3
    assert rpc_sync(to, functools.partial(add, 1), (2,)) == 3
    assert rpc_sync(to, functools.partial(add, right=7), (2,)) == 9
    assert rpc_sync(to, operator.mul, (6, 7)) == 42
    assert rpc_sync(to, operator.itemgetter(1), ([1, 2],)) == 2
    assert rpc_sync(to, max, (3, 9)) == 9
    assert rpc_sync(to, dict, kwargs={"a": 1}) == {"a": 1}
    assert rpc_sync(to, "x".join, (["a", "b"],)) == "axb"
    ones = torch.ones(2)
    assert rpc_sync(to, torch.add, (ones, ones)).tolist() == [2, 2]
    assert rpc_sync(to, torch.add, (ones, 1), {"alpha": 3}).tolist() == [4, 4]
    assert rpc_sync(to, torch.ops.aten.mul.Tensor, (ones, ones)).tolist() == [1, 1]
    assert rpc_sync(to, torch.nn.functional.relu, (-ones,)).tolist() == [0, 0]
    assert rpc_sync(to, torch.Tensor.sum, (ones,)).item() == 2
    assert rpc_sync(to, scripted, (ones,)).tolist() == [3, 3]
    assert rpc_sync(to, scripted, (ones,), {"right": 4}).tolist() == [4, 4]
    assert rpc_sync(to, add_slowly, (1, 2)) == (to, 3)
    assert rpc_sync(to, add_elsewhere, ("w0", 1, 2)) == 3
    assert rpc_sync(to, add_elsewhere, ("w1", 1, 2)) == 3
    with pytest.raises(KeyError, match="slowly"):
        rpc_sync(to, fail_slowly)


def check_async_execution(to: str) -> None:
    rpc_sync = farcall.rpc_sync
    for elsewhere in ("w0", "w1"):
        assert rpc_sync(to, chain, (elsewhere, 1)) == 112
        assert rpc_sync(to, gather_here, ([elsewhere] * 5, 1)) == 15
        assert rpc_sync(to, Counter.double_elsewhere, (elsewhere, 4)) == 9
        assert rpc_sync(to, Counter.named_elsewhere, (elsewhere, 4)) == ("Counter", 4)
        assert rpc_sync(to, Counter.decorated_above, (elsewhere, 4)) == 8
        assert rpc_sync(to, Counter(3).plus_elsewhere, (elsewhere, 4)) == 7
        assert rpc_sync(to, functools.partial(chain, elsewhere), (1,)) == 112
        with pytest.raises(ValueError, match="as you wish"):
            rpc_sync(to, fail_later, (elsewhere,))
    with pytest.raises(RuntimeError, match=r"must return .*Future.*returns_no_future returned int"):
        rpc_sync(to, returns_no_future)
    # Here it is an ordinary function.
    assert chain("w1", 1).wait() == 112
    assert returns_no_future() == 7


class NotAgain(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left = left

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class WithState(Exception):
    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def raise_not_again() -> None:
    raise NotAgain(1, 2)


def raise_with_state() -> None:
    raise WithState("stateful", code=7)


def raise_from() -> None:
    try:
        fail()
    except ValueError as error:
        raise KeyError("outer") from error


def raise_exit() -> None:
    raise SystemExit(3)


def return_lock() -> Any:
    return {"deep": [threading.Lock()]}


class ExplodesOnArrival:
    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise OSError("cannot be rebuilt here")


def check_errors(to: str) -> None:
    rpc_sync = farcall.rpc_sync
    with pytest.raises(ValueError, match="as you wish") as caught:
        rpc_sync(to, fail)
    remote_traceback = caught.value.remote_traceback  # type: ignore[attr-defined]
    assert "in fail" in remote_traceback
    assert to in remote_traceback
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="as you wish"):
        farcall.rpc_async(to, fail).wait()
    with pytest.raises(WithState, match="stateful") as stateful:
        rpc_sync(to, raise_with_state)
    assert stateful.value.code == 7
    with pytest.raises(KeyError) as chained:
        rpc_sync(to, raise_from)
    assert "as you wish" in chained.value.remote_traceback  # type: ignore[attr-defined]
    with pytest.raises(RemoteError) as unknown:
        rpc_sync(to, raise_not_again)
    assert "raise_not_again" in unknown.value.remote_traceback
    assert unknown.value.message == "1 and 2"
    assert unknown.value.type_name.endswith("NotAgain")
    with pytest.raises(RpcError, match="SystemExit"):
        rpc_sync(to, raise_exit)
    with pytest.raises(SerializationError, match="lock"):
        rpc_sync(to, return_lock)
    with pytest.raises(SerializationError, match="lock"):
        rpc_sync(to, add, ({"a": [1, threading.Lock()]}, 1))
    with pytest.raises(SerializationError, match="lock"):
        farcall.rpc_async(to, add, (threading.Lock(), 1))
    with pytest.raises(SerializationError, match="cannot be rebuilt here"):
        rpc_sync(to, add, (ExplodesOnArrival(), 1))
    with pytest.raises(TypeError, match="positional argument"):
        rpc_sync(to, add)
    assert rpc_sync(to, whoami) == to


def check_awaiting() -> None:
    async def program() -> None:
        assert await farcall.rpc_async("w1", add, (1, 2)) == 3
        futures = [farcall.rpc_async(index % 2, add, (index, index)) for index in range(40)]
        assert await asyncio.gather(*futures) == [2 * index for index in range(40)]
        with pytest.raises(ValueError, match="as you wish"):
            await farcall.rpc_async("w1", fail)
        done = farcall.rpc_async("w1", add, (1, 2))
        done.wait()
        assert await done == 3
        # The event loop goes on meanwhile. A cancelled wait cancels the call, unless it is shielded.
        waiting = farcall.rpc_async("w1", Gate.wait, ("awaited",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.01)
        await farcall.rpc_async("w1", Gate.open, ("awaited",))
        assert await waiting == "awaited"
        waiting = farcall.rpc_async("w1", Gate.wait, ("given up",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        assert waiting.cancelled()
        await farcall.rpc_async("w1", Gate.open, ("given up",))
        with pytest.raises(RpcTimeout):
            await farcall.rpc_async("w1", Gate.wait, ("never awaited",), timeout=0.05)
        await farcall.rpc_async("w1", Gate.open, ("never awaited",))

    asyncio.run(program())


def check_wrong_destinations() -> None:
    for to in ("w2", 2, -1, farcall.WorkerInfo("w7", 7)):
        with pytest.raises(UnknownWorker, match="w0, w1"):
            farcall.rpc_sync(to, whoami)
        with pytest.raises(UnknownWorker, match="w0, w1"):
            farcall.rpc_async(to, whoami)
    for to in (None, ("w1", 1), 1.5):
        with pytest.raises(TypeError, match="WorkerInfo"):
            farcall.rpc_sync(to, whoami)  # type: ignore[arg-type]
    with pytest.raises(UnknownWorker):
        farcall.get_worker_info("w2")
    with pytest.raises(TypeError, match="callable"):
        farcall.rpc_sync("w1", 5)  # type: ignore[arg-type]


def test_every_destination_callable_and_error() -> None:
    run_cluster(2, call_every_way)


def define_on_rank_0(rank: int) -> None:
    if rank == 0:

        def only_here() -> int:
            return 1

        only_here.__qualname__ = only_here.__name__ = "only_here"
        globals()["only_here"] = only_here
        with pytest.raises(FunctionNotFound, match="only_here"):
            farcall.rpc_sync("w1", only_here)
        with pytest.raises(FunctionNotFound, match="only_here"):
            farcall.rpc_async("w1", functools.partial(only_here)).wait()
        assert farcall.rpc_sync("w0", only_here) == 1
        assert farcall.rpc_sync("w1", whoami) == "w1"


def test_a_function_that_only_the_caller_has() -> None:
    run_cluster(2, define_on_rank_0)


def call_before_init(_: int) -> None:
    with pytest.raises(NotInitialized, match="init_rpc"):
        farcall.rpc_sync("w0", whoami)
    with pytest.raises(NotInitialized, match="init_rpc"):
        farcall.rpc_async("w0", whoami)
    with pytest.raises(NotInitialized):
        farcall.shutdown()
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()


def test_calls_before_init() -> None:
    finish(start_processes(1, call_before_init))  # where no other test had a node: a second shutdown does nothing
