"""Tensor memory between processes of one host: the sender copies once, the receiver reads the same pages.

``SegmentPool`` belongs to the sender: blocks in pooled segments, lent to peers. ``SegmentMap`` belongs to the receiver:
one per link, with the peer's segments, each mapped once. A descriptor travels once per segment and peer (``offer``);
afterwards only tickets travel. When a receiver's view dies, it becomes a release, which the link sends back in batches.

The pool knows the holders of each block: the peers that it is lent to, and the user, through tensors made in a segment.
`segments.py` chooses the segment and the range of each block.

Both are thread-safe. A peer's mistakes (a release of a block that it does not hold, memory out of bounds) are refused
and corrupt nothing. After a fork the child's pool hands out nothing; tensors over shared memory stay readable in the
child, but are shared with the parent, not copied on write.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from farcall.channel.host_memory import Lease, leased, rounded_size
from farcall.channel.segments import Arena, Block, SegmentRefused
from farcall.transport.descriptors import close_in_children

logger: logging.Logger = logging.getLogger("farcall")

SEGMENT_BYTES = 64 << 20


class Offer(NamedTuple):
    """The data that a peer needs to map a segment. The pool still owns the descriptor."""

    segment_id: int
    descriptor: int
    size: int


class SegmentPool:
    """Blocks of shared memory of this process, lent to peers (any hashable value may name a peer).

    Mutable, under the lock: the segments, the lent blocks, and the blocks under tensors. Without it: ``_orphans``.
    """

    def __init__(self, limit_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._lock = threading.Lock()
        self._arena = Arena(limit_bytes, segment_bytes)
        self._segments = self._arena.segments
        self.retired: Sequence[object] = self._arena.retired
        """The segments for ``take_retired``, to test for emptiness without the lock."""
        # The blocks that each peer holds, by the (segment id, offset) of the ticket, with the number of loans.
        self._lent: dict[Hashable, dict[tuple[int, int], tuple[Block, int]]] = {}
        self.addresses: list[int] = []
        """The sorted addresses of tensors that the user made in a segment. If empty, ``find`` finds nothing."""
        # Their blocks, and the lease on each.
        self._tensor_blocks: dict[int, Block] = {}
        self._tensor_leases: dict[int, Lease] = {}
        # Blocks that a peer gave back with a message in them, until the tensor over them dies.
        self._taken_back: dict[int, tuple[Block, Lease]] = {}
        # The leases of dead tensors. Garbage collections append here, since they must not take the lock.
        self._orphans: deque[Lease] = deque()
        self._usable = True
        self._complained = False
        close_in_children(self)

    # -- blocks

    def allocate(self, size: int, peer: Hashable = None) -> Block | None:
        """A block held by this process, or lent to ``peer``, whose release frees it.

        None at the limit: then send the bytes inline.
        """
        if not self._usable or size <= 0:
            return None
        capacity = rounded_size(size)
        with self._lock:
            if self._orphans:
                self._drop_orphans()
            block = self._arena.take(size, capacity)
            if block is not None and peer is not None:
                try:
                    lent = self._lent[peer]
                except KeyError:
                    lent = self._lent[peer] = {}
                lent[block.segment_id, block.offset] = (block, 1)
            return block

    def lend(self, segment_id: int, offset: int, peer: Hashable) -> bool:
        """Lend the memory of a tensor that ``find`` recognised, and that stays in use here; False if it is gone."""
        with self._lock:
            segment = self._segments.get(segment_id)
            block = None if segment is None else self._tensor_block(segment.address + offset)
            if block is None:
                return False
            lent = self._lent.setdefault(peer, {})
            _, count = lent.get((segment_id, offset), (block, 0))
            lent[segment_id, offset] = (block, count + 1)
            block.holders += 1
            return True

    def release(self, segment_id: int, offset: int, peer: Hashable) -> None:
        """End a loan: the peer no longer uses the memory at ``offset``."""
        self.release_batch(((segment_id, offset),), peer)

    def release_batch(self, released: Iterable[tuple[int, int]], peer: Hashable) -> None:
        """End many loans of one peer. Releases of memory that it does not hold are ignored, and logged once."""
        wrong = None
        with self._lock:
            lent = self._lent.get(peer, {})
            for segment_id, offset in released:
                ticket = segment_id, offset
                block, count = lent.pop(ticket, (None, 0))
                if block is None:
                    wrong = ticket
                    continue
                if count > 1:
                    lent[ticket] = (block, count - 1)
                block.holders -= 1
                if block.holders <= 0:
                    self._arena.free(block)
        if wrong is not None and not self._complained:
            self._complained = True
            logger.warning("peer %r released shared memory it does not hold: segment %d, offset %d", peer, *wrong)

    def release_all(self, peer: Hashable) -> None:
        """Forget a peer whose link is gone: the blocks it held, and the segments it was offered.

        Its process may live on, with tensors over these blocks. So they are never reused: their segments get no new
        blocks, and are given up when the last other block in them is free.
        """
        with self._lock:
            held = list(self._lent.pop(peer, {}).values())
            for block, _ in held:
                self._arena.strand(block.segment)
            for block, count in held:
                for _ in range(count):
                    self._drop(block)
            for segment in self._segments.values():
                segment.offered_to.discard(peer)

    def take_back(self, segment_id: int, offset: int, size: int, peer: Hashable) -> memoryview:
        """Take back a block that ``peer`` held, with the peer's message in it; it is freed when all use ends."""
        with self._lock:
            lent = self._lent.get(peer, {})
            block, count = lent.get((segment_id, offset), (None, 0))
            if block is None or not 0 < size <= block.size or count != 1 or block.holders != 1:
                raise SegmentRefused(
                    f"the peer returned {size} bytes at {offset} of segment {segment_id}, which it does not hold"
                )
            del lent[segment_id, offset]
        view, lease = leased(block.view[:size], self._orphans.append, block)
        block.view = memoryview(b"")
        address = block.segment.address + block.offset
        with self._lock:
            self._taken_back[address] = (block, lease)
        return view

    # -- segments

    def offer(self, segment_id: int, peer: Hashable, keep: bool = False) -> Offer | None:
        """The offer that ``peer`` must get before its first ticket of a segment; None if it has got that.

        None as well if ``peer`` was lost a moment ago, and the segment with it. ``keep``: the offer is sent later, so
        the segment is not given up, nor its descriptor closed, before `let_go`.
        """
        with self._lock:
            segment = self._segments.get(segment_id)
            if segment is None or peer in segment.offered_to:
                return None
            segment.offered_to.add(peer)
            segment.kept += keep
            return Offer(segment_id, segment.descriptor, segment.size)

    def let_go(self, segment_id: int) -> None:
        """An offer that was made with ``keep`` has been sent, or will not be."""
        with self._lock:
            segment = self._segments.get(segment_id)
            if segment is not None:  # else the pool was closed meanwhile
                segment.kept -= 1
                self._arena.retire_if_stranded(segment)

    def withdraw_offer(self, segment_id: int, peer: Hashable) -> None:
        """Take back an offer that was not sent after all."""
        with self._lock:
            segment = self._segments.get(segment_id)
            if segment is not None:
                segment.offered_to.discard(peer)

    def take_retired(self) -> list[tuple[int, list[Hashable]]]:
        """The segments given up since the last call, with the peers to notify."""
        with self._lock:
            return self._arena.take_retired()

    def trim(
        self, now: float, idle_s: float = 10.0, keep_bytes: int = SEGMENT_BYTES
    ) -> list[tuple[int, list[Hashable]]]:
        """Give up segments that were idle for ``idle_s``, all but ``keep_bytes``; return (id, peers to notify)."""
        with self._lock:
            self._drop_orphans()
            return self._arena.trim(now, idle_s, keep_bytes)

    def close(self) -> None:
        """Give up all segments. Views and tensors that still exist stay valid, and keep their segment mapped."""
        self._usable = False
        with self._lock:
            self._tensor_leases.clear()
            self._taken_back.clear()
            self.addresses.clear()
            self._tensor_blocks.clear()
            self._orphans.clear()
            self._lent.clear()
            self._arena.close()

    @property
    def total_bytes(self) -> int:
        """The size of all segments, untouched pages included."""
        return self._arena.total_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes in use, here or by peers."""
        with self._lock:
            self._drop_orphans()
            return sum(block.capacity for segment in self._segments.values() for block in segment.live.values())

    # -- tensors of the user

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor that travels without a copy; at the limit, a tensor in private memory.

        Its memory is free again when the tensor has died here and at every peer.
        """
        count = 1
        for extent in shape:
            count *= extent
        block = self.allocate(count * dtype.itemsize)
        if block is None:
            return torch.empty(tuple(shape), dtype=dtype)
        # Drop the block's own view: only the tensor's view may keep the memory in use.
        view, lease = leased(block.view, self._orphans.append, block)
        block.view = memoryview(b"")
        address = block.segment.address + block.offset
        with self._lock:
            insort(self.addresses, address)
            self._tensor_blocks[address] = block
            self._tensor_leases[address] = lease
        return torch.frombuffer(view, dtype=dtype).view(tuple(shape))

    def find(self, data_ptr: int, nbytes: int) -> tuple[int, int] | None:
        """The (segment id, offset) of bytes in a tensor made by ``empty``, else None; cheap if there are no tensors."""
        if not self.addresses:
            return None
        with self._lock:
            block = self._tensor_block(data_ptr)
            if block is None:
                return None
            offset = data_ptr - block.segment.address
            if nbytes <= 0 or offset + nbytes > block.offset + block.size:
                return None
            return block.segment.id, offset

    # -- inside, with the lock held

    def _tensor_block(self, address: int) -> Block | None:
        """The block of the user's tensor that contains ``address``."""
        index = bisect_right(self.addresses, address) - 1
        if index < 0:
            return None
        block = self._tensor_blocks[self.addresses[index]]
        return block if address < block.segment.address + block.offset + block.size else None

    def _drop(self, block: Block) -> None:
        block.holders -= 1
        if block.holders <= 0:
            self._arena.free(block)

    def _drop_orphans(self) -> None:
        while self._orphans:
            block: Block = self._orphans.popleft().holder
            address = block.segment.address + block.offset
            if self._taken_back.pop(address, None) is not None:
                self._drop(block)
            elif self._tensor_blocks.pop(address, None) is not None:
                self.addresses.remove(address)
                del self._tensor_leases[address]
                self._drop(block)

    def close_after_fork(self) -> None:
        """In a forked child: hand out nothing (the memory is the parent's), and replace the lock.

        Its holder may be a thread that the child does not have.
        """
        self._usable = False
        self._lock = threading.Lock()
