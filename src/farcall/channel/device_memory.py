"""Device memory between processes: lent to peers, and borrowed from peers.

`DevicePool` is memory to send from: pooled segments that peers open once, and blocks in them, lent until released.
`DeviceSegments` is the receiver's view of one peer's pool.

The sender copies a tensor into a block on its current stream, records the block's event, and sends a ticket. The
receiver makes its own stream wait for the event, copies the bytes out, records the same event and releases the block.
The next writer of the block waits for that event. So the receiver gets the values of the moment of sending, whatever
the sender writes later; no host waits, and no device is synchronised.

    a block    by                       becomes
    free       lend                     lent to one peer; the write into it waits for its event
    lent       the peer's release       free
    lent       the copy failed          free
    lent       the peer is gone         resting: its process may still look; free, with a new event, after a while

Small blocks are powers of two, carved from common segments; a large block has a segment of its own. ``limit_bytes``
bounds the sum of all segments; at the limit ``lend`` returns None, and the tensor goes another way. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

from farcall.channel.device_api import DeviceApi, Export
from farcall.errors import SerializationError

SEGMENT_BYTES = 64 << 20
LARGE_BYTES = 8 << 20
"""Blocks above this size have a segment of their own."""
SMALLEST_BYTES = 512
LARGE_STEP_BYTES = 2 << 20
NEAR_FIT = 1.25
"""A large request may take a free block of up to this many times its size."""
REST_S = 30.0
IDLE_S = 30.0


class DeviceTicket(NamedTuple):
    """The place of a tensor's bytes, and the handles that open it: plain values, which can travel."""

    device: int
    """The sender's index of the device."""
    segment_id: int
    offset: int
    size: int
    export: Export
    event_handle: bytes


class PoolStats(NamedTuple):
    """The sizes of a pool, in bytes."""

    total: int
    lent: int
    idle: int


class _Segment:
    __slots__ = ("carved", "device", "exports", "id", "idle_since", "live", "memory", "size")

    def __init__(self, segment_id: int, device: int, memory: torch.Tensor) -> None:
        self.id: int = segment_id
        self.device: int = device
        self.memory: torch.Tensor = memory
        self.size: int = memory.numel()
        self.carved: int = 0
        self.live: int = 0
        self.idle_since: float | None = None
        self.exports: dict[Hashable, Export] = {}


class DeviceBlock:
    """A range of a segment, with the event that orders the copies into it and out of it."""

    __slots__ = ("capacity", "event", "event_handle", "memory", "offset", "segment")

    def __init__(self, segment: _Segment, offset: int, capacity: int, event: Any, event_handle: bytes) -> None:
        self.segment: _Segment = segment
        self.offset: int = offset
        self.capacity: int = capacity
        self.memory: torch.Tensor = segment.memory[offset : offset + capacity]
        self.event: Any = event
        self.event_handle: bytes = event_handle

    @property
    def device(self) -> int:
        return self.segment.device


class DevicePool:
    """The device memory that one node sends from.

    Mutable, under the lock: the segments, and their blocks, each of which is free, lent or resting.
    """

    def __init__(self, api: DeviceApi, limit_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._api = api
        self._limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._free: dict[tuple[int, int], list[DeviceBlock]] = {}  # by device and capacity, the warmest last
        self._lent: dict[Hashable, dict[tuple[int, int], DeviceBlock]] = {}
        self._resting: list[tuple[float, DeviceBlock]] = []
        self._next_id = 1
        self._total_bytes = 0
        self._retired: list[tuple[int, list[Hashable]]] = []

    def lend(self, device: int, source: torch.Tensor, size: int, peer: Hashable) -> DeviceTicket | None:
        """Copy ``source`` (``size`` bytes), on the current stream, into a block that the peer holds until its release.

        None: the limit is reached, or the device has no memory left.
        """
        capacity = _capacity(size)
        with self._lock:
            block = self._take_free(device, capacity) or self._carve(device, capacity)
            if block is None:
                return None
            segment = block.segment
            segment.live += 1
            segment.idle_since = None
            self._lent.setdefault(peer, {})[segment.id, block.offset] = block
        try:
            self._api.fill(block.event, block.memory, source, size)
            with self._lock:
                export = segment.exports.get(peer)
                if export is None:
                    export = segment.exports[peer] = self._api.export(segment.memory)
        except BaseException:
            self.release([(segment.id, block.offset)], peer)
            raise
        return DeviceTicket(device, segment.id, block.offset, size, export, block.event_handle)

    def release(self, released: Iterable[tuple[int, int]], peer: Hashable) -> int:
        """Take back the blocks at these (segment, offset) from the peer; return how many of them it did not hold."""
        wrong = 0
        with self._lock:
            lent = self._lent.get(peer, {})
            for key in released:
                block = lent.pop(key, None)
                if block is None:
                    wrong += 1
                else:
                    self._put_back(block)
        return wrong

    def release_all(self, peer: Hashable, now: float) -> None:
        """Take back all blocks of a peer that is gone. They rest for a while, since its process may still read them."""
        with self._lock:
            self._resting.extend((now + REST_S, block) for block in self._lent.pop(peer, {}).values())
            for segment in self._segments.values():
                segment.exports.pop(peer, None)

    def trim(self, now: float) -> list[tuple[int, list[Hashable]]]:
        """Give up segments that were idle for ``IDLE_S``; return them, with the peers that have opened them."""
        with self._lock:
            rested = [block for end, block in self._resting if end <= now]
            if rested:
                self._resting = [entry for entry in self._resting if entry[0] > now]
            for block in rested:
                # A dead process may have recorded the old event behind work that will never be done.
                block.event, block.event_handle = self._api.make_event(block.device)
                self._put_back(block)
            for segment in list(self._segments.values()):
                if segment.live:
                    continue
                if segment.idle_since is None:
                    segment.idle_since = now
                elif now - segment.idle_since >= IDLE_S:
                    self._retire(segment)
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> None:
        """Give up all memory."""
        with self._lock:
            self._segments.clear()
            self._free.clear()
            self._lent.clear()
            self._resting.clear()
            self._total_bytes = 0

    def stats(self) -> PoolStats:
        """The present sizes of the pool."""
        with self._lock:
            lent = sum(block.capacity for blocks in self._lent.values() for block in blocks.values())
            idle = sum(capacity * len(blocks) for (_, capacity), blocks in self._free.items())
            return PoolStats(self._total_bytes, lent, idle)

    # ------------------------------------------------------------------ with the lock held

    def _take_free(self, device: int, capacity: int) -> DeviceBlock | None:
        blocks = self._free.get((device, capacity))
        if blocks:
            return blocks.pop()
        if capacity <= LARGE_BYTES:
            return None
        fitting = [
            known
            for (known_device, known), blocks in self._free.items()
            if blocks and known_device == device and capacity <= known <= capacity * NEAR_FIT
        ]
        return self._free[device, min(fitting)].pop() if fitting else None

    def _carve(self, device: int, capacity: int) -> DeviceBlock | None:
        segment = None
        if capacity <= LARGE_BYTES:
            for known in self._segments.values():
                if known.device == device and known.carved + capacity <= known.size and known.size != known.carved:
                    segment = known
                    break
        if segment is None:
            segment = self._grow(device, capacity if capacity > LARGE_BYTES else self._segment_bytes)
            if segment is None:
                return None
        event, handle = self._api.make_event(device)
        block = DeviceBlock(segment, segment.carved, capacity, event, handle)
        segment.carved += capacity
        return block

    def _grow(self, device: int, size: int) -> _Segment | None:
        if self._total_bytes + size > self._limit_bytes:
            for segment in list(self._segments.values()):
                if not segment.live:
                    self._retire(segment)
        if self._total_bytes + size > self._limit_bytes:
            return None
        memory = self._api.allocate(device, size)
        if memory is None:
            return None
        segment = self._segments[self._next_id] = _Segment(self._next_id, device, memory)
        self._next_id += 1
        self._total_bytes += size
        return segment

    def _retire(self, segment: _Segment) -> None:
        for blocks in self._free.values():
            blocks[:] = [block for block in blocks if block.segment is not segment]
        del self._segments[segment.id]
        self._total_bytes -= segment.size
        self._retired.append((segment.id, list(segment.exports)))

    def _put_back(self, block: DeviceBlock) -> None:
        block.segment.live -= 1
        if block.segment.id in self._segments:
            self._free.setdefault((block.device, block.capacity), []).append(block)


def _capacity(size: int) -> int:
    if size > LARGE_BYTES:
        return -(-size // LARGE_STEP_BYTES) * LARGE_STEP_BYTES
    return max(SMALLEST_BYTES, 1 << (size - 1).bit_length() if size else 1)


class DeviceSegments:
    """The segments of one peer, opened here.

    A caller copies bytes out (`copy_out`), or uses them in place (`opened`); in that case no stream of this process may
    still use the block when it is released. Segments and events are opened when a ticket first names them, and stay
    open until the peer retires the segment or is gone. ``devices`` maps the peer's device indices to this process's, as
    found when the peer probed this channel.

    Mutable, under the lock: the opened segments, and the opened events by (segment, offset).
    """

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._memory: dict[int, torch.Tensor] = {}
        self._events: dict[tuple[int, int], tuple[bytes, Any]] = {}
        self.devices: dict[int, int] = {}

    def check(self, ticket: DeviceTicket) -> None:
        """Raise ``SerializationError`` unless the bytes of a ticket lie in their segment."""
        self._open(ticket, self.devices[ticket.device])

    def copy_out(self, ticket: DeviceTicket, copy: torch.Tensor) -> None:
        """Copy the bytes of a ticket into ``copy``, which has their size. Afterwards the block may be released."""
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        self._api.copy_out(event, memory, ticket.offset, ticket.size, copy)

    def opened(self, ticket: DeviceTicket) -> torch.Tensor:
        """The whole segment of a ticket. Work put onto the current stream from now on finds the ticket's bytes in it.

        The segment stays open as long as the result lives, even after the peer is gone.
        """
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        self._api.wait(event, device)
        return memory

    def retire(self, segment_id: int) -> None:
        """Close a segment that the peer gave up."""
        with self._lock:
            self._memory.pop(segment_id, None)
            for key in [key for key in self._events if key[0] == segment_id]:
                del self._events[key]

    def close(self) -> None:
        """Close all segments and events."""
        with self._lock:
            self._memory.clear()
            self._events.clear()

    def _open(self, ticket: DeviceTicket, device: int) -> tuple[torch.Tensor, Any]:
        key = ticket.segment_id, ticket.offset
        with self._lock:
            memory = self._memory.get(ticket.segment_id)
            if memory is None:
                memory = self._memory[ticket.segment_id] = self._api.open(ticket.export, device)
            if ticket.offset < 0 or ticket.offset + ticket.size > memory.numel():
                raise SerializationError("a peer lent memory that its segment does not have")
            handle, event = self._events.get(key, (b"", None))
            if handle != ticket.event_handle:
                event = self._api.open_event(ticket.event_handle, device)
                self._events[key] = (ticket.event_handle, event)
            return memory, event
