"""Large messages before memory is warm: fresh memory is touched once, and what has come back is used again."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farcall
from farcall.channel.segments import segments_work
from farcall.testing.cluster import run_cluster

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files here")

SIZE_BYTES = 16 << 20
PAGES = SIZE_BYTES // mmap.PAGESIZE
_kept: list[torch.Tensor] = []


def faults() -> int:
    """How many pages of this process were missing when they were touched."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def take(tensor: torch.Tensor) -> None:
    pass


def refuse(tensor: torch.Tensor) -> None:
    raise ValueError("not this one")


async def take_later(tensor: torch.Tensor) -> None:
    pass


def keep(tensor: torch.Tensor) -> None:
    _kept.append(tensor)


def sums_of_kept() -> list[int]:
    return [int(tensor.sum()) for tensor in _kept]


def give(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)


def refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not this one"):
        farcall.rpc_sync("w1", refuse, (tensor,))


def _first_and_second(rank: int) -> Any:
    if rank:
        return None
    found = []
    tensors = [torch.ones(SIZE_BYTES // 4, dtype=torch.uint8) for _ in range(4)]
    for _ in range(2):
        here, there = faults(), farcall.rpc_sync("w1", faults)
        farcall.rpc_sync("w1", take, (tensors,))
        found.append((faults() - here, farcall.rpc_sync("w1", faults) - there))
    pool = farcall.api.current_runtime().pool
    assert pool is not None
    return found, pool.live_bytes, max(segment.filled_bytes for segment in pool._segments.values())


def test_the_first_send_fills_shared_memory_and_the_second_finds_it_there() -> None:
    ((first, second), live_bytes, filled_bytes), _ = run_cluster(2, _first_and_second)
    assert filled_bytes >= SIZE_BYTES, "the sender fills the memory"
    assert first[1] < PAGES / 4, "the receiver touches none of its own"
    assert max(second) < PAGES / 4
    assert live_bytes == 0, "releases ride with the answer"


def _one_after_the_other(rank: int, send: Callable[[torch.Tensor], object]) -> Any:
    if rank:
        return None
    tensor = torch.ones(SIZE_BYTES, dtype=torch.uint8)
    send(tensor)
    pool = farcall.api.current_runtime().pool
    assert pool is not None
    live_bytes, before = pool.live_bytes, faults()
    for _ in range(4):
        send(tensor)
    return live_bytes, faults() - before


def sent(tensor: torch.Tensor) -> None:
    farcall.rpc_sync("w1", take, (tensor,))


def sent_to_coroutine(tensor: torch.Tensor) -> None:
    farcall.rpc_sync("w1", take_later, (tensor,))


@pytest.mark.parametrize("send", [sent, sent_to_coroutine, refused])
def test_a_block_is_back_when_its_answer_is(send: Callable[[torch.Tensor], object]) -> None:
    (live_bytes, more), _ = run_cluster(2, _one_after_the_other, send)
    assert live_bytes == 0
    assert more < PAGES


def _answer(rank: int) -> Any:
    if rank:
        return None
    before = faults(), farcall.rpc_sync("w1", faults)
    tensor = farcall.rpc_sync("w1", give, (SIZE_BYTES,))
    after = faults(), farcall.rpc_sync("w1", faults)
    assert int(tensor.sum()) == SIZE_BYTES
    return after[0] - before[0], after[1] - before[1]


def test_the_first_answer_touches_no_memory_here() -> None:
    (here, there), _ = run_cluster(2, _answer)
    assert here < PAGES / 4
    assert there > PAGES


def _kept_tensors(rank: int) -> Any:
    if rank:
        return None
    for value in range(4):
        farcall.rpc_sync("w1", keep, (torch.full((SIZE_BYTES,), value, dtype=torch.uint8),))
    farcall.rpc_sync("w1", take, (torch.full((SIZE_BYTES,), 9, dtype=torch.uint8),))
    return farcall.rpc_sync("w1", sums_of_kept)


def test_what_the_callee_keeps_is_its_own_from_the_first_send_on() -> None:
    sums, _ = run_cluster(2, _kept_tensors)
    assert sums == [value * SIZE_BYTES for value in range(4)]
