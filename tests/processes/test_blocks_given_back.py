"""A received tensor that is sent back to its owner travels without a copy, but only if nobody else can see it."""

from __future__ import annotations

from typing import Any

import torch
from tests.kit.waiting import wait_until

import farcall
from farcall.testing.cluster import run_cluster

SIZE = 1 << 16
_kept: list[torch.Tensor] = []


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(2)


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.numel() // 2]


def keep(tensor: torch.Tensor) -> torch.Tensor:
    _kept.append(tensor)
    return tensor


def keep_view(tensor: torch.Tensor) -> torch.Tensor:
    _kept.append(tensor[3:7])
    return tensor


def twice(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor.view(2, -1)


def overwrite_kept() -> None:
    for tensor in _kept:
        tensor.fill_(-1)
    _kept.clear()


def _values(rank: int) -> Any:
    if rank:
        return None
    pool = farcall.api.current_runtime().pool
    for number in range(20):
        sent = torch.full((SIZE,), float(number))
        echoed = farcall.rpc_sync("w1", echo, (sent,))
        doubled = farcall.rpc_sync("w1", double, (sent,))
        assert torch.equal(echoed, sent)
        assert torch.equal(doubled, sent * 2)
        assert torch.equal(farcall.rpc_sync("w1", half, (sent,)), sent[: SIZE // 2])
        whole, halves = farcall.rpc_sync("w1", twice, (sent,))
        assert whole.untyped_storage().data_ptr() == halves.untyped_storage().data_ptr()
        kept = farcall.rpc_sync("w1", keep, (sent,))
        kept_in_part = farcall.rpc_sync("w1", keep_view, (sent,))
        farcall.rpc_sync("w1", overwrite_kept)
        # What the callee still holds is its own: writing there must not be seen here, nor the other way round.
        assert torch.equal(kept, sent)
        assert torch.equal(kept_in_part, sent)
        echoed.fill_(7)
        doubled.fill_(8)
        assert torch.equal(kept, sent)
    del echoed, doubled, whole, halves, kept, kept_in_part
    # Everything comes back, with the next answers: at most what the last releases, not yet sent, still hold.
    wait_until(lambda: farcall.rpc_sync("w1", overwrite_kept) is None and pool.live_bytes <= 4 * SIZE * 4)
    return pool.total_bytes


def test_blocks_given_back_keep_value_semantics_and_are_not_lost() -> None:
    total, _ = run_cluster(2, _values)
    assert total <= 64 << 20


def _without_a_copy(rank: int) -> Any:
    if rank:
        return None
    pool = farcall.api.current_runtime().pool
    sent = torch.ones(SIZE)
    for _ in range(3):  # the first one only introduces the segment
        farcall.rpc_sync("w1", echo, (sent,))
    result = farcall.rpc_sync("w1", echo, (sent,))
    return any(
        segment.address <= result.data_ptr() < segment.address + segment.size for segment in pool._segments.values()
    )


def test_an_echo_comes_back_in_the_memory_it_was_sent_in() -> None:
    assert run_cluster(2, _without_a_copy) == [True, None]
