"""Receive memory comes back by itself, is bounded, and goes when it is idle."""

from __future__ import annotations

import torch

from farcall.channel.host_memory import ReceivePool

MEBIBYTE = 1 << 20


def address_of(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def idle_bytes(pool: ReceivePool) -> int:
    with pool._lock:
        pool._collect()
        return pool._idle_bytes


def test_memory_is_used_again() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    first = pool.take(MEBIBYTE)
    address = address_of(first)
    second = pool.take(MEBIBYTE)
    assert address_of(second) != address
    del first
    assert address_of(pool.take(MEBIBYTE - 1000)) == address


def test_the_tensor_keeps_its_memory() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    tensor = torch.frombuffer(pool.take(MEBIBYTE), dtype=torch.float32)
    tensor.fill_(3)
    other = torch.frombuffer(pool.take(MEBIBYTE), dtype=torch.float32).fill_(4)
    assert tensor.data_ptr() != other.data_ptr()
    assert bool((tensor == 3).all())
    assert idle_bytes(pool) == 0
    del tensor
    assert idle_bytes(pool) == MEBIBYTE


def test_idle_memory_is_limited() -> None:
    pool = ReceivePool(4 * MEBIBYTE)
    taken = [pool.take(MEBIBYTE) for _ in range(10)] + [pool.take(2 * MEBIBYTE)]
    assert idle_bytes(pool) == 0
    taken.clear()
    assert 0 < idle_bytes(pool) <= 4 * MEBIBYTE


def test_too_large_to_keep() -> None:
    pool = ReceivePool(MEBIBYTE)
    view = pool.take(8 * MEBIBYTE)
    del view
    assert idle_bytes(pool) == 0


def test_idle_memory_goes_in_time() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    pool.trim(now=100.0)
    view = pool.take(MEBIBYTE)
    del view
    pool.trim(now=105.0, idle_s=10.0)
    assert idle_bytes(pool) == MEBIBYTE
    pool.trim(now=115.0, idle_s=10.0)
    assert idle_bytes(pool) == 0


def test_a_near_fit_is_taken_a_far_one_is_not() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    view = pool.take(MEBIBYTE)
    address = address_of(view)
    del view
    near = pool.take(MEBIBYTE * 3 // 4)
    assert address_of(near) == address
    assert len(near) == MEBIBYTE * 3 // 4
    del near
    small = pool.take(100_000)
    assert address_of(small) != address


def test_small_ones_are_plain() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    assert len(pool.take(10)) == 10
    assert len(pool.take(0)) == 0
    assert idle_bytes(pool) == 0


def test_after_close_tensors_live_on() -> None:
    pool = ReceivePool(64 * MEBIBYTE)
    view = pool.take(MEBIBYTE)
    view[:3] = b"abc"
    pool.close()
    assert bytes(view[:3]) == b"abc"
    del view
    assert idle_bytes(pool) == 0
    assert len(pool.take(MEBIBYTE)) == MEBIBYTE
