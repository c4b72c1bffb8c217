"""Device memory by way of the host, through pinned buffers, for where processes cannot open each other's.

What fits one chunk goes through one pinned buffer; more goes in chunks through two of them, so that the device fills
one while the host empties the other. On its way to the host a tensor is waited for, by the host: this is the way that
always works. (Pinning costs 0.5 s for each GiB, so no buffer grows with a tensor; torch keeps pinned memory for later
use.) What is small has buffers of its own (`pinned.py`).
"""

from __future__ import annotations

import torch

from farcall.channel import pinned
from farcall.channel.copying import copy_bytes
from farcall.serialize.spans import memory_of

__all__ = ["to_device", "to_host"]

CHUNK_BYTES = 16 << 20


def to_host(source: torch.Tensor, size: int) -> bytearray | memoryview:
    """The elements of ``source`` (any strides, no gradient, ``size`` bytes) on the host, row by row."""
    if size <= pinned.LANDING_BYTES:
        return pinned.download(source, size)
    if size <= CHUNK_BYTES:
        whole = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        whole.copy_(source, non_blocking=True)
        torch.cuda.current_stream(source.device).synchronize()
        return _bytes_of(whole)
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


def _empty(filled: tuple[int, int, torch.Tensor, torch.cuda.Event], target: memoryview) -> None:
    start, length, chunk, event = filled
    event.synchronize()
    copy_bytes(target[start : start + length], _bytes_of(chunk))


def to_device(source: memoryview, target: torch.device, has_company: bool = False) -> torch.Tensor:
    """The bytes of ``source`` on ``target``, there for whatever is put onto the current stream next.

    ``has_company``: another process has work on that device. Then the result may be longer (`pinned.py`).
    """
    size = source.nbytes
    if size <= pinned.SLOT_BYTES:
        return pinned.upload(source, target, has_company)
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
