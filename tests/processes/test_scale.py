"""Many nodes, and many calls: descriptors per peer, and nothing that grows with the number of calls.

``FARCALL_SOAK=full`` runs the long version: a million small calls and 10,000 of 1 MiB.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import farcall
from farcall.testing.cluster import run_cluster

FULL = os.environ.get("FARCALL_SOAK") == "full"
SMALL_CALLS = 1_000_000 if FULL else 20_000
LARGE_CALLS = 10_000 if FULL else 300
NODES = 16

MOST_GROWTH_BYTES = 24 << 20
"""What the allocator and torch may keep for themselves; a leak of 100 bytes per call would be more in the full run."""
ARENA_BYTES = 32 << 20
"""What malloc keeps for one thread more, in an arena of its own: ten large calls in flight, arguments and results."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def memory_bytes() -> int:
    """Of this process alone: shared memory is bounded and counted elsewhere."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def shared_bytes() -> int:
    """Mapped memory files, as far as they are touched."""
    total = 0
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    inside = False
    for line in lines:
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            inside = "memfd:" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def call_all(rank: int, size: int) -> tuple[int, int]:
    names = [f"w{other}" for other in range(size)]
    value = torch.full((1 << 15,), float(rank))
    for _ in range(3):
        futures = [farcall.rpc_async(name, torch.add, (value, other)) for other, name in enumerate(names)]
        for other, future in enumerate(futures):
            assert torch.equal(future.wait(), value + other)
    assert [farcall.rpc_sync(name, farcall.get_worker_info).id for name in names] == list(range(size))
    farcall.barrier(names)
    found = descriptors()
    farcall.barrier(names)
    return found, tasks()


def most_descriptors(size: int) -> int:
    return max(found for found, _ in run_cluster(size, call_all, size, timeout_s=250.0))


@pytest.mark.timeout(600)
def test_sixteen_nodes_call_all_to_all_with_two_descriptors_per_peer() -> None:
    few = most_descriptors(2)
    many = most_descriptors(NODES)
    assert many - few <= 2 * (NODES - 2)


class Usage:
    """What a process uses, before and after."""

    def __init__(self) -> None:
        self.descriptors = descriptors()
        self.tasks = tasks()
        self.threads = threading.active_count()
        self.memory_bytes = memory_bytes()
        self.shared_bytes = shared_bytes()

    def grown_since(self, before: Usage) -> dict[str, int]:
        return {
            "descriptors": self.descriptors - before.descriptors,
            "tasks": self.tasks - before.tasks,
            "threads": self.threads - before.threads,
            "memory_bytes": self.memory_bytes - before.memory_bytes,
            "shared_bytes": self.shared_bytes - before.shared_bytes,
        }


_before: list[Usage] = []


def begin() -> None:
    _before[:] = [Usage()]


def growth() -> dict[str, int]:
    return Usage().grown_since(_before[0])


def small_calls(count: int) -> None:
    for number in range(count // 2):
        assert farcall.rpc_sync("w1", max, (number, -1)) == number
    for first in range(0, count // 2, 100):
        futures = [farcall.rpc_async("w1", max, (first + number, -1)) for number in range(100)]
        assert sum(future.wait() for future in futures) == 100 * first + 4950


def large_calls(count: int) -> None:
    value = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB
    for number in range(count // 2):
        assert float(farcall.rpc_sync("w1", torch.add, (value, number))[7]) == number + 7
    for first in range(0, count // 2, 10):
        futures = [farcall.rpc_async("w1", torch.add, (value, first + number)) for number in range(10)]
        assert [float(future.wait()[7]) for future in futures] == [first + number + 7 for number in range(10)]


def soak(rank: int) -> list[dict[str, int]]:
    if rank == 1:
        return []
    # Once, for what is made once and kept: threads, caches, pools, warm memory.
    small_calls(4000)
    large_calls(100)
    farcall.rpc_sync("w1", begin)
    begin()
    small_calls(SMALL_CALLS)
    large_calls(LARGE_CALLS)
    # Threads beyond the pool's size end after a while; memory of the last call comes back with a message.
    give_up_at = time.monotonic() + 60.0
    while True:
        found = [growth(), farcall.rpc_sync("w1", growth)]
        if all(flat(grown) for grown in found) or time.monotonic() > give_up_at:
            return found
        time.sleep(0.05)


def flat(grown: dict[str, int]) -> bool:
    return (
        grown["descriptors"] <= 0
        # A busy machine makes one worker more; idle ones end. Each thread that computes has a team of torch's: that
        # worker, and the I/O thread, which may run its first large function after the count began.
        and grown["threads"] <= 1
        and grown["tasks"] <= 1 + 2 * (torch.get_num_threads() - 1)
        and grown["memory_bytes"] < MOST_GROWTH_BYTES + ARENA_BYTES * max(0, grown["threads"])
        and grown["shared_bytes"] < MOST_GROWTH_BYTES
    )


@pytest.mark.timeout(3600 if FULL else 400)
@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_many_calls_leave_memory_descriptors_and_threads_flat(transports: tuple[str, ...]) -> None:
    # One thread: with more, the pool may still be growing to its size when counting begins.
    found = run_cluster(2, soak, transports=transports, num_worker_threads=1, timeout_s=3500.0 if FULL else 380.0)[0]
    print(found)
    assert len(found) == 2
    assert all(flat(grown) for grown in found), found
