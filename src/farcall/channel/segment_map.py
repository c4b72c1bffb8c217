"""A peer's shared segments on the side that receives: mapped once, looked at through tickets.

Trusts nothing the peer says: a descriptor must be a sealed memory file of the size told, a ticket must lie
inside. Views outlive everything here (the map, the link, the peer), because each keeps the mapping below it.
Every view that ended is owed to the peer as a release, which the link takes and sends in batches. A block whose
last use is that it is sent back to its owner is handed back as it is, content and all (``give_back``). One that is owed
may instead carry the next message to its owner (``reuse``): its pages are in this processor's caches still, and neither
a release nor a block of our own is needed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: shared memory is never used, but importing must work
    pass

from farcall.channel.host_memory import Lease, address_of, leased
from farcall.channel.segments import SegmentRefused

_SEAL_SHRINK = 0x0002

# A thread is woken only for releases that give much back. Others wait for the next frame that leaves.
_URGENT_BYTES = 8 << 20
# So many of the latest releases are looked at for a block to use again: those of one call's arguments.
_MOST_LOOKED_AT = 4


class MappedSegment:
    """A peer's segment, mapped here; ``size`` bytes of it may be looked at."""

    __slots__ = ("address", "size", "view")

    def __init__(self, descriptor: int, size: int) -> None:
        """Map what ``descriptor`` names, which the caller closes."""
        if size <= 0:
            raise SegmentRefused(f"a segment cannot have {size} bytes")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            really = os.fstat(descriptor).st_size
        except OSError as error:
            raise SegmentRefused(f"the descriptor offered is not a memory file: {error}") from error
        # Memory that can shrink under us would end this process with SIGBUS at the next touch.
        if not seals & _SEAL_SHRINK or really < size:
            raise SegmentRefused(f"the memory file has {really} bytes (seals {seals}), not a fixed {size}")
        try:
            mapping = map_file(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SegmentRefused(f"cannot map a segment of {size} bytes: {error}") from error
        self.size: int = size
        # The view keeps the mapping, and every view of the view does: it is unmapped when the last one dies.
        self.view: memoryview = mapping
        self.address: int = address_of(self.view)


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def map_file(descriptor: int, size: int, *, private: bool = False, writable: bool = True) -> memoryview:
    """Map ``descriptor`` without keeping it: ``mmap.mmap`` holds a copy, that is one per peer and segment.

    The mapping ends with its last view. ``private``: writes stay in this process (copy on write). The view of a mapping
    that is not ``writable`` looks as if it were, but a write to it ends the process.
    """
    library = _c_library()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = library.mmap(None, size, protection, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, library.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


class GivenBack:
    """A block that is being handed back to its owner."""

    __slots__ = ("_lease", "_map", "last_use", "offset", "segment_id")

    def __init__(self, owner: SegmentMap, lease: Lease, segment_id: int, offset: int) -> None:
        self._map = owner
        self._lease = lease
        self.segment_id: int = segment_id
        self.offset: int = offset
        self.last_use: bool = False

    def settled(self) -> None:
        """It was not the last use, and the bytes are copied: what ends from now on is released as usual."""
        self._map._returning.pop(id(self._lease), None)
        if self.last_use:  # ended by another thread during the copy
            self._map.owe(*self._lease.holder)

    def gone(self) -> None:
        """The peer is told, or about to be, that it has the block again."""
        self._map._returning.pop(id(self._lease), None)


class SegmentMap:
    """A peer's segments as this process sees them, and the releases owed to the peer."""

    def __init__(self, on_release: Callable[[bool], None] | None = None) -> None:
        """``on_release(urgent)`` says that releases wait to be taken; it obeys the rule for lease callbacks.

        It runs for the first release after each ``take_releases``, and again for one that gives back much.
        """
        self._on_release = on_release
        self._segments: dict[int, MappedSegment] = {}
        self._leases: dict[int, Lease] = {}
        self._by_start: dict[tuple[int, int], Lease] = {}
        self._returning: dict[int, GivenBack] = {}
        self.released: deque[tuple[int, int, int]] = deque()
        """Blocks that nobody here uses any more, to be told: segment, offset, size; 0 where its owner uses it, too."""
        self.owed_bytes: int = 0
        """What these hold, about: it is counted without a lock. Looked at before each frame."""
        self._announced = False
        self._closed = False

    def attach(self, segment_id: int, descriptor: int, size: int) -> None:
        """Map a segment the peer offers; closes ``descriptor`` in any case."""
        try:
            if self._closed or segment_id in self._segments:
                raise SegmentRefused(f"segment {segment_id} was offered twice, or too late")
            self._segments[segment_id] = MappedSegment(descriptor, size)
        finally:
            os.close(descriptor)

    def detach(self, segment_id: int) -> None:
        """The peer retired a segment; it is unmapped when the last view of it dies."""
        self._segments.pop(segment_id, None)

    def view(self, segment_id: int, offset: int, size: int, shared: bool = False) -> memoryview:
        """The bytes a ticket names; when all use of them has ended, (segment_id, offset) is owed back.

        ``shared``: the owner goes on using them, so they can only be released, never be given back with new content.
        """
        segment = self._segments.get(segment_id)
        if segment is None or offset < 0 or size <= 0 or offset + size > segment.size:
            raise SegmentRefused(f"the peer named {size} bytes at {offset} of segment {segment_id}")
        view, lease = leased(
            segment.view[offset : offset + size], self._on_death, (segment_id, offset, 0 if shared else size)
        )
        self._leases[id(lease)] = lease
        if not shared:
            self._by_start[segment_id, offset] = lease
        return view

    def holds(self, address: int) -> bool:
        """Is this an address in memory of the peer's?"""
        return self._segment_at(address) is not None

    def _segment_at(self, address: int) -> tuple[int, MappedSegment] | None:
        for segment_id, segment in list(self._segments.items()):
            if 0 <= address - segment.address < segment.size:
                return segment_id, segment
        return None

    def give_back(self, buffers: list[memoryview], index: int) -> GivenBack | None:
        """If ``buffers[index]`` is the last use of a whole block of the peer's, let go of it without a release.

        None: it is no such block. Else the result says in ``last_use`` whether the block is the peer's again, and
        ``buffers[index]`` is a bare view of it; unless that was the last use, it must be copied at once and then
        ``settled``.
        """
        buffer = buffers[index]
        size, address = buffer.nbytes, address_of(buffer)
        found = self._segment_at(address)
        if found is None:
            return None
        segment_id, segment = found
        offset = address - segment.address
        lease = self._by_start.get((segment_id, offset))
        if lease is None or lease.holder != (segment_id, offset, size):
            return None
        given = GivenBack(self, lease, segment_id, offset)
        if self._returning.setdefault(id(lease), given) is not given:
            return None  # another answer is about to send it back: this one's own view keeps the block alive
        del buffer
        # If nobody else uses the block, this assignment ends its last use: _on_death runs before the next line.
        buffers[index] = segment.view[offset : offset + size]
        return given

    def reuse(self, size: int) -> tuple[int, int, memoryview] | None:
        """A block of the peer's with room for ``size`` bytes that was owed to it, as (segment id, offset, view).

        It is the caller's to fill and to send (its owner frees it), or to owe again (``owe``).
        """
        found = None
        others = []
        for _ in range(_MOST_LOOKED_AT):
            try:
                block = self.released.pop()
            except IndexError:
                break
            segment = self._segments.get(block[0])
            if segment is not None and size <= block[2] <= 2 * size:
                segment_id, offset, room = block
                self.owed_bytes = max(0, self.owed_bytes - room)
                found = segment_id, offset, segment.view[offset : offset + size]
                break
            others.append(block)
        if others:
            self.released.extend(reversed(others))
            self._announce(urgent=False)  # a thread that took the releases meanwhile has not seen these
        return found

    def take_releases(self) -> list[tuple[int, int]]:
        """All (segment_id, offset) to release, each as often as it was viewed. The caller sends them."""
        # The flag first: a thread that appends after this sees it down and announces; earlier releases are drained.
        self._announced = False
        self.owed_bytes = 0
        released = self.released
        taken: list[tuple[int, int]] = []
        while True:
            try:
                segment_id, offset, _ = released.popleft()
            except IndexError:
                return taken
            taken.append((segment_id, offset))

    def close(self) -> None:
        """Forget the segments. Views that still exist stay valid; their end is not told any more."""
        self._closed = True
        self._on_release = None
        self._segments.clear()
        self._leases.clear()
        self._by_start.clear()
        self._returning.clear()
        self.released.clear()

    def _on_death(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is None:
            return
        segment_id, offset, size = lease.holder
        if self._by_start.get((segment_id, offset)) is lease:
            del self._by_start[segment_id, offset]
        given = self._returning.get(id(lease))
        if given is not None:
            given.last_use = True
            return
        self.owe(segment_id, offset, size)

    def owe(self, segment_id: int, offset: int, size: int) -> None:
        """Nobody here uses the block any more."""
        self.released.append((segment_id, offset, size))
        self.owed_bytes += size
        self._announce(urgent=self.owed_bytes >= _URGENT_BYTES)

    def _announce(self, urgent: bool) -> None:
        hook = self._on_release
        if hook is not None and (urgent or not self._announced):
            self._announced = True
            hook(urgent)
