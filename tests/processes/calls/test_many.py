"""Calls between real processes: from many threads at once, and waiting for all of them."""

from __future__ import annotations

import threading

import pytest
from tests.processes.calls.callees import Gate, add, fail

import farcall
from farcall.testing.cluster import run_cluster


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
    with farcall.wait_all():
        futures = [farcall.rpc_async("w1", add, (index, 1)) for index in range(10)]
        with farcall.wait_all():
            inner = farcall.rpc_async("w1", add, (1, 1))
        assert inner.done()
    assert all(future.done() for future in futures)
    # Every call is waited for, even if an earlier one failed.
    opened = threading.Timer(0.0, farcall.rpc_sync, ("w1", Gate.open, ("wait all",)))
    with pytest.raises(ValueError, match="as you wish"), farcall.wait_all():  # noqa: PT012 - the exit raises
        farcall.rpc_async("w1", fail)
        last = farcall.rpc_async("w1", Gate.wait, ("wait all",))
        opened.start()
    assert last.done()
    opened.join()
    with pytest.raises(ZeroDivisionError), farcall.wait_all():  # noqa: PT012
        pending = farcall.rpc_async("w1", add, (1, 2))
        raise ZeroDivisionError
    assert pending.done()
    assert farcall.rpc_async("w1", add, (1, 2)).wait() == 3


def test_wait_all() -> None:
    run_cluster(2, wait_for_all)
