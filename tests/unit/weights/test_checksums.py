"""Checksums: two implementations that agree, and changes that are found."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from farcall.serialize.flat import copy_and_sum, speedups
from farcall.weights.checksums import (
    MASK,
    PAGE_BYTES,
    _in_python,
    checksum,
    checksums_of_pages,
    copy_with_checksum,
    page_sums,
)

SIZES = [1, 7, 8, 9, 4095, 4096, 4097, 40_000, 1 << 18, (1 << 18) + 13]


def content(size: int) -> bytearray:
    return bytearray(random.Random(size).randbytes(size))


def address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@pytest.mark.parametrize("size", SIZES)
def test_both_ways_copy_alike_and_agree(size: int) -> None:
    source, first, second = content(size), bytearray(size), bytearray(size)
    one = copy_with_checksum(address(first), address(source), size)
    other = _in_python(address(second), address(source), size)
    assert first == second == source
    assert one == other == checksum(memoryview(source))


def test_the_compiled_one_is_used_where_it_is() -> None:
    assert copy_with_checksum is (copy_and_sum or _in_python)
    assert bool(speedups) or copy_and_sum is not None


@pytest.mark.parametrize("size", SIZES)
def test_a_flipped_bit_is_found(size: int) -> None:
    data = content(size)
    before = checksum(memoryview(data))
    for at in {0, size // 2, size - 1}:
        for bit in (1, 128):
            data[at] ^= bit
            assert checksum(memoryview(data)) != before
            data[at] ^= bit
    assert checksum(memoryview(data)) == before


def test_pages_in_another_order_are_found() -> None:
    data = content(5 * 4096)
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    assert checksum(memoryview(swapped)) != checksum(memoryview(data))


def test_a_device_that_sums_up_pages_works_out_the_same() -> None:
    """All storages at once, each from a whole page on, with something between them."""
    sizes = [*SIZES, 8192, 3 * PAGE_BYTES, 1]
    whole, ranges, tails, wanted = bytearray(content(PAGE_BYTES)), [], [], []
    for size in sizes:
        data = content(size)
        start, pages = len(whole) // PAGE_BYTES, size // PAGE_BYTES
        ranges.append((start, start + pages))
        tails.append(data[pages * PAGE_BYTES :])
        wanted.append(checksum(memoryview(data)))
        whole += data + content(-size % PAGE_BYTES)
    sums = page_sums(torch.frombuffer(whole, dtype=torch.uint8))
    found = checksums_of_pages(sums, ranges)
    behind = [checksum(memoryview(tail)) if tail else 0 for tail in tails]
    assert [(one + other) & MASK for one, other in zip(found, behind, strict=True)] == wanted
