"""A node in an asyncio program: nothing holds up the event loop, however many calls are awaited at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.stopping import stop
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate, add

import farcall
from farcall.options import LimitOptions, MembershipOptions, MemoryOptions
from farcall.testing.cluster import run_cluster


class Ticker:
    """Counts the turns of an event loop."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0.001)

    def goes_on(self) -> Callable[[], bool]:
        """Has it turned ten times more by then?"""
        before = self.turns
        return lambda: self.turns > before + 10


def test_start_and_leave_let_the_loop_go_on() -> None:
    url, ticker, may_leave = tcp_url(), Ticker(), threading.Event()

    def other() -> None:
        wait_until(ticker.goes_on(), "the loop's going on during the start")  # w0 waits for this worker
        options = farcall.RpcBackendOptions(init_method=url)
        with farcall.Node("w1", rank=1, world_size=2, options=options):
            assert may_leave.wait(LONG_S)
            wait_until(ticker.goes_on(), "the loop's going on during the shutdown")  # so it does here

    async def program() -> None:
        ticking = asyncio.create_task(ticker.run())
        options = farcall.RpcBackendOptions(init_method=url)
        async with farcall.Node("w0", rank=0, world_size=2, options=options) as node:
            assert await node["w1"].start(add, 1, 2) == 3
            may_leave.set()
        ticking.cancel()

    thread = threading.Thread(target=other)
    thread.start()
    asyncio.run(program())
    thread.join(LONG_S)
    assert not thread.is_alive()


def sum_of(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def many_at_once(rank: int, new_loop: str) -> None:
    """10,000 calls to four workers, awaited at once, three times: the second and third time need no more memory."""
    if rank:
        return
    workers = [farcall.worker(f"w{index}") for index in range(1, 5)]

    async def program() -> None:
        for turn in range(3):
            futures = [workers[index % 4].start(add, index, 1) for index in range(10_000)]
            results = asyncio.gather(*futures)
            threads = [thread.name for thread in threading.enumerate() if "worker-w0" in thread.name]
            assert len(threads) < 100  # none for each call: the pool's, and one or another on a busy machine
            assert await results == list(range(1, 10_001))
            del futures, results
            gc.collect()
            if turn == 0:
                tracemalloc.start()
            held_bytes.append(tracemalloc.get_traced_memory()[0])
        # Ten bytes for each call would be a leak. What was sent is kept until the other side says that it has it.
        give_up_at = asyncio.get_running_loop().time() + LONG_S
        while held_bytes[-1] - held_bytes[1] >= 10_000 * 10:
            assert asyncio.get_running_loop().time() < give_up_at, held_bytes
            await asyncio.sleep(0.1)
            gc.collect()
            held_bytes.append(tracemalloc.get_traced_memory()[0])

    held_bytes: list[int] = []
    if new_loop == "uvloop":
        import uvloop

        uvloop.run(program())
    else:
        asyncio.run(program())


@pytest.mark.timeout(10 * LONG_S)
@pytest.mark.parametrize("new_loop", ["asyncio", "uvloop"])
def test_ten_thousand_calls_are_awaited_at_once_and_no_thread_waits(new_loop: str) -> None:
    if new_loop == "uvloop":
        pytest.importorskip("uvloop")
    run_cluster(5, many_at_once, new_loop, rpc_timeout=8 * LONG_S, timeout_s=8 * LONG_S)


class Tensors:
    """Streams under uvloop, too."""

    async def count(self, until: int) -> AsyncIterator[torch.Tensor]:
        for number in range(until):
            await asyncio.sleep(0)
            yield torch.full((10,), float(number))


def use_uvloop(rank: int) -> None:
    if rank:
        return
    import uvloop

    async def program() -> None:
        w1 = farcall.worker("w1")
        tensors = w1.create(Tensors)
        assert [float(item[0]) async for item in tensors.stream.count(300)] == [float(number) for number in range(300)]
        waits = w1.start(Gate.wait, "uvloop")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waits, 0.01)
        assert waits.cancelled()
        await w1.start(Gate.open, "uvloop")

    uvloop.run(program())


def test_streams_and_cancellation_under_uvloop() -> None:
    pytest.importorskip("uvloop")  # in a process of its own: it keeps descriptors for as long as that lives
    run_cluster(2, use_uvloop, rpc_timeout=LONG_S)


def call_a_stopped_worker(rank: int) -> None:
    """Nothing here holds up the loop: if it did, nobody would let the worker go on, and the calls would time out."""
    if rank:
        return
    pid = farcall.worker("w1").call(os.getpid)
    large = torch.ones(8 << 20)  # 32 MiB: no kernel takes that while nobody reads

    async def program() -> None:
        ticker = Ticker()
        ticking = asyncio.create_task(ticker.run())
        stop(pid)
        try:
            w1 = farcall.worker("w1")
            futures = [w1.start(add, bytes(50_000), b"") for _ in range(400)]  # more than the backlog's limit
            sums = [w1.start(sum_of, large) for _ in range(2)]
            await asyncio.sleep(0)
            large.zero_()  # it was sent as it was
            goes_on = ticker.goes_on()
            while not goes_on():
                await asyncio.sleep(0.001)
            assert not any(future.done() for future in sums)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*sums) == [float(8 << 20)] * 2
        assert all(len(found) == 50_000 for found in await asyncio.gather(*futures))
        ticking.cancel()

    slow: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: slow.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)

    async def watched() -> None:
        asyncio.get_running_loop().slow_callback_duration = LONG_S / 2  # a wait for the worker would take all of it
        await program()

    asyncio.run(watched(), debug=True)
    assert not [text for text in slow if text.startswith("Executing")], slow


@pytest.mark.parametrize("transports", [("tcp",), ("unix", "tcp")])
def test_a_worker_that_does_not_read_holds_up_no_loop(transports: tuple[str, ...]) -> None:
    run_cluster(
        2,
        call_a_stopped_worker,
        transports=transports,
        rpc_timeout=2 * LONG_S,
        memory=MemoryOptions(shared_memory=False),
        limits=LimitOptions(send_backlog_limit_bytes=4 << 20),
        membership=MembershipOptions(suspicion_s=600.0),
    )


def test_a_full_worker_holds_up_no_loop() -> None:
    """As many calls wait there as may: a caller on a thread waits for room, one on a loop must not."""

    async def program() -> None:
        w1 = nodes[0]["w1"]
        held = [w1.start(Gate.wait, "full") for _ in range(40)]
        assert not any(future.done() for future in held)
        await asyncio.sleep(0)
        Gate.open("full")  # by the loop that made the calls
        assert await asyncio.gather(*held) == ["full"] * 40

    with team([None] * 2, rpc_timeout=LONG_S, limits=LimitOptions(max_queued_calls=4), num_worker_threads=1) as nodes:
        asyncio.run(program(), debug=True)
