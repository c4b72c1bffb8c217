"""Ten thousand sends of random sizes, checked by sums computed on the GPU, while other streams write.

``FARCALL_STRESS_SENDS`` sets another number.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import Any

import pytest
import torch
from tests.gpu.callees import CUDA, MAPS, lent, share
from tests.kit.waiting import wait_until

import farcall
from farcall.options import MemoryOptions
from farcall.runtime.node import current_runtime
from farcall.testing.cluster import run_cluster

SENDS = int(os.environ.get("FARCALL_STRESS_SENDS", "10000"))
LARGEST_BYTES = 4 << 20
IN_FLIGHT = 24


def weights(size: int) -> torch.Tensor:
    return torch.arange(size, device=CUDA, dtype=torch.int64) % 1009 + 1


def checksum(x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.int64) * weights(x.numel())).sum()


def checked(x: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether it is what was sent, found out on the device; and the same memory, written over and sent back."""
    is_right = checksum(x) == expected
    return is_right, x ^ 85


def stressed(rank: int) -> dict[str, Any] | None:
    if rank:
        return None
    share("w1")
    rng = random.Random(0)
    sources = [torch.randint(0, 255, (LARGEST_BYTES,), device=CUDA, dtype=torch.uint8) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    writer = torch.cuda.Stream()
    scratch = torch.zeros(LARGEST_BYTES, device=CUDA, dtype=torch.uint8)
    pending: deque[tuple[Any, torch.Tensor]] = deque()
    outcomes: list[torch.Tensor] = []
    sizes: list[int] = []
    reserved = 0

    def take() -> None:
        future, expected_back = pending.popleft()
        is_right, back = future.wait()
        outcomes.append(torch.stack((is_right, checksum(back) == expected_back)))

    torch.cuda.synchronize()
    for number in range(SENDS):
        source = sources[number % 4]
        stream = streams[number % 4]
        size = int(2 ** rng.uniform(0, LARGEST_BYTES.bit_length() - 1))
        sizes.append(size)
        start = rng.randrange(LARGEST_BYTES - size + 1)
        with torch.cuda.stream(stream):
            part = source[start : start + size]
            expected, expected_back = checksum(part), checksum(part ^ 85)
            pending.append((farcall.rpc_async("w1", checked, args=(part, expected)), expected_back))
            source.add_(number % 7)  # what was sent must not change with it
        expected_back.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.stream(writer):
            scratch.add_(1)
        while len(pending) > IN_FLIGHT:
            take()
        if number == SENDS // 2:
            reserved = torch.cuda.memory_reserved()
    while pending:
        take()
    found = torch.stack(outcomes).cpu().tolist()
    wrong = [(number, sizes[number], *right) for number, right in enumerate(found) if not all(right)]
    assert not wrong, f"not what was sent (number, size, there, back): {wrong}"
    wait_until(lambda: lent() == 0)
    devices = current_runtime().devices
    assert devices is not None
    assert devices.stats().total <= 512 << 20
    grown = torch.cuda.memory_reserved() - reserved
    assert grown <= 256 << 20, "memory is not flat"
    return {"sends": SENDS, "pool_bytes": devices.stats().total, "grown_bytes": grown}


@pytest.mark.parametrize("views", [False, True])
def test_many_random_sends_under_concurrent_writes(views: bool) -> None:
    print(run_cluster(2, stressed, timeout_s=240.0, memory=MemoryOptions(device_views=views), **MAPS)[0])
