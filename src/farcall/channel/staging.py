"""Device tensors by way of pinned host memory, for processes that cannot open each other's device memory.

A tensor of up to one chunk goes through one pinned buffer. A larger one goes in chunks through two, so that the device
fills one while the host empties the other. On the way to the host, the host waits for the tensor: this way always
works. (Pinning costs 0.5 s per GiB, so no buffer grows with a tensor; torch keeps pinned memory for later use.)

**Small tensors** go through pinned memory that each thread keeps. On one H200 a copy of 4 KiB takes 16 us to the host
and 18 us back, submission and wait included. A second process on the device changes nothing, unless both need its
processors. Kernels need them, and so do uploads under 32 KiB; if both processes have such work, each turn costs
0.16 ms. (Events do not: 5 us.) Hence ``COMPANY_BYTES``.

Pageable memory is no alternative: where devices can read it, the driver may do so after its owner has freed it. Torch's
allocator of pinned memory costs more than a small copy, so the memory here is allocated once and reused. And since that
allocator does not know of these copies, memory that a copy may still read is never returned to it, but left to the next
thread.
"""

from __future__ import annotations

import threading

import torch

from farcall.channel.device_api import StreamId, current_stream, current_stream_id
from farcall.channel.device_runtime import runtime_for
from farcall.channel.host_memory import copy_bytes
from farcall.destructors import destructor
from farcall.serialize.spans import copy_of, memory_of

CHUNK_BYTES = 16 << 20
LANDING_BYTES = 64 * 1024
"""Larger tensors are not downloaded this way."""
SLOT_BYTES = 64 * 1024
"""Larger tensors are not uploaded this way."""
HALF_RING_SLOTS = 16
COMPANY_BYTES = 32 * 1024
WORTH_BYTES = 1024
"""Smaller tensors are not padded to `COMPANY_BYTES`: a program may keep many of them, and the padding with each."""
LOOKS = 20
"""How often a thread polls a download before it blocks: some 20 us; the download takes 10. A thread that blocks
releases the interpreter lock, and with two busy threads gets it back late."""


class _Landing:
    """A pinned buffer of one thread, in which downloads arrive."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # tensors made in that mode cannot be written outside of it
            self._pinned = torch.empty(LANDING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._address = self._pinned.data_ptr()

    def download(self, source: torch.Tensor, size: int) -> bytearray:
        stream = current_stream(source.get_device())
        own = runtime_for(stream) if source.is_contiguous() else None
        try:
            if own is None:
                self._view(source, size).copy_(source, non_blocking=True)
                stream.synchronize()
            else:
                handle = stream.cuda_stream
                own.copy(self._address, source.data_ptr(), size, handle)
                for _ in range(LOOKS):
                    if own.is_done(handle):
                        break
                else:
                    stream.synchronize()
        except BaseException:
            stream.synchronize()  # after Ctrl-C, say: a late copy would overwrite the next download
            raise
        return copy_of(self._address, size)

    def _view(self, source: torch.Tensor, size: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._pinned[:size].view(source.dtype).view(source.shape)


class _Ring:
    """A ring of pinned slots for uploads, in two halves.

    Before a half is reused, the thread waits for all copies from it; by then they are long done.
    Mutable: the next slot, the streams that copy from the present half, and the events that end each half.
    """

    def __init__(self) -> None:
        pinned = torch.empty(2 * HALF_RING_SLOTS * SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        memory = memory_of(pinned.untyped_storage(), 0, pinned.numel())
        starts = range(0, pinned.numel(), SLOT_BYTES)
        self._slots = [(pinned[start : start + SLOT_BYTES], memory[start : start + SLOT_BYTES]) for start in starts]
        self._addresses = [slot.data_ptr() for slot, _ in self._slots]
        self._next = 0
        self._used: set[StreamId] = set()  # the streams that copy from this half
        self._events: list[list[torch.cuda.Event]] = [[], []]  # for each half, the events behind its last copies

    def upload(self, source: memoryview, size: int, target: torch.device) -> torch.Tensor:
        """``size`` bytes on ``target``, which begin with those of ``source``."""
        number = self._next
        if number % HALF_RING_SLOTS == 0:
            self._turn(number // HALF_RING_SLOTS)
        self._next = (number + 1) % (2 * HALF_RING_SLOTS)
        pinned, memory = self._slots[number]
        copy_bytes(memory, source)
        self._used.add(current_stream_id(target.index))
        stream = current_stream(target.index)
        own = runtime_for(stream)
        if own is None:
            return pinned[:size].to(target, non_blocking=True)
        result = torch.empty(size, dtype=torch.uint8, device=target)
        own.copy(result.data_ptr(), self._addresses[number], size, stream.cuda_stream)
        return result

    def _turn(self, half: int) -> None:
        """Begin to use this half: the other one is full, or the ring is new."""
        streams = [
            torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
            for stream, device, kind in self._used
        ]
        self._events[1 - half] = [stream.record_event() for stream in streams]
        for event in self._events[half]:
            event.synchronize()
        self._used.clear()  # last: if a step above raises, the next upload repeats all of them


_idle_rings: list[_Ring] = []


class _Loan:
    """A thread's loan of a ring. When the thread ends, another thread may take the ring."""

    def __init__(self) -> None:
        try:
            self.ring = _idle_rings.pop()
        except IndexError:
            self.ring = _Ring()

    @destructor
    def __del__(self) -> None:
        # When the interpreter ends, it may destroy the list before this object.
        if hasattr(self, "ring") and isinstance(_idle_rings, list):
            _idle_rings.append(self.ring)


class _Kept(threading.local):
    landing: _Landing | None = None
    loan: _Loan | None = None


_kept = _Kept()


def download(source: torch.Tensor, size: int) -> bytearray:
    """The elements of ``source`` (any strides, no gradient, ``size`` bytes), row by row; waits for its stream."""
    landing = _kept.landing
    if landing is None:
        landing = _kept.landing = _Landing()
    return landing.download(source, size)


def upload(source: memoryview, target: torch.device, has_company: bool) -> torch.Tensor:
    """The bytes of ``source`` on ``target``, ready for work that is put onto the current stream next.

    ``has_company``: another process has work on that device. Then the result may be longer (`COMPANY_BYTES`).
    """
    loan = _kept.loan
    if loan is None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        loan = _kept.loan = _Loan()
    size = source.nbytes
    if has_company and WORTH_BYTES <= size < COMPANY_BYTES:
        size = COMPANY_BYTES
    return loan.ring.upload(source, size, target)


def to_host(source: torch.Tensor, size: int) -> bytearray | memoryview:
    """The elements of ``source`` (any strides, no gradient, ``size`` bytes) on the host, row by row."""
    if size <= LANDING_BYTES:
        return download(source, size)
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
    """The bytes of ``source`` on ``target``, ready for work that is put onto the current stream next.

    ``has_company``: another process has work on that device. Then the result may be longer (`COMPANY_BYTES`).
    """
    size = source.nbytes
    if size <= SLOT_BYTES:
        return upload(source, target, has_company)
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
    """The memory of a contiguous tensor on the host, as bytes."""
    low = int(tensor.storage_offset()) * tensor.element_size()
    return memory_of(tensor.untyped_storage(), low, low + tensor.numel() * tensor.element_size())
