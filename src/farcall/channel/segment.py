"""One shared segment on the side that owns it: a memory file, its mapping, and which parts of it are free.

``Segment`` hands out and takes back ranges of bytes; who may use them is the pool's business. Not
thread-safe: the pool holds its lock. Invariant: live blocks, binned blocks, free ranges and the untouched
tail do not overlap and cover the segment.

Segments are anonymous files (``memfd``): nothing in /dev/shm, gone with the last descriptor and mapping. They
are sealed against shrinking, because a peer that cut one short would kill everyone who touches it.
"""

from __future__ import annotations

import os
import sys

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: shared memory is never used, but importing must work
    pass

import torch

PAGE_BYTES = 4096
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


def segments_work() -> bool:
    """Whether this system can make shared segments at all."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Block:
    """A range of a segment. ``view`` is ``size`` bytes long; ``capacity`` is what the allocator reserved."""

    __slots__ = ("capacity", "holders", "offset", "segment", "size", "view")

    def __init__(self, segment: Segment, offset: int, size: int, capacity: int) -> None:
        self.segment: Segment = segment
        self.offset: int = offset
        self.size: int = size
        self.capacity: int = capacity
        self.view: memoryview = segment.view[offset : offset + size]
        #: How many hold it: this process (at most once) and each peer, as often as it was lent.
        self.holders: int = 1

    @property
    def segment_id(self) -> int:
        return self.segment.id


class Segment:
    """A memory file of this process, mapped, with a free list."""

    __slots__ = (
        "_ranges",
        "_untouched",
        "address",
        "descriptor",
        "id",
        "idle_since",
        "live",
        "mapping",
        "offered_to",
        "size",
        "stranded",
        "view",
    )

    def __init__(self, segment_id: int, size: int) -> None:
        self.id: int = segment_id
        self.size: int = size
        self.descriptor: int = os.memfd_create(f"farcall-{segment_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.mapping: mmap.mmap = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.view: memoryview = memoryview(self.mapping)
        self.address: int = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
        self.live: dict[int, Block] = {}
        #: Which peers have its descriptor.
        self.offered_to: set[object] = set()
        self.idle_since: float | None = None
        #: Somebody we have no link to may still look at blocks of it: hand out nothing more.
        self.stranded: bool = False
        # Freed ranges, by offset: their pages exist. Beyond _untouched no page was ever used.
        self._ranges: list[tuple[int, int]] = []
        self._untouched = 0

    def carve_warm(self, capacity: int) -> int | None:
        """The offset of ``capacity`` bytes out of the smallest freed range that has them."""
        best = -1
        best_size = sys.maxsize
        for index, (_, size) in enumerate(self._ranges):
            if capacity <= size < best_size:
                best, best_size = index, size
        if best < 0:
            return None
        offset, size = self._ranges[best]
        if size == capacity:
            del self._ranges[best]
        else:
            self._ranges[best] = (offset + capacity, size - capacity)
        return offset

    def carve_cold(self, capacity: int) -> int | None:
        """The offset of ``capacity`` bytes that reach into the part nobody has used yet."""
        offset = self._untouched
        borrowed = bool(self._ranges) and sum(self._ranges[-1]) == offset
        if borrowed:  # the last free range touches the tail: begin there, where the pages exist
            offset = self._ranges[-1][0]
        if offset + capacity > self.size:
            return None
        if borrowed:
            self._ranges.pop()
        self._untouched = offset + capacity
        return offset

    def give_back(self, freed: list[tuple[int, int]]) -> None:
        """Make (offset, capacity) ranges free, joined with their free neighbours."""
        joined: list[tuple[int, int]] = []
        for offset, size in sorted(self._ranges + freed):
            if joined and joined[-1][0] + joined[-1][1] == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self._ranges = joined

    def close(self) -> None:
        """Give up descriptor and mapping; the mapping goes when the last view of it does."""
        os.close(self.descriptor)
        self.descriptor = -1
        self.live.clear()
        self.view = memoryview(b"")
        del self.mapping
