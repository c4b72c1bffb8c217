"""Device memory that goes from process to process: lent to peers, and lent by peers and opened.

`DevicePool` is memory to send from: pooled segments that peers open once, and blocks in them, lent until released.
`DeviceSegments` is the receiver's side of one peer's.

A tensor is copied into a block on the sender's current stream, the block's event is recorded, and a ticket travels. The
receiver has its own stream wait for the event, copies the bytes out, records the same event and releases the
block; the next writer of the block waits for that event. So values stay values, whatever the sender writes later,
nothing waits on a host, and no device is synchronised.

    a block    by                       becomes
    free       lend                     lent to one peer; the write into it waits for its event
    lent       the peer's release       free
    lent       the copy failed          free
    lent       the peer is gone         resting: its process may still look; free, with a new event, after a while

Small blocks are powers of two carved from common segments; a large one has a segment of its own. ``limit_bytes`` bounds
all segments; where it is reached ``lend`` says None, and the tensor goes another way. Thread-safe.
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
"""A large request may take an idle block up to so many times its size."""
REST_S = 30.0
IDLE_S = 30.0


class DeviceTicket(NamedTuple):
    """Where the bytes of a tensor are, and what opens them; plain values, so that it can travel."""

    device: int
    """As the sender numbers its devices."""
    segment_id: int
    offset: int
    size: int
    export: Export
    event_handle: bytes


class PoolStats(NamedTuple):
    """What a pool holds, in bytes."""

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
    """A range of a segment, with its event."""

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
    """The device memory that one node sends from."""

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
        """A copy of ``source`` (``size`` bytes), made on the current stream: it is the peer's until it releases it.

        None: the limit is reached, or the device's memory.
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
        """The peer no longer needs these (segment, offset); how many of them it did not hold."""
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
        """The peer is gone: the blocks it held rest for a while."""
        with self._lock:
            self._resting.extend((now + REST_S, block) for block in self._lent.pop(peer, {}).values())
            for segment in self._segments.values():
                segment.exports.pop(peer, None)

    def trim(self, now: float) -> list[tuple[int, list[Hashable]]]:
        """Give back segments that were idle for long, and return them, with the peers that have opened them."""
        with self._lock:
            rested = [block for end, block in self._resting if end <= now]
            if rested:
                self._resting = [entry for entry in self._resting if entry[0] > now]
            for block in rested:
                # The old event may stand for work of a dead process, which will never be done.
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
        """Let go of all memory."""
        with self._lock:
            self._segments.clear()
            self._free.clear()
            self._lent.clear()
            self._resting.clear()
            self._total_bytes = 0

    def stats(self) -> PoolStats:
        """The bytes that are held now."""
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

    Bytes are copied out (`copy_out`), or used where they are (`opened`); then it is the business of whoever gives the
    block back that no stream of ours uses it any more. Segments and events are opened when a ticket first names them
    and kept until the peer retires the segment or is gone. ``devices`` says which of our devices is which of the
    peer's, as found out when it asked whether this way works.
    """

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._memory: dict[int, torch.Tensor] = {}
        self._events: dict[tuple[int, int], tuple[bytes, Any]] = {}
        self.devices: dict[int, int] = {}

    def copy_out(self, ticket: DeviceTicket, copy: torch.Tensor) -> None:
        """Copy the bytes of a ticket into ``copy``, which has their size; then the block may be released."""
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        self._api.copy_out(event, memory, ticket.offset, ticket.size, copy)

    def opened(self, ticket: DeviceTicket) -> torch.Tensor:
        """The whole segment of a ticket, whose bytes are there for what is put onto the current stream from now on.

        It stays open as long as the result lives, also when the peer is gone.
        """
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        self._api.wait(event, device)
        return memory

    def retire(self, segment_id: int) -> None:
        """The peer gave that segment up."""
        with self._lock:
            self._memory.pop(segment_id, None)
            for key in [key for key in self._events if key[0] == segment_id]:
                del self._events[key]

    def close(self) -> None:
        """Let go of all."""
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
