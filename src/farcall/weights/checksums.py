"""The checksum of a storage: quick enough to be taken at every push.

The sum of the 64-bit words of each page, each sum times an odd number of its own, all modulo 2**64. It finds what goes
wrong with weights: flipped bits, pages of another version, bytes that never came. It is no protection against somebody
who means harm.
"""

from __future__ import annotations

import torch

__all__ = ["checksum"]

_PAGE_WORDS = 512
# Below torch's limit for work on several threads: those would have to be woken, on cores that have other work.
_PIECE_WORDS = 16 * 1024
_WORD_BYTES = 8
_MASK = (1 << 64) - 1


def checksum(view: memoryview) -> int:
    """The checksum of ``view``, of bytes, whose memory must be aligned to words."""
    words = view.nbytes // _WORD_BYTES
    rest = bytes(view[words * _WORD_BYTES :])
    total = int.from_bytes(rest, "little") * 3
    if words:
        memory = torch.frombuffer(view, dtype=torch.int64, count=words)
        pages = words // _PAGE_WORDS
        sums = torch.empty(pages, dtype=torch.int64)
        if pages:
            whole = memory[: pages * _PAGE_WORDS].view(pages, _PAGE_WORDS)
            step = _PIECE_WORDS // _PAGE_WORDS
            for at in range(0, pages, step):
                torch.sum(whole[at : at + step], 1, out=sums[at : at + step])
            total += int((sums * torch.arange(5, 2 * pages + 5, 2)).sum())
        tail = memory[pages * _PAGE_WORDS :]
        total += int((tail * torch.arange(1, 2 * len(tail) + 1, 2)).sum())
    return (total + view.nbytes) & _MASK
