"""Blocks filled from a device, which is CPU memory here: the same bytes and checksums as from the host."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.weights import filling
from farcall.weights.filling import alignment, fill
from farcall.weights.layout import plan_storages
from farcall.weights.memory import Block, aligned
from farcall.weights.twins import Twin


def tensors() -> dict[Any, torch.Tensor]:
    large = torch.arange(100_003, dtype=torch.float32)
    return {
        ("large",): large,
        ("head",): large[:1000],
        ("turned",): torch.arange(6000, dtype=torch.int16).view(60, 100).t(),
        ("odd",): torch.arange(13, dtype=torch.uint8)[3:],
        ("page",): torch.ones(4096, dtype=torch.uint8),
        ("mask",): torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("has_twin", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_block_is_filled_as_from_the_host(
    has_twin: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(filling, "current_stream", lambda device: stream)
    plans = plan_storages(tensors(), dtype)
    sizes = (aligned(plan.size_bytes, alignment(0)) for plan in plans)
    *offsets, size = itertools.accumulate(sizes, initial=0)
    placed = list(zip(plans, offsets, strict=True))
    near, far = Block(1, size, is_shared=True), Block(2, size, is_shared=True)
    try:
        if has_twin:
            near.twin = Twin(0, torch.zeros(near.size, dtype=torch.uint8))
        assert fill(near, 0, placed) == fill(far, -1, placed)
        assert waits == [1]
        for plan, offset in placed:
            bytes_of = slice(offset, offset + plan.size_bytes)
            assert near.view[bytes_of] == far.view[bytes_of]
            if near.twin is not None:
                assert bytes(near.twin.memory[bytes_of].tolist()) == bytes(far.view[bytes_of])
    finally:
        near.close()
        far.close()
