"""Memory says that nobody uses it exactly when nobody does: the facts of Python and torch this rests on."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from farcall.channel.host_memory import ALIGNMENT_BYTES, leased, rounded_size

DERIVED: dict[str, Callable[[memoryview], Any]] = {
    "the view itself": lambda view: view,
    "a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32),
    "a view of a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32)[3:7].view(2, 2).t(),
    "a storage": lambda view: torch.frombuffer(view, dtype=torch.uint8).untyped_storage(),
    "a detached tensor": lambda view: torch.nn.Parameter(torch.frombuffer(view, dtype=torch.float32)).detach(),
    "a graph": lambda view: torch.frombuffer(view, dtype=torch.float32).requires_grad_().pow(2).sum(),
    "an array": lambda view: numpy.frombuffer(view, dtype=numpy.uint8),
    "a view of an array": lambda view: numpy.frombuffer(view, dtype=numpy.float32)[::2],
    "a tensor of an array": lambda view: torch.from_numpy(numpy.frombuffer(view, dtype=numpy.int32)[2:]),
    "an array of a tensor": lambda view: torch.frombuffer(view, dtype=torch.int32)[2:].numpy(),
    "a slice": lambda view: view[5:9],
    "a cast": lambda view: view.cast("f"),
    "a read-only view": lambda view: view.toreadonly(),
    "another view": lambda view: memoryview(view),
    "a pickle buffer": lambda view: pickle.PickleBuffer(view),
    "a tensor of a slice": lambda view: torch.frombuffer(view[8:72], dtype=torch.float64),
}


@pytest.mark.parametrize("derived", DERIVED)
def test_nothing_that_reaches_the_memory_outlives_the_lease(derived: str) -> None:
    ended: list[object] = []
    view, lease = leased(memoryview(bytearray(1024))[64:576], ended.append, "holder")
    user = DERIVED[derived](view)
    del view
    gc.collect()
    assert ended == []
    del user
    gc.collect()
    assert ended == [lease]
    assert lease.holder == "holder"


def test_the_bytes_are_the_same() -> None:
    memory = bytearray(1024)
    view, _ = leased(memoryview(memory)[64:128], lambda lease: None, None)
    assert len(view) == 64
    view[0] = 7
    assert memory[64] == 7
    assert not view.readonly


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 511, 512, 513, 1000, 1 << 16, (1 << 16) + 1, 1 << 28, 10**9 + 7])
def test_sizes_are_rounded_to_few(size: int) -> None:
    rounded = rounded_size(size)
    assert rounded >= size
    assert rounded % ALIGNMENT_BYTES == 0
    assert rounded - size <= max(ALIGNMENT_BYTES, size // 8)
    assert rounded_size(rounded) == rounded


def test_powers_of_two_are_not_rounded() -> None:
    assert [rounded_size(1 << power) for power in range(6, 40)] == [1 << power for power in range(6, 40)]
