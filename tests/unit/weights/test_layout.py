"""What a program publishes, taken apart: what cannot be copied is said so, and not touched."""

from __future__ import annotations

import pytest
import torch

from farcall.weights.layout import plan_storages, take_apart
from farcall.weights.loading import why_not_loadable


@pytest.mark.parametrize("offset", [0, 7])
def test_a_tensor_whose_storage_was_freed(offset: int) -> None:
    tensor = torch.ones(64)[offset:]
    tensor.untyped_storage().resize_(0)  # as libraries do that shard models
    with pytest.raises(ValueError, match="x has no memory at the moment"):
        plan_storages(take_apart({"x": tensor}).tensors, None)
    assert "no memory" in why_not_loadable(tensor, torch.float32)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="x is quantized"):
        take_apart({"x": quantized})
