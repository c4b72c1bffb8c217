"""Which bytes of which segment: blocks carved out of pooled segments, freed, and used again.

Owns the segments of this process and what is free in them; who holds a block is the pool's business
(`shared_memory.py`). Not thread-safe: the pool holds its lock.

First touch of a page costs several times the copy into it, so freed blocks are used again last in, first out,
and memory never used before is taken only when nothing freed fits.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from farcall.channel.segment import PAGE_BYTES, Block, Segment

__all__ = ["Arena"]

logger: logging.Logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
# Below this it is dearer to look for warm memory among binned blocks than to touch fresh pages.
_WORTH_JOINING_BYTES = 64 * 1024


class Arena:
    """The segments of one pool."""

    def __init__(self, limit_bytes: int, segment_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._next_id = 1
        # Freed blocks by capacity, the warmest last. They are not joined until somebody needs a larger one.
        self._bins: dict[int, list[tuple[Segment, int]]] = {}
        self._binned_bytes = 0
        self.segments: dict[int, Segment] = {}
        self.retired: list[tuple[int, list[Hashable]]] = []
        """Segments given up since the last look: their peers are still to be told."""
        self.total_bytes: int = 0
        """What all segments have been made for; pages never touched are counted, too."""

    def take(self, size: int, capacity: int) -> Block | None:
        """A block of ``size`` bytes with room for ``capacity``; None when the limit is reached."""
        binned = self._bins.get(capacity)
        if binned:
            segment, offset = binned.pop()
            self._binned_bytes -= capacity
        else:
            found = self._carve(capacity)
            if found is None:
                return None
            segment, offset = found
        block = Block(segment, offset, size, capacity)
        segment.live[offset] = block
        segment.idle_since = None
        return block

    def free(self, block: Block) -> None:
        """Nobody holds the block any more."""
        segment = block.segment
        if segment.live.pop(block.offset, None) is not block:
            return  # freed twice by its owner
        if segment.stranded:
            if not segment.live:
                self.retired.append(self._retire(segment))
            return
        self._bins.setdefault(block.capacity, []).append((segment, block.offset))
        self._binned_bytes += block.capacity

    def strand(self, segment: Segment) -> None:
        """Somebody we have no link to may look at its blocks: hand out nothing more of it."""
        segment.stranded = True
        self._empty_bins_of(segment)

    def take_retired(self) -> list[tuple[int, list[Hashable]]]:
        """Segments given up since the last look, and the peers to tell."""
        retired, self.retired = self.retired, []
        return retired

    def trim(self, now: float, idle_s: float, keep_bytes: int) -> list[tuple[int, list[Hashable]]]:
        """Give back segments unused for ``idle_s``, all but ``keep_bytes``; return (id, peers to tell)."""
        idle = []
        for segment in self.segments.values():
            if segment.live:
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
        """Give everything back. Views that still exist stay valid, and keep their segment."""
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
        """Turn all binned blocks into free ranges; False if there was none."""
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
        """A block at the start of a new segment, as large as usual or as the limit allows."""
        if capacity > self._limit_bytes:
            return None
        if self.total_bytes + capacity > self._limit_bytes:
            # Free segments, each too small, may stand in the way of one that is large enough.
            for segment in list(self.segments.values()):
                if not segment.live:
                    self.retired.append(self._retire(segment))
        size = max(self._segment_bytes, -(-capacity // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
        size = min(size, (self._limit_bytes - self.total_bytes) // PAGE_BYTES * PAGE_BYTES)
        if size < capacity:
            return None
        try:
            segment = Segment(self._next_id, size)
        except OSError as error:
            # What there is stays in use; growing is not tried again, it would fail for every tensor.
            self._limit_bytes = self.total_bytes
            logger.warning("no more shared memory, other large tensors go through the socket: %s", error)
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
