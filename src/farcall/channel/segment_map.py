"""A peer's shared segments on the side that receives: mapped once, looked at through tickets.

Trusts nothing the peer says: a descriptor must be a sealed memory file of the size told, a ticket must lie
inside. Views outlive everything here (the map, the link, the peer), because each keeps the mapping below it.
Every view that ended is owed to the peer as a release, which the link takes and sends in batches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: shared memory is never used, but importing must work
    pass

from farcall.channel.interface import Lease, SegmentRefused, leased

_SEAL_SHRINK = 0x0002

# A release is worth waking somebody for when it gives much back; others can wait for the next frame that
# leaves.
_URGENT_BYTES = 256 * 1024
_URGENT_COUNT = 64


class MappedSegment:
    """A peer's segment, mapped here; ``size`` bytes of it may be looked at."""

    __slots__ = ("size", "view")

    def __init__(self, descriptor: int, size: int) -> None:
        """Map what ``descriptor`` names, which the caller closes."""
        if size <= 0:
            raise SegmentRefused(f"a segment of {size} bytes makes no sense")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            really = os.fstat(descriptor).st_size
        except OSError as error:
            raise SegmentRefused(f"the descriptor offered is not a memory file: {error}") from error
        # Memory that can shrink under us would end this process with SIGBUS at the next touch.
        if not seals & _SEAL_SHRINK or really < size:
            raise SegmentRefused(f"the memory file has {really} bytes (seals {seals}), not a fixed {size}")
        try:
            mapping = mmap.mmap(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SegmentRefused(f"a segment of {size} bytes cannot be mapped: {error}") from error
        self.size = size
        # The view keeps the mapping, and every view of the view does: it is unmapped when the last one dies.
        self.view = memoryview(mapping)


class SegmentMap:
    """A peer's segments as this process sees them, and the releases owed to the peer."""

    def __init__(self, on_release: Callable[[bool], None] | None = None) -> None:
        """``on_release(urgent)`` says that releases wait to be taken; it obeys the rule for lease callbacks.

        It runs for the first release after each ``take_releases``, and again for one that gives back much.
        """
        self._on_release = on_release
        self._segments: dict[int, MappedSegment] = {}
        self._leases: dict[int, Lease] = {}
        self._released: deque[tuple[int, int]] = deque()
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

    def view(self, segment_id: int, offset: int, size: int) -> memoryview:
        """The bytes a ticket names; when all use of them has ended, (segment_id, offset) is owed back."""
        segment = self._segments.get(segment_id)
        if segment is None or offset < 0 or size <= 0 or offset + size > segment.size:
            raise SegmentRefused(f"the peer named {size} bytes at {offset} of segment {segment_id}")
        view, lease = leased(segment.view[offset : offset + size], self._on_death, (segment_id, offset, size))
        self._leases[id(lease)] = lease
        return view

    def take_releases(self) -> list[tuple[int, int]]:
        """All (segment_id, offset) to release, each as often as it was viewed; they are the caller's to
        send."""
        # The flag first: whoever appends after this sees it down and announces; whoever appended before is
        # drained.
        self._announced = False
        released = self._released
        taken = []
        while True:
            try:
                taken.append(released.popleft())
            except IndexError:
                return taken

    @property
    def has_releases(self) -> bool:
        """Whether ``take_releases`` would return some: a cheap look before each frame."""
        return bool(self._released)

    def close(self) -> None:
        """Forget the segments. Views that still exist stay valid; their end is nobody's business any more."""
        self._closed = True
        self._on_release = None
        self._segments.clear()
        self._leases.clear()
        self._released.clear()

    def _on_death(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is None:
            return
        segment_id, offset, size = lease.holder
        self._released.append((segment_id, offset))
        urgent = size >= _URGENT_BYTES or len(self._released) % _URGENT_COUNT == 0
        hook = self._on_release
        if hook is not None and (urgent or not self._announced):
            self._announced = True
            hook(urgent)
