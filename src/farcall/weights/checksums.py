"""The checksum of a storage: quick enough to compute at every push, while the bytes are copied.

It adds up, modulo 2**64: the size; for each page the sum of its 64-bit words times an odd factor (5, 7, 9 ...); behind
the last whole page each word times an odd factor (1, 3, 5 ...), and the bytes behind the last word times 3. It detects
the faults that befall weights: flipped bits, pages of another version, missing bytes. It does not protect against an
attacker. ``serialize/_speedups.c``, where it was built, computes the same sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from farcall.channel.host_memory import address_of
from farcall.serialize.flat import copy_and_sum

_PAGE_WORDS = 512
# Below torch's threshold for several threads: waking them takes time, and their cores may have other work.
_PIECE_WORDS = 16 * 1024
WORD_BYTES = 8
PAGE_BYTES = _PAGE_WORDS * WORD_BYTES
MASK = (1 << 64) - 1


def checksum(view: memoryview) -> int:
    """The checksum of ``view``, a view of bytes."""
    return copy_with_checksum(0, address_of(view), view.nbytes)


def page_sums(memory: torch.Tensor) -> torch.Tensor:
    """The sum of each whole page of ``memory``: bytes in one dimension, aligned to words, summed on their own device.

    On a GPU the sum runs on the current stream, and reads twice as fast as a copy does.
    """
    pages = memory.numel() // PAGE_BYTES
    return torch.sum(memory[: pages * PAGE_BYTES].view(torch.int64).view(pages, _PAGE_WORDS), 1)


def checksums_of_pages(sums: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The checksum of each range of whole pages (from, to), computed from the sums of all pages.

    One computation on the device of the sums serves all ranges: a page's factor in its range is its factor among all
    pages minus twice the start of the range.
    """
    factors = torch.arange(5, 2 * len(sums) + 5, 2, device=sums.device)
    both = torch.nn.functional.pad(torch.cumsum(torch.stack([sums, sums * factors]), 1), (1, 0))
    bounds = torch.tensor(ranges, device=sums.device).view(-1)
    plain, weighted = both[:, bounds].view(2, -1, 2).diff(dim=2).view(2, -1).tolist()
    return [
        ((end - start) * PAGE_BYTES + weighted[at] - 2 * start * plain[at]) & MASK
        for at, (start, end) in enumerate(ranges)
    ]


def _in_python(target: int, source: int, size: int) -> int:
    if target:
        ctypes.memmove(target, source, size)
    words, rest = divmod(size, WORD_BYTES)
    total = size + 3 * int.from_bytes(ctypes.string_at(source + size - rest, rest), "little")
    if words:
        memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(source), dtype=torch.int64, count=words)
        pages = words // _PAGE_WORDS
        sums = torch.empty(pages, dtype=torch.int64)
        whole = memory[: pages * _PAGE_WORDS].view(pages, _PAGE_WORDS)
        step = _PIECE_WORDS // _PAGE_WORDS
        for at in range(0, pages, step):
            torch.sum(whole[at : at + step], 1, out=sums[at : at + step])
        tail = memory[pages * _PAGE_WORDS :]
        total += int((sums * torch.arange(5, 2 * pages + 5, 2)).sum())
        total += int((tail * torch.arange(1, 2 * len(tail) + 1, 2)).sum())
    return total & MASK


copy_with_checksum: Callable[[int, int, int], int] = copy_and_sum or _in_python
"""``copy_with_checksum(target, source, size)``: copy bytes from one address to another, unless ``target`` is 0; return
their checksum. It releases the interpreter lock."""
