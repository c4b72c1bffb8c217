"""A peer's shared segments on the receiving side: mapped once, read through tickets.

Trusts nothing the peer says: a descriptor must be a sealed memory file of the announced size, a ticket must lie inside
its segment. Views outlive everything here (the map, the link, the peer), because each keeps its mapping alive. For each
view that has ended, this side owes the peer a release; the link takes releases and sends them in batches. A block whose
last use is a message to its owner is handed back with its content (``give_back``). An owed block may instead carry the
next message to its owner (``reuse``): its pages are still in this processor's caches, and neither a release nor a block
of this process is needed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: shared memory is never used, but importing must work
    pass

from farcall.channel.host_memory import Lease, address_of, leased
from farcall.channel.segments import SegmentRefused
from farcall.destructors import destructor

_SEAL_SHRINK = 0x0002

# Only releases of this much memory wake a thread. Smaller ones wait for the next outgoing frame.
_URGENT_BYTES = 8 << 20
# How many of the latest releases `reuse` looks at: about those of one call's arguments.
_MOST_LOOKED_AT = 4


class MappedSegment:
    """A peer's segment, mapped here; ``size`` bytes of it are readable."""

    __slots__ = ("address", "size", "view")

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the file of ``descriptor``, which the caller closes."""
        check_fixed(descriptor, size)
        try:
            # This view, and every view derived from it, keeps the mapping: the death of the last one unmaps it.
            self.view: memoryview = map_file(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SegmentRefused(f"cannot map a segment of {size} bytes: {error}") from error
        self.size: int = size
        self.address: int = address_of(self.view)


def check_fixed(descriptor: int, size: int) -> None:
    """Raise unless ``descriptor`` is a memory file that has, and keeps, ``size`` bytes.

    If the file shrank later, the next access would kill this process with SIGBUS.
    """
    if size <= 0:
        raise SegmentRefused(f"a segment cannot have {size} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        really = os.fstat(descriptor).st_size
    except OSError as error:
        raise SegmentRefused(f"the descriptor offered is not a memory file: {error}") from error
    if not seals & _SEAL_SHRINK or really < size:
        raise SegmentRefused(f"the memory file has {really} bytes (seals {seals}), not a fixed {size}")


@cache
def _mapping_functions() -> tuple[Any, Any]:
    """``mmap``, which keeps the interpreter lock, and ``munmap``, which releases it because it may take long.

    ``mmap`` takes microseconds. A program that has just woken up calls it to map a version: if it released the lock,
    other threads would take it, and the program would wait for them.
    """
    keeping, letting_go = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None)
    keeping.mmap.restype = ctypes.c_void_p
    keeping.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    letting_go.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return keeping.mmap, letting_go.munmap


def map_file(descriptor: int, size: int, *, private: bool = False, writable: bool = True) -> memoryview:
    """Map ``descriptor`` without keeping it. (``mmap.mmap`` keeps a duplicate: one for each peer and segment.)

    The mapping ends with its last view. ``private``: writes stay in this process (copy on write). If the mapping is not
    ``writable``, its view still looks writable, but a write to it kills the process.
    """
    map_memory, unmap_memory = _mapping_functions()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = map_memory(None, size, protection, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, unmap_memory, address, size).atexit = False
    return memoryview(array).cast("B")


class GivenBack:
    """A block that this side is handing back to its owner. Mutable: ``last_use``, set when the last view has died."""

    __slots__ = ("_lease", "_map", "last_use", "offset", "segment_id")

    def __init__(self, owner: SegmentMap, lease: Lease, segment_id: int, offset: int) -> None:
        self._map = owner
        self._lease = lease
        self.segment_id: int = segment_id
        self.offset: int = offset
        self.last_use: bool = False

    def settled(self) -> None:
        """End the attempt after the bytes were copied, because the block had other uses: it is released as usual."""
        if self._map._returning.pop(id(self._lease), None) is None:  # another thread ended the last use during the copy
            self._map.owe(*self._lease.holder)

    def gone(self) -> None:
        """End a successful handover: the message to the peer is sent, or about to be."""
        self._map._returning.pop(id(self._lease), None)


class SegmentMap:
    """A peer's segments as this process sees them, and the releases owed to the peer.

    Mutable, without a lock, because callbacks of garbage collections change it: the segments, the leases, the releases.
    Steps that race are single operations of a dict or a deque, which are atomic.
    """

    def __init__(self, on_release: Callable[[bool], None] | None = None) -> None:
        """``on_release(urgent)`` reports that releases wait to be taken; it obeys the rule for lease callbacks.

        It runs for the first release after each ``take_releases``, and again when much memory is owed.
        """
        self._on_release = on_release
        self._segments: dict[int, MappedSegment] = {}
        self._leases: dict[int, Lease] = {}
        self.in_use: dict[tuple[int, int], Lease] = {}
        """Blocks that could be given back, by segment and offset. If empty, skip ``give_back``: it would find none."""
        self._returning: dict[int, GivenBack] = {}
        self.released: deque[tuple[int, int, int]] = deque()
        """Releases to send: segment, offset, size. The size is 0 if the owner uses the block, too."""
        self.owed_bytes: int = 0
        """The approximate size of these blocks, counted without a lock. The link reads it before each frame."""
        self._announced = False
        self._closed = False

    def attach(self, segment_id: int, descriptor: int, size: int) -> None:
        """Map a segment that the peer offers; closes ``descriptor`` in any case."""
        try:
            if self._closed or segment_id in self._segments:
                raise SegmentRefused(f"segment {segment_id} was offered twice, or too late")
            self._segments[segment_id] = MappedSegment(descriptor, size)
        finally:
            os.close(descriptor)

    def detach(self, segment_id: int) -> None:
        """Forget a segment that the peer retired; the death of its last view unmaps it."""
        self._segments.pop(segment_id, None)

    def view(self, segment_id: int, offset: int, size: int, shared: bool = False) -> memoryview:
        """The bytes that a ticket names. When all use of them has ended, (segment_id, offset) is owed to the peer.

        ``shared``: the owner still uses them, too. So they can only be released, never given back with new content.
        """
        segment = self._segments.get(segment_id)
        if segment is None or offset < 0 or size <= 0 or offset + size > segment.size:
            raise SegmentRefused(f"the peer named {size} bytes at {offset} of segment {segment_id}")
        view, lease = leased(
            segment.view[offset : offset + size], self._on_death, (segment_id, offset, 0 if shared else size)
        )
        self._leases[id(lease)] = lease
        if not shared:
            self.in_use[segment_id, offset] = lease
        return view

    def holds(self, address: int) -> bool:
        """Does this address lie in a segment of the peer?"""
        return self._segment_at(address) is not None

    def _segment_at(self, address: int) -> tuple[int, MappedSegment] | None:
        for segment_id, segment in self._segments.copy().items():
            if 0 <= address - segment.address < segment.size:
                return segment_id, segment
        return None

    def give_back(self, buffers: list[memoryview], index: int) -> GivenBack | None:
        """If ``buffers[index]`` is the last use of a whole block of the peer, give the block up without a release.

        None: it is not such a block. Otherwise ``buffers[index]`` becomes a bare view of the block, and ``last_use`` of
        the result says whether the block is the peer's again. If not, the caller must copy the bytes at once, and then
        call ``settled``.
        """
        buffer = buffers[index]
        size, address = buffer.nbytes, address_of(buffer)
        found = self._segment_at(address)
        if found is None:
            return None
        segment_id, segment = found
        offset = address - segment.address
        lease = self.in_use.get((segment_id, offset))
        if lease is None or lease.holder != (segment_id, offset, size):
            return None
        given = GivenBack(self, lease, segment_id, offset)
        if self._returning.setdefault(id(lease), given) is not given:
            return None  # another message is giving it back; the view in this one keeps the block in use
        del buffer
        # If the block has no other use, this assignment ends the last one, and _on_death runs before the next line.
        buffers[index] = segment.view[offset : offset + size]
        return given

    def reuse(self, size: int) -> tuple[int, int, memoryview] | None:
        """An owed block of the peer with room for ``size`` bytes, as (segment id, offset, view).

        The caller fills it and sends it (then its owner frees it), or owes it again (``owe``).
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
            self._announce(urgent=False)  # a thread that called `take_releases` meanwhile has missed these
        return found

    def take_releases(self) -> list[tuple[int, int]]:
        """All (segment_id, offset) to release, each as often as it was viewed. The caller sends them."""
        # Clear the flag before draining: a thread that appends afterwards announces again, and the loop drains earlier
        # releases. In the other order a release between the two steps would never be announced.
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
        """Forget the segments. Views that still exist stay valid; their end is no longer reported."""
        self._closed = True
        self._on_release = None
        self._segments.clear()
        self._leases.clear()
        self.in_use.clear()
        self._returning.clear()
        self.released.clear()

    @destructor
    def _on_death(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is None:
            return
        segment_id, offset, size = lease.holder
        if self.in_use.get((segment_id, offset)) is lease:
            del self.in_use[segment_id, offset]
        if self._returning:
            given = self._returning.pop(id(lease), None)  # atomic: else `settled`, at this moment, would owe nothing
            if given is not None:
                given.last_use = True
                return
        # `owe`, inlined: every large tensor passes here.
        self.released.append((segment_id, offset, size))
        self.owed_bytes += size
        if not self._announced or self.owed_bytes >= _URGENT_BYTES:
            self._announce(urgent=self.owed_bytes >= _URGENT_BYTES)

    def owe(self, segment_id: int, offset: int, size: int) -> None:
        """Owe the peer the release of a block that this process no longer uses."""
        self.released.append((segment_id, offset, size))
        self.owed_bytes += size
        self._announce(urgent=self.owed_bytes >= _URGENT_BYTES)

    def _announce(self, urgent: bool) -> None:
        hook = self._on_release
        if hook is not None and (urgent or not self._announced):
            try:
                self._announced = True  # before the hook: else `take_releases` in between would be lost
                hook(urgent)
            except BaseException:  # Ctrl-C
                self._announced = False
                raise
