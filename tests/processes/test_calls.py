"""Calls between real processes: destinations, callables, futures, timeouts, nesting, callbacks and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar

import pytest
import torch

import farcall
from farcall.errors import (
    Cancelled,
    FunctionNotFound,
    NotInitialized,
    PeerDead,
    RemoteError,
    RpcError,
    RpcTimeout,
    SerializationError,
    UnknownWorker,
)
from farcall.testing.cluster import finish, free_port, run_cluster, start_cluster

PATIENCE_S = 30.0

# ---------------------------------------------------------------------- what the callees run


def whoami() -> str:
    return farcall.get_worker_info().name


def add(left: Any, right: Any = 100) -> Any:
    return left + right


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


def fail() -> None:
    raise ValueError("as you wish")


class Gate:
    """Opened by one call, waited for by another: a wait that the runtime cannot see."""

    events: ClassVar[dict[str, threading.Event]] = {}
    lock = threading.Lock()

    @classmethod
    def event(cls, name: str) -> threading.Event:
        with cls.lock:
            return cls.events.setdefault(name, threading.Event())

    @classmethod
    def open(cls, name: str) -> None:
        cls.event(name).set()

    @classmethod
    def wait(cls, name: str) -> str:
        assert cls.event(name).wait(PATIENCE_S), f"nobody opened {name}"
        return name

    @classmethod
    def wait_and_return(cls, name: str, count: int) -> torch.Tensor:
        cls.wait(name)
        return torch.ones(count)


def wait_until(condition: Callable[[], bool], what: str = "the condition") -> None:
    give_up_at = monotonic() + PATIENCE_S
    ticking = threading.Event()
    while not condition():
        assert monotonic() < give_up_at, f"{what} did not come true"
        ticking.wait(0.002)


# ---------------------------------------------------------------------- destinations and callables


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


def raise_local_class() -> None:
    class Local(Exception):
        pass

    raise Local("from in here")


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


def return_lambda() -> Any:
    return lambda: None


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
    for function in (raise_not_again, raise_local_class):
        with pytest.raises(RemoteError) as unknown:
            rpc_sync(to, function)
        assert function.__name__ in unknown.value.remote_traceback
        assert unknown.value.message in ("1 and 2", "from in here")
        assert unknown.value.type_name.endswith(("NotAgain", "Local"))
    with pytest.raises(RpcError, match="SystemExit"):
        rpc_sync(to, raise_exit)
    for function in (return_lock, return_lambda):
        with pytest.raises(SerializationError, match=r"lock|lambda"):
            rpc_sync(to, function)
    with pytest.raises(SerializationError, match="lambda"):
        rpc_sync(to, lambda: 1)
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
        # The event loop goes on meanwhile, and a cancelled wait leaves the call alone.
        waiting = farcall.rpc_async("w1", Gate.wait, ("awaited",))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        await farcall.rpc_async("w1", Gate.open, ("awaited",))
        assert await waiting == "awaited"
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


def test_calls_before_init() -> None:
    with pytest.raises(NotInitialized, match="init_rpc"):
        farcall.rpc_sync("w0", whoami)
    with pytest.raises(NotInitialized, match="init_rpc"):
        farcall.rpc_async("w0", whoami)
    with pytest.raises(NotInitialized):
        farcall.shutdown()
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()


def leave_in_the_middle(rank: int) -> None:
    futures = [
        farcall.rpc_async(to, Gate.wait, (f"never {rank}",), timeout=timeout)
        for to in ("w0", "w1")
        for timeout in (0, PATIENCE_S)
    ]
    with_callbacks = [
        farcall.rpc_async(to, Gate.wait, (f"never {rank}",)).then(lambda done: done.wait()) for to in ("w0", "w1")
    ]
    with contextlib.suppress(PeerDead):  # w0 may leave before its last answer is out
        farcall._all_gather(None)
    farcall.shutdown(graceful=False)
    for name in ("never 0", "never 1"):
        Gate.open(name)
    # Nobody is left waiting, callbacks or not.
    for future in futures:
        with pytest.raises((Cancelled, PeerDead)):
            future.wait()
    for future in with_callbacks:
        with pytest.raises(Exception, match=r"shut down|gone|left"):
            future.wait()
    with pytest.raises(NotInitialized, match="shut down"):
        farcall.rpc_sync("w0", whoami)
    with pytest.raises(NotInitialized, match="shut down"):
        farcall.get_worker_info()
    # And once more from the beginning, for the harness to shut down.
    farcall.init_rpc(
        "alone",
        rank=0,
        world_size=1,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}"),
    )
    assert farcall.rpc_sync("alone", whoami) == "alone"


# ---------------------------------------------------------------------- timeouts


def time_out(rank: int) -> None:
    if rank:
        return
    assert farcall.get_rpc_timeout() == 60
    for to in ("w0", "w1"):
        with pytest.raises(RpcTimeout, match=rf"50 ms.*{to}.*Gate\.wait"):
            farcall.rpc_sync(to, Gate.wait, ("per call",), timeout=0.05)
        future = farcall.rpc_async(to, Gate.wait, ("per call",), timeout=0.05)
        with pytest.raises(RpcTimeout, match="50 ms"):
            future.wait()
        assert future.done()
        failed: list[BaseException] = []
        seen = threading.Event()

        def note(done: torch.futures.Future[Any], failed: list[BaseException] = failed, seen: Any = seen) -> None:
            try:
                done.wait()
            except RpcTimeout as error:
                failed.append(error)
            seen.set()

        farcall.rpc_async(to, Gate.wait, ("per call",), timeout=0.05).add_done_callback(note)
        assert seen.wait(PATIENCE_S)
        assert failed
    farcall._set_rpc_timeout(0.05)
    assert farcall.get_rpc_timeout() == 0.05
    with pytest.raises(TimeoutError):
        farcall.rpc_sync("w1", Gate.wait, ("default",))
    with pytest.raises(TimeoutError):
        farcall.rpc_async("w1", Gate.wait, ("default",)).wait()
    # 0 is no timeout: this outlasts others that were started later.
    unlimited = farcall.rpc_async("w1", Gate.wait, ("unlimited",), timeout=0)
    with pytest.raises(TimeoutError):
        farcall.rpc_sync("w1", Gate.wait, ("default",))
    assert not unlimited.done()
    farcall._set_rpc_timeout(0)
    assert farcall.get_rpc_timeout() == 0
    farcall.rpc_sync("w1", Gate.open, ("unlimited",))
    assert unlimited.wait() == "unlimited"
    for to in ("w0", "w1"):
        for name in ("per call", "default"):
            farcall.rpc_sync(to, Gate.open, (name,))
    # A near deadline after a far one.
    far = farcall.rpc_async("w1", Gate.wait, ("far",), timeout=PATIENCE_S)
    near = farcall.rpc_async("w1", Gate.wait, ("far",), timeout=0.05)
    with pytest.raises(RpcTimeout):
        near.wait()
    farcall.rpc_sync("w1", Gate.open, ("far",))
    assert far.wait() == "far"


def test_timeouts_per_call_default_and_none() -> None:
    run_cluster(2, time_out)


def live_bytes() -> int:
    pool = farcall.api.current_node().pool
    return 0 if pool is None else pool.live_bytes


def answer_late(rank: int) -> None:
    import farcall.api

    if rank:
        return
    assert farcall.get_rpc_timeout() == 0
    count = 1 << 20
    # Once, so that the segment is known to both, and large answers go through it.
    for name in ("warm 1", "warm 2", "warm 3"):
        farcall.rpc_sync("w1", Gate.open, (name,))
        farcall.rpc_sync("w1", Gate.wait_and_return, (name, count))
    node = farcall.api.current_node()
    for attempt in range(3):
        late = farcall.rpc_async("w1", Gate.wait_and_return, (f"late {attempt}", count), timeout=0.02)
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", Gate.wait_and_return, (f"late {attempt}", count), timeout=0.02)
        with pytest.raises(RpcTimeout):
            late.wait()
        farcall.rpc_sync("w1", Gate.open, (f"late {attempt}",))
    assert farcall.rpc_sync("w1", whoami) == "w1"
    # The late answers have come, were dropped, and their memory went back.
    wait_until(lambda: farcall.rpc_sync("w1", live_bytes) == 0, "the release of late answers")
    assert len(node.calls) == 0


def test_late_answers_are_dropped_and_their_memory_released() -> None:
    run_cluster(2, answer_late, rpc_timeout=0)


# ---------------------------------------------------------------------- nesting


def descend(depth: int) -> int:
    """Back and forth between the two workers."""
    if depth == 0:
        return 0
    other = 1 - farcall.get_worker_info().id
    return 1 + farcall.rpc_sync(other, descend, (depth - 1,))


def descend_async(depth: int) -> int:
    if depth == 0:
        return 0
    other = 1 - farcall.get_worker_info().id
    return 1 + farcall.rpc_async(other, descend_async, (depth - 1,)).wait()


def descend_here(depth: int) -> int:
    return 0 if depth == 0 else 1 + farcall.rpc_sync(farcall.get_worker_info(), descend_here, (depth - 1,))


def fibonacci(number: int) -> int:
    if number < 2:
        return number
    other = 1 - farcall.get_worker_info().id
    first = farcall.rpc_async(other, fibonacci, (number - 1,))
    return farcall.rpc_sync(other, fibonacci, (number - 2,)) + first.wait()


def nest(rank: int) -> None:
    # Both at once, in each other's way.
    assert farcall.rpc_sync(1 - rank, descend, (120,)) == 120
    assert farcall.rpc_sync(1 - rank, descend_async, (60,)) == 60
    assert farcall.rpc_sync(rank, descend_here, (60,)) == 60
    calls = [farcall.rpc_async(1 - rank, descend, (5,)) for _ in range(50)]
    assert [call.wait() for call in calls] == [5] * 50
    calls = [farcall.rpc_async(index % 2, descend_async, (3,)) for index in range(50)]
    assert torch.futures.wait_all(calls) == [3] * 50  # torch's own wait, which we cannot see
    assert farcall.rpc_sync(1 - rank, fibonacci, (8,)) == 21


@pytest.mark.parametrize("threads", [1, 2])
def test_nested_calls_need_no_more_threads_than_there_are(threads: int) -> None:
    run_cluster(2, nest, num_worker_threads=threads)


def block_unseen(rank: int) -> None:
    if rank:
        return
    names = [f"unseen {index}" for index in range(5)]
    blocked = [farcall.rpc_async("w1", Gate.wait, (name,)) for name in names]
    # Both threads there are blocked now, and three more wait; what opens them must get through all the same.
    for name in names:
        farcall.rpc_sync("w1", Gate.open, (name,))
    assert [call.wait() for call in blocked] == names
    # One that blocks although it was quick the last ten times.
    for _ in range(10):
        farcall.rpc_sync("w1", Gate.wait, (names[0],))
    blocked = [farcall.rpc_async("w1", Gate.wait, ("blocks",)) for _ in range(5)]
    farcall.rpc_sync("w1", Gate.open, ("blocks",))
    assert [call.wait() for call in blocked] == ["blocks"] * 5


def test_functions_blocked_out_of_sight_do_not_stop_the_others() -> None:
    run_cluster(2, block_unseen, num_worker_threads=2)


# ---------------------------------------------------------------------- callbacks


def call_back(rank: int) -> None:
    other = 1 - rank

    def blocking(done: torch.futures.Future[int]) -> int:
        value = done.wait()
        inner = farcall.rpc_sync(other, add, (value, 1))
        return farcall.rpc_async(rank, add, (inner, 10)).wait()

    # More of them than threads, with somebody reading along and without.
    chained = [farcall.rpc_async(other, add, (index, 100)).then(blocking) for index in range(20)]
    assert farcall.rpc_sync(other, whoami) == f"w{other}"
    assert [future.wait() for future in chained] == [index + 111 for index in range(20)]

    seen: list[int] = []
    all_seen = threading.Event()

    def note(done: torch.futures.Future[int]) -> None:
        seen.append(farcall.rpc_sync(other, add, (done.wait(), 1)))
        if len(seen) == 20:
            all_seen.set()

    for index in range(20):
        farcall.rpc_async(other, add, (index, 0)).add_done_callback(note)
    assert all_seen.wait(PATIENCE_S)
    assert sorted(seen) == list(range(1, 21))

    def blocking_all(done: torch.futures.Future[Any]) -> int:
        total = sum(one.wait() for one in done.wait())
        return int(farcall.rpc_sync(other, descend, (4,)) + total)

    for waiting in (True, False):
        collected = [
            torch.futures.collect_all([farcall.rpc_async(other, add, (index, 0)) for index in range(5)]).then(
                blocking_all
            )
            for _ in range(10)
        ]
        if waiting:
            assert farcall.rpc_sync(other, descend, (3,)) == 3  # the reader of this answer meets those callbacks
        assert [future.wait() for future in collected] == [14] * 10

    # A callback on a future that is done already runs here.
    done = farcall.rpc_async(other, add, (1, 1))
    done.wait()
    assert done.then(blocking).wait() == 13
    # A callback that raises.
    broken = farcall.rpc_async(other, add, (1, 1)).then(lambda done: fail())
    with pytest.raises(Exception, match="as you wish"):
        broken.wait()
    # Callbacks of calls that time out may call, too.
    rescued = torch.futures.collect_all(
        [farcall.rpc_async(other, Gate.wait, (f"rescue {rank}",), timeout=0.05) for _ in range(3)]
    ).then(lambda done: farcall.rpc_sync(other, Gate.open, (f"rescue {rank}",)))
    assert rescued.wait() is None
    assert farcall.rpc_sync(other, whoami) == f"w{other}"


@pytest.mark.parametrize("threads", [1, 8])
def test_callbacks_may_make_blocking_calls(threads: int) -> None:
    run_cluster(2, call_back, num_worker_threads=threads)


@farcall.functions.async_execution
def collect_large(workers: list[int], count: int) -> torch.futures.Future[list[torch.Tensor]]:
    calls = [farcall.rpc_async(worker, torch.ones, (count,)) for worker in workers]
    return torch.futures.collect_all(calls).then(lambda done: [one.wait() for one in done.wait()])


def send_large_from_callbacks(rank: int) -> None:
    """Answers far larger than the sockets hold, from both sides at once, sent by whoever completes the future."""
    other = 1 - rank
    calls = [farcall.rpc_async(other, collect_large, ([rank, other], 1 << 19)) for _ in range(6)]
    for call in calls:
        assert [float(tensor.sum()) for tensor in call.wait()] == [1 << 19] * 2


def test_large_answers_from_callbacks_of_both_sides() -> None:
    run_cluster(2, send_large_from_callbacks, num_worker_threads=1, transports=["tcp"], shared_memory=False)


# ---------------------------------------------------------------------- many threads, waiting for all


def call_from_threads(rank: int) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                to = (number + turn) % 3
                value = number * 1000 + turn
                assert farcall.rpc_sync(to, add, (value, 1)) == value + 1
                futures = [farcall.rpc_async(to, add, (value, index)) for index in range(3)]
                assert [future.wait() for future in futures] == [value, value + 1, value + 2]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    # One future, many waiters.
    future = farcall.rpc_async((rank + 1) % 3, Gate.wait, (f"shared {rank}",))
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    farcall.rpc_sync((rank + 1) % 3, Gate.open, (f"shared {rank}",))
    for thread in threads:
        thread.join()
    assert results == [f"shared {rank}"] * 5


def test_calls_from_many_threads_of_all_workers() -> None:
    run_cluster(3, call_from_threads)


def wait_for_all(rank: int) -> None:
    if rank:
        return
    with farcall._wait_all():
        futures = [farcall.rpc_async("w1", add, (index, 1)) for index in range(10)]
        with farcall._wait_all():
            inner = farcall.rpc_async("w1", add, (1, 1))
        assert inner.done()
    assert all(future.done() for future in futures)
    # Every call is waited for, even if an earlier one failed.
    opened = threading.Timer(0.0, farcall.rpc_sync, ("w1", Gate.open, ("wait all",)))
    with pytest.raises(ValueError, match="as you wish"), farcall._wait_all():  # noqa: PT012 - the exit raises
        farcall.rpc_async("w1", fail)
        last = farcall.rpc_async("w1", Gate.wait, ("wait all",))
        opened.start()
    assert last.done()
    opened.join()
    with pytest.raises(ZeroDivisionError), farcall._wait_all():  # noqa: PT012
        pending = farcall.rpc_async("w1", add, (1, 2))
        raise ZeroDivisionError
    assert pending.done()
    assert farcall.rpc_async("w1", add, (1, 2)).wait() == 3


def test_wait_all() -> None:
    run_cluster(2, wait_for_all)


def outlive_a_peer(rank: int) -> str | None:
    if rank == 2:
        farcall.rpc_sync("w0", Gate.open, ("w2 is up",))
        threading.Event().wait(PATIENCE_S)
        return None
    if rank == 1:
        return None
    Gate.wait("w2 is up")
    pending = farcall.rpc_async("w2", Gate.wait, ("never",), timeout=0)
    with_callback = farcall.rpc_async("w2", Gate.wait, ("never",), timeout=0).then(lambda done: done.wait())
    farcall.rpc_sync("w0", Gate.open, ("w2 is called",))
    with pytest.raises(PeerDead, match="w2"):
        farcall.rpc_sync("w2", die)
    with pytest.raises(PeerDead, match="w2"):
        pending.wait()
    with pytest.raises(Exception, match="w2"):
        with_callback.wait()
    with pytest.raises(PeerDead, match="w2") as refused:
        farcall.rpc_sync("w2", whoami)
    assert refused.value.delivery == "not_sent"
    # A fan-out is not torn by one dead member: its future fails, the others live.
    fan_out = [farcall.rpc_async(to, whoami) for to in ("w0", "w2", "w1")]
    assert fan_out[0].wait() == "w0"
    assert fan_out[2].wait() == "w1"
    with pytest.raises(PeerDead, match="w2"):
        fan_out[1].wait()
    return "survived"


def die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_a_peer_that_dies() -> None:
    members = start_cluster(3, outlive_a_peer)
    assert finish(members, may_fail=[2])[0] == "survived"


def test_leaving_at_once_ends_every_wait() -> None:
    run_cluster(2, leave_in_the_middle)
