"""Copying a publisher's tensors into a block.

Copies from a device go onto the current stream, behind the program's own work, and the host waits once for all of them.
If the block has a twin, each storage is copied into the twin, and the twin to the host in one copy. Without a twin each
storage goes to the host by itself. Storages begin at page boundaries, so the device sums all pages of a twin at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farcall.channel.device_api import current_stream
from farcall.channel.host_memory import ALIGNMENT_BYTES
from farcall.weights.checksums import MASK, PAGE_BYTES, checksum, checksums_of_pages, page_sums
from farcall.weights.layout import StoragePlan
from farcall.weights.memory import Block, aligned

WORTH_SUMMING_BYTES = 256 * 1024
"""For smaller storages the host computes the checksum faster."""


def alignment(device: int) -> int:
    """The alignment, in their block, of storages from ``device`` (-1: the host)."""
    return ALIGNMENT_BYTES if device < 0 else PAGE_BYTES


def fill(block: Block, device: int, plans: Sequence[tuple[StoragePlan, int]]) -> list[int]:
    """Fill ``block`` with storages of ``device`` (-1: the host), each at its offset; return their checksums."""
    if device < 0:
        return [plan.fill(block.view[offset : offset + plan.size_bytes]) for plan, offset in plans]
    block.pin(device)
    host = torch.frombuffer(block.view, dtype=torch.uint8)
    twin = block.twin
    memory = None if twin is None else twin.memory
    sums: list[torch.Tensor] = []  # the sums of pages
    ranges = []  # for each storage, the range of its pages in the sums
    summed = 0
    end = 0
    try:
        for plan, offset in plans:
            end = offset + plan.size_bytes
            packed = plan.packed(None if memory is None else memory[offset:end])
            if memory is not None:
                ranges.append((offset // PAGE_BYTES, end // PAGE_BYTES))
                continue
            host[offset:end].copy_(packed, non_blocking=True)
            pages = plan.size_bytes // PAGE_BYTES if plan.size_bytes >= WORTH_SUMMING_BYTES else 0
            ranges.append((summed, summed + pages))
            if pages:
                sums.append(page_sums(packed))
                summed += pages
        if memory is not None:
            end = aligned(end, PAGE_BYTES)
            sums.append(page_sums(memory[:end]))
            host[:end].copy_(memory[:end], non_blocking=True)
        found = checksums_of_pages(torch.cat(sums), ranges) if sums else [0] * len(plans)
    finally:
        # After Ctrl-C, too: a copy that is still running would overwrite the next content of this block.
        current_stream(device).synchronize()
    tails = (
        block.view[offset + (last - first) * PAGE_BYTES : offset + plan.size_bytes]
        for (plan, offset), (first, last) in zip(plans, ranges, strict=True)
    )
    return [(one + (checksum(tail) if tail.nbytes else 0)) & MASK for one, tail in zip(found, tails, strict=True)]
