"""The checksum of a storage: quick enough to be taken at every push, while the bytes are copied.

The sum of the 64-bit words of each page, each sum times an odd number of its own (5, 7, 9 ...); behind the last whole
page, each word times one (1, 3, 5 ...), and the last bytes times 3; and the size: all modulo 2**64. It finds what goes
wrong with weights: flipped bits, pages of another version, bytes that never came. It is no protection against somebody
who means harm. ``serialize/_speedups.c`` does the same, where it was built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from farcall.channel.host_memory import address_of
from farcall.serialize.flat import copy_and_sum

_PAGE_WORDS = 512
# Below torch's limit for work on several threads: those would have to be woken, on cores that have other work.
_PIECE_WORDS = 16 * 1024
_WORD_BYTES = 8
_MASK = (1 << 64) - 1


def checksum(view: memoryview) -> int:
    """The checksum of ``view``, which is of bytes."""
    return copy_with_checksum(0, address_of(view), view.nbytes)


def _in_python(target: int, source: int, size: int) -> int:
    if target:
        ctypes.memmove(target, source, size)
    words, rest = divmod(size, _WORD_BYTES)
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
    return total & _MASK


copy_with_checksum: Callable[[int, int, int], int] = copy_and_sum or _in_python
"""``copy_with_checksum(target, source, size)``: copy bytes from one address to another, unless ``target`` is 0; return
their checksum. Other threads run meanwhile."""
