"""Shared segments on the owner's side: memory files, their mappings, and their free ranges.

`Segment` is one memory file, `Arena` all segments of a pool: it carves blocks out of them, frees and reuses them. The
pool (`shared_memory.py`) knows the holders of each block. Not thread-safe: the pool holds its lock. Invariant: live
blocks, binned blocks, free ranges and the untouched tail do not overlap and cover the segment.

Segments are anonymous files (``memfd``): they leave nothing in /dev/shm, and vanish with the last descriptor and
mapping. They are sealed against shrinking, because a peer that truncated one would kill every process that touches it.
The first touch of a page costs several times the copy into it. So freed blocks are reused last in, first out, and
untouched memory is used only when no freed memory fits.

**Whether two processes may share memory.** Each node announces its host token, a unix address and a TCP address. The
dialler tries the unix address if both tokens are equal and not empty. It takes TCP if they differ or on ANY failure of
the unix way, and logs the reason once. The token is only a hint (processes with equal tokens may still not reach each
other); the dial is the proof, and the descriptor passed over it grants the memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Hashable
from functools import cache
from typing import Any

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: shared memory is never used, but importing must work
    pass

import msgspec
import torch

from farcall.channel.host_memory import copy_bytes
from farcall.transport.unix import unix_sockets_work

logger: logging.Logger = logging.getLogger("farcall")

PAGE_BYTES = 4096
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_READ = 22
# Below this size, searching binned blocks for warm memory costs more than touching fresh pages.
_WORTH_JOINING_BYTES = 64 * 1024
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK_NAMESPACE = "/proc/self/ns/net"


class SegmentRefused(ValueError):
    """A peer offered an invalid segment, or named memory outside of one; the message says which."""


class Block(msgspec.Struct, eq=False):
    """A range of a segment. ``view`` is ``size`` bytes long; the allocator reserved ``capacity`` bytes.

    A struct, because compiled code makes it, and every large tensor that travels needs one.
    """

    segment: Segment
    segment_id: int
    offset: int
    size: int
    capacity: int
    view: memoryview
    holders: int = 1
    """How often it is held: by this process (at most once), and by each peer as often as it was lent."""

    def fill(self, source: memoryview) -> None:
        """Copy ``source``, which is as long, into it. Raises OSError if there is no memory for fresh pages."""
        if self.offset + self.size > self.segment.filled_bytes:
            self.segment.fill_fresh(self.offset, source)
        else:
            copy_bytes(self.view, source)


class Segment:
    """A memory file of this process, mapped, with a free list.

    Mutable: the live blocks, the free ranges, the untouched tail, and the peers that were offered it.
    """

    __slots__ = (
        "_ranges",
        "_untouched",
        "address",
        "descriptor",
        "filled_bytes",
        "id",
        "idle_since",
        "kept",
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
        #: Up to here its pages were filled once. A hint, kept without a lock: where it is wrong, filling takes longer.
        self.filled_bytes: int = 0
        #: The peers that have its descriptor.
        self.offered_to: set[object] = set()
        self.idle_since: float | None = None
        #: How many of its offers are still to be sent, each with its descriptor.
        self.kept: int = 0
        #: A process without a link to this one may still read its blocks: hand out no more of them.
        self.stranded: bool = False
        # Freed ranges, by offset: their pages exist. Pages beyond _untouched were never used.
        self._ranges: list[tuple[int, int]] = []
        self._untouched = 0

    @property
    def is_idle(self) -> bool:
        """Does nobody need it now, so that it may be given up?"""
        return not self.live and not self.kept

    def carve_warm(self, capacity: int) -> int | None:
        """The offset of ``capacity`` bytes in the smallest freed range that has room for them."""
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
        """The offset of ``capacity`` bytes that reach into the untouched tail."""
        offset = self._untouched
        borrowed = bool(self._ranges) and sum(self._ranges[-1]) == offset
        if borrowed:  # the last free range adjoins the tail: begin in it, where the pages exist
            offset = self._ranges[-1][0]
        if offset + capacity > self.size:
            return None
        if borrowed:
            self._ranges.pop()
        self._untouched = offset + capacity
        return offset

    def give_back(self, freed: list[tuple[int, int]]) -> None:
        """Free (offset, capacity) ranges, and join them with their free neighbours."""
        joined: list[tuple[int, int]] = []
        for offset, size in sorted(self._ranges + freed):
            if joined and joined[-1][0] + joined[-1][1] == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self._ranges = joined

    def fill_fresh(self, offset: int, source: memoryview) -> None:
        """Copy ``source`` to ``offset``, where pages may be missing, and map them all at once.

        A write to the file makes pages without clearing them first; a copy through the mapping would fault at each.
        """
        rest = source.cast("B") if source.ndim != 1 or source.format != "B" else source
        end = offset + len(rest)
        while rest:
            rest = rest[os.pwrite(self.descriptor, rest, end - len(rest)) :]
        start = self.address + offset & -PAGE_BYTES
        # To be read: the kernel maps neighbours along, in half the time, and a page of a shared file can be written to
        # all the same. A kernel before 5.14 does not know this, and maps each page at its next use.
        _advise()(start, self.address + end - start, _MADV_POPULATE_READ)
        self.filled_bytes = max(self.filled_bytes, end)

    def close(self) -> None:
        """Give up descriptor and mapping. The file stays mapped until its last view dies."""
        os.close(self.descriptor)
        self.descriptor = -1
        self.live.clear()
        self.view = memoryview(b"")
        del self.mapping


class Arena:
    """The segments of one pool. Mutable, under the pool's lock: the segments, and the bins of freed blocks."""

    def __init__(self, limit_bytes: int, segment_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._next_id = 1
        # Freed blocks by capacity, the warmest last. They are joined only when a larger block is needed.
        self._bins: dict[int, list[tuple[Segment, int]]] = {}
        self._binned_bytes = 0
        self.segments: dict[int, Segment] = {}
        self.retired: list[tuple[int, list[Hashable]]] = []
        """Segments given up since the last `take_retired`, with the peers to notify. The list object never changes."""
        self.total_bytes: int = 0
        """The size of all segments, untouched pages included."""

    def take(self, size: int, capacity: int) -> Block | None:
        """A block of ``size`` bytes with room for ``capacity``; None at the limit."""
        binned = self._bins.get(capacity)
        if binned:
            segment, offset = binned.pop()
            self._binned_bytes -= capacity
        else:
            found = self._carve(capacity)
            if found is None:
                return None
            segment, offset = found
        view = segment.view[offset : offset + size]
        block = segment.live[offset] = Block(segment, segment.id, offset, size, capacity, view)
        segment.idle_since = None
        return block

    def free(self, block: Block) -> None:
        """Free a block without holders."""
        segment = block.segment
        if segment.live.pop(block.offset, None) is not block:
            return  # its owner freed it twice
        if segment.stranded:
            self.retire_if_stranded(segment)
            return
        self._bins.setdefault(block.capacity, []).append((segment, block.offset))
        self._binned_bytes += block.capacity

    def strand(self, segment: Segment) -> None:
        """Hand out no more blocks of ``segment``: a process without a link to this one may still read them."""
        segment.stranded = True
        self._empty_bins_of(segment)

    def retire_if_stranded(self, segment: Segment) -> None:
        """Give ``segment`` up if its last block is free, and no other will be handed out."""
        if segment.stranded and segment.is_idle:
            self.retired.append(self._retire(segment))

    def take_retired(self) -> list[tuple[int, list[Hashable]]]:
        """The segments given up since the last call, with the peers to notify."""
        retired = self.retired[:]
        self.retired.clear()
        return retired

    def trim(self, now: float, idle_s: float, keep_bytes: int) -> list[tuple[int, list[Hashable]]]:
        """Give up segments that were idle for ``idle_s``, all but ``keep_bytes``; return (id, peers to notify)."""
        idle = []
        for segment in self.segments.values():
            if not segment.is_idle:
                continue
            if segment.idle_since is None:
                segment.idle_since = now
            elif now - segment.idle_since >= idle_s:
                idle.append(segment)
        retired = self.take_retired()
        for segment in sorted(idle, key=lambda segment: -segment.size):
            if self.total_bytes - segment.size >= keep_bytes:
                retired.append(self._retire(segment))
        return retired

    def close(self) -> None:
        """Give up all segments. Views that still exist stay valid, and keep their segment mapped."""
        self._bins.clear()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self.total_bytes = self._binned_bytes = 0

    def _carve(self, capacity: int) -> tuple[Segment, int] | None:
        found = self._carve_warm(capacity)
        if found is None and capacity >= _WORTH_JOINING_BYTES:
            found = (self._join_bins() and self._carve_warm(capacity)) or None
        if found is None:
            found = self._carve_cold(capacity) or self._grow(capacity)
        if found is None and self._join_bins():
            found = self._carve_warm(capacity) or self._carve_cold(capacity)
        return found

    def _carve_warm(self, capacity: int) -> tuple[Segment, int] | None:
        for segment in self.segments.values():
            offset = None if segment.stranded else segment.carve_warm(capacity)
            if offset is not None:
                return segment, offset
        return None

    def _carve_cold(self, capacity: int) -> tuple[Segment, int] | None:
        for segment in self.segments.values():
            offset = None if segment.stranded else segment.carve_cold(capacity)
            if offset is not None:
                return segment, offset
        return None

    def _join_bins(self) -> bool:
        """Turn all binned blocks into free ranges; False if there were none."""
        if not self._binned_bytes:
            return False
        freed: dict[Segment, list[tuple[int, int]]] = {}
        for capacity, blocks in self._bins.items():
            for segment, offset in blocks:
                freed.setdefault(segment, []).append((offset, capacity))
        self._bins.clear()
        self._binned_bytes = 0
        for segment, ranges in freed.items():
            segment.give_back(ranges)
        return True

    def _grow(self, capacity: int) -> tuple[Segment, int] | None:
        """A block at the start of a new segment, which has the usual size, or as much as the limit allows."""
        if capacity > self._limit_bytes:
            return None
        if self.total_bytes + capacity > self._limit_bytes:
            # Free segments that are too small count towards the limit: give them up for one that is large enough.
            for segment in list(self.segments.values()):
                if segment.is_idle:
                    self.retired.append(self._retire(segment))
        size = max(self._segment_bytes, -(-capacity // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        size = min(size, (self._limit_bytes - self.total_bytes) // PAGE_BYTES * PAGE_BYTES)
        if size < capacity:
            return None
        try:
            segment = Segment(self._next_id, size)
        except OSError as error:
            # Existing segments stay in use. Never try to grow again: it would fail for every tensor.
            self._limit_bytes = self.total_bytes
            logger.warning("shared memory is used up; further large tensors go over the socket: %s", error)
            return None
        self._next_id += 1
        self.segments[segment.id] = segment
        self.total_bytes += size
        offset = segment.carve_cold(capacity)
        assert offset is not None
        return segment, offset

    def _empty_bins_of(self, segment: Segment) -> None:
        for capacity, blocks in self._bins.items():
            kept = [entry for entry in blocks if entry[0] is not segment]
            self._binned_bytes -= capacity * (len(blocks) - len(kept))
            blocks[:] = kept

    def _retire(self, segment: Segment) -> tuple[int, list[Hashable]]:
        self._empty_bins_of(segment)
        del self.segments[segment.id]
        self.total_bytes -= segment.size
        peers: list[Hashable] = list(segment.offered_to)
        segment.close()
        return segment.id, peers


@cache
def _advise() -> Any:
    """``madvise``, without the interpreter lock, which ``mmap.madvise`` holds: large memory takes long."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def segments_work() -> bool:
    """Can this system make shared segments at all?"""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def host_token() -> str:
    """A token that is equal on nodes with the same kernel and network namespace; "": never share memory.

    The boot id identifies the kernel. Containers with a network namespace of their own count as other hosts. The
    process namespace does not matter: descriptors are passed, never looked up by process id.
    """
    if why_not_shared():
        return ""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat(_NETWORK_NAMESPACE)
    except OSError:
        return ""
    return f"{boot}/{namespace.st_dev}:{namespace.st_ino}" if boot else ""


def why_not_shared() -> str:
    """Why this process cannot use shared memory at all, for the log; "" if it can. Makes a segment to find out."""
    if not unix_sockets_work():
        return "no unix sockets that carry descriptors"
    if not segments_work():
        return "no sealed memory files (memfd) on this system"
    try:
        Segment(0, PAGE_BYTES).close()
    except OSError as error:
        return f"cannot make a memory file: {error}"
    return ""
