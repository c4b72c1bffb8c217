"""A node in an asyncio program: nothing holds up the event loop, however many calls are awaited at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tests.kit.ports import tcp_url
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import add

import farcall


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


def test_ten_thousand_calls_are_awaited_at_once_and_no_thread_waits() -> None:
    with team([None] * 3, size=3, rpc_timeout=4 * LONG_S) as nodes:
        workers = [nodes[0]["w1"], nodes[0]["w2"]]

        async def program() -> int:
            futures = [workers[index % 2].start(add, index, 1) for index in range(10_000)]
            results = asyncio.gather(*futures)
            threads = [thread.name for thread in threading.enumerate() if "worker-w0" in thread.name]
            assert await results == list(range(1, 10_001))
            return len(threads)

        # Threads of the caller's node: none for each call, at most those kept for functions.
        assert asyncio.run(program()) <= farcall.RpcBackendOptions().num_worker_threads
