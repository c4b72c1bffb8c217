"""Device memory by way of the host, through pinned buffers, for where processes cannot open each other's.

What fits one chunk goes through one pinned buffer; more goes in chunks through two of them, so that the device fills
one while the host empties the other. On its way to the host a tensor is waited for, by the host: this is the way that
always works. What is small has buffers that are kept, and is quicker so than shared. (Pinning costs 0.5 s for each GiB,
so no buffer grows with a tensor; torch keeps pinned memory for later use.)
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from farcall.channel.copying import copy_bytes
from farcall.channel.interface import ALIGNMENT_BYTES
from farcall.serialize.spans import copy_of, memory_of

__all__ = ["to_device", "to_host"]

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 64 * 1024
HALF_RING_BYTES = 1 << 20
COMPANY_BYTES = 32 * 1024
WORTH_BYTES = 1024
"""What is smaller is not made longer: somebody may keep many of them."""

_C: Any = torch._C


class _Ring:
    """Pinned memory for small uploads, used round and round: torch's allocator costs more than a small copy.

    Not pageable memory: where devices can read that, the driver may do so after its owner has let go of it. Before a
    half of it is used again, whatever was copied from it is waited for, which is done long since.
    """

    def __init__(self) -> None:
        self._pinned = torch.empty(2 * HALF_RING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._memory = _bytes_of(self._pinned)
        self._half = 0
        self._offset = 0  # of what is free in it
        self._used: set[tuple[int, int, int]] = set()  # the streams that copy from this half
        self._events: list[list[torch.cuda.Event]] = [[], []]  # of each half: it is done with

    def upload(self, source: memoryview, size: int, target: torch.device) -> torch.Tensor:
        """``size`` bytes, of which ``source`` are the first, on ``target``."""
        if self._offset + size > HALF_RING_BYTES:
            self._turn()
        begin = self._half * HALF_RING_BYTES + self._offset
        end = begin + size
        self._offset += size + -size % ALIGNMENT_BYTES
        copy_bytes(self._memory[begin:end], source)
        self._used.add(_C._cuda_getCurrentStream(target.index))
        return self._pinned[begin:end].to(target, non_blocking=True)

    def _turn(self) -> None:
        """Go on in the other half."""
        streams = [
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
            for stream, device, kind in self._used
        ]
        self._events[self._half] = [stream.record_event() for stream in streams]
        self._used.clear()
        self._half = 1 - self._half
        self._offset = 0
        for event in self._events[self._half]:
            event.synchronize()


class _Kept(threading.local):
    """The small pinned buffers of each thread."""

    pinned: torch.Tensor | None = None
    ring: _Ring | None = None


_kept = _Kept()


def to_host(source: torch.Tensor) -> memoryview:
    """The elements of ``source`` (any strides) as bytes on the host, row by row."""
    size = source.numel() * source.element_size()
    if size <= SMALL_BYTES:
        return memoryview(_small_to_host(source, size))
    if size <= CHUNK_BYTES:
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        torch.cuda.current_stream(source.device).synchronize()
        return _bytes_of(pinned)
    flat = source.contiguous().view(-1).view(torch.uint8)
    result = torch.empty(size, dtype=torch.uint8)
    target = _bytes_of(result)
    stream = torch.cuda.current_stream(source.device)
    chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    before: tuple[int, int, torch.Tensor, torch.cuda.Event] | None = None
    for number, start in enumerate(range(0, size, CHUNK_BYTES)):
        length = min(CHUNK_BYTES, size - start)
        chunk = chunks[number % 2][:length]
        chunk.copy_(flat[start : start + length], non_blocking=True)
        event = stream.record_event()
        if before is not None:
            _empty(before, target)
        before = start, length, chunk, event
    assert before is not None
    _empty(before, target)
    return target


def _small_to_host(source: torch.Tensor, size: int) -> bytearray:
    kept = _kept.pinned
    if kept is None:
        kept = _kept.pinned = torch.empty(SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
    pinned = kept[:size]
    if source.dtype is not torch.uint8:
        pinned = pinned.view(source.dtype)
    if source.dim() != 1:
        pinned = pinned.view(source.shape)
    pinned.copy_(source, non_blocking=True)
    torch.cuda.current_stream(source.device).synchronize()
    return copy_of(kept.data_ptr(), size)


def _empty(filled: tuple[int, int, torch.Tensor, torch.cuda.Event], target: memoryview) -> None:
    start, length, chunk, event = filled
    event.synchronize()
    copy_bytes(target[start : start + length], _bytes_of(chunk))


def to_device(source: memoryview, target: torch.device, has_company: bool = False) -> torch.Tensor:
    """The bytes of ``source`` on ``target``, there for whatever is put onto the current stream next.

    ``has_company``: another process has work on that device. Then the result may be longer: processes that share a
    device take turns on it, and uploads of ``COMPANY_BYTES`` and more seem not to wait for one. (On an H200 a bare
    echo of 4 KiB took 0.47 to 0.55 ms, with 32 KiB up 0.18 to 0.25 ms.)
    """
    size = source.nbytes
    if size <= SMALL_BYTES:
        if _kept.ring is None:
            _kept.ring = _Ring()
        if has_company and WORTH_BYTES <= size < COMPANY_BYTES:
            size = COMPANY_BYTES
        return _kept.ring.upload(source, size, target)
    result = torch.empty(size, dtype=torch.uint8, device=target)
    count = 2 if size > CHUNK_BYTES else 1
    chunks = [torch.empty(min(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    stream = torch.cuda.current_stream(target)
    events: list[torch.cuda.Event] = []
    for number, start in enumerate(range(0, size, CHUNK_BYTES)):
        length = min(CHUNK_BYTES, size - start)
        chunk = chunks[number % 2][:length]
        if number >= 2:
            events[number - 2].synchronize()
        copy_bytes(_bytes_of(chunk), source[start : start + length])
        result[start : start + length].copy_(chunk, non_blocking=True)
        if size > CHUNK_BYTES:
            events.append(stream.record_event())
    return result


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    low = int(tensor.storage_offset()) * tensor.element_size()
    return memory_of(tensor.untyped_storage(), low, low + tensor.numel() * tensor.element_size())
