"""Calls between real processes: callbacks of futures that make calls themselves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.processes.calls.callees import PATIENCE_S, Gate, add, descend, fail, whoami

import farcall
from farcall.options import MemoryOptions
from farcall.testing.cluster import run_cluster


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
    run_cluster(
        2,
        send_large_from_callbacks,
        num_worker_threads=1,
        transports=["tcp"],
        memory=MemoryOptions(shared_memory=False),
    )
