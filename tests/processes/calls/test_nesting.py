"""Calls between real processes: functions that call on, and functions that block."""

from __future__ import annotations

import pytest
import torch
from tests.processes.calls.callees import Gate, descend

import farcall
from farcall.testing.cluster import run_cluster


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
