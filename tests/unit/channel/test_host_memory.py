"""Copies arrive whole whatever way is chosen."""

from __future__ import annotations

import os

import pytest
import torch

from farcall.channel import host_memory
from farcall.channel.host_memory import copy_bytes


@pytest.mark.parametrize("size", [0, 1, 1000, 256 * 1024, 256 * 1024 + 1, (4 << 20) + 13])
@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("cores", [2, 64])
def test_whole(size: int, readonly: bool, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_cores", cores)
    monkeypatch.setattr(host_memory, "_WORTH_MANY_CORES_BYTES", 1 << 20)
    data = os.urandom(size)
    source = memoryview(data if readonly else bytearray(data))
    target = bytearray(size + 1)
    copy_bytes(memoryview(target), source)
    assert target[:size] == data
    assert target[size] == 0


def test_any_format() -> None:
    source = memoryview(torch.arange(200_000, dtype=torch.float64).numpy()).cast("B").cast("d", (500, 400))
    target = bytearray(source.nbytes)
    copy_bytes(memoryview(target), source)
    assert torch.frombuffer(target, dtype=torch.float64).equal(torch.arange(200_000, dtype=torch.float64))


def test_too_long_is_refused() -> None:
    for size in (11, 1 << 20):
        with pytest.raises(ValueError, match="do not fit"):
            copy_bytes(memoryview(bytearray(10)), memoryview(bytearray(size)))
