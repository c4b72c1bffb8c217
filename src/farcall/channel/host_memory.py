"""Host memory under tensors: leases on it, copies into it, and a pool that recycles it.

A channel moves the bytes of large buffers beside a transport, which carries only a ticket for them. The receiver gets a
``memoryview``; tensors and arrays are built over it without a copy. When the last of them dies, the memory can be used
again: ``leased`` makes such a view, with a callback for that moment.

Invariant: the callback runs after every object that can reach the bytes is gone, tensors, arrays, slices and casts of
the view included. It may run on any thread, even in a garbage collection that interrupted the holder of any lock. So it
must not take a lock: append to a deque, or set a flag.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from farcall.destructors import destructor

#: Blocks start at multiples of this: a cache line, and more than any dtype needs.
ALIGNMENT_BYTES = 64
#: Smaller buffers come from the ordinary heap, which recycles them well itself.
SMALLEST_RECYCLED_BYTES = 64 * 1024
# The holder of a pool's lock needs microseconds. A destructor that interrupts it on its own thread would wait for ever.
_PATIENCE_S = 0.05
# A request may take idle memory up to this many size classes above its own, each up to an eighth larger.
_NEAR_FITS = 4

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE_BYTES = 2 << 20

# Up to here a slice assignment keeps the interpreter lock for some ten microseconds at most.
_LARGE_BYTES = 256 * 1024
_WORTH_MANY_CORES_BYTES = 8 << 20
_CORES_TO_SPARE = 8
# ctypes takes no read-only memory. Copy that in pieces, so that other threads may run in between.
_PIECE_BYTES = 4 << 20

_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Lease(weakref.ref[memoryview]):
    """A watch over one view; ``holder`` is the data that its owner needs when the view has died."""

    __slots__ = ("holder",)

    holder: Any


def leased(memory: memoryview, on_death: Callable[[Any], None], holder: Any) -> tuple[memoryview, Lease]:
    """A view of ``memory`` to give away, and the lease on it; ``on_death(lease)`` runs when all use has ended.

    The caller must keep the lease, or the callback never runs, and must drop ``memory``.

    A slice, a cast or a numpy array of a memoryview does not keep that memoryview alive, only the buffer below it. The
    detour through a pickle buffer adds a buffer on top, whose owner is ``memory`` itself. So every object derived from
    the result keeps ``memory`` alive, and the lease watches ``memory``.
    """
    lease = Lease(memory, on_death)
    lease.holder = holder
    return memoryview(pickle.PickleBuffer(memory)), lease


def address_of(view: memoryview) -> int:
    """The address of ``view``; 0 if it is read-only or empty."""
    if view.readonly or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@lru_cache(1024)
def rounded_size(size: int) -> int:
    """``size`` rounded up to its size class, so that freed memory fits later requests; wastes at most an eighth."""
    if size <= 8 * ALIGNMENT_BYTES:
        return max(1, -(-size // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    step = min(1 << ((size - 1).bit_length() - 4), 2 << 20)
    return -(-size // step) * step


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` (contiguous, any format) into the beginning of ``target`` (bytes, at least as long).

    The size selects the quickest way. Small: a slice assignment, which starts fastest. Large: the C library's copy,
    during which other Python threads run. Very large, on a machine with cores to spare: torch's copy, which uses
    several: 16 MiB take 0.4 ms on sixteen cores, and 1.6 on one. (Not for smaller copies: all of torch's worker threads
    must be scheduled, and on a busy machine one may wait a whole time slice. Measured: 1 MiB took 8 ms, not 25 us.)
    """
    size = source.nbytes
    if size > len(target):
        raise ValueError(f"{size} bytes do not fit into {len(target)}")
    if source.format != "B" or source.ndim != 1:
        source = source.cast("B")
    if size <= _LARGE_BYTES:
        target[:size] = source
    elif source.readonly:
        for start in range(0, size, _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            target[start : start + len(piece)] = piece
    elif size >= _WORTH_MANY_CORES_BYTES and _cores >= _CORES_TO_SPARE:
        torch.frombuffer(target, dtype=torch.uint8, count=size).copy_(torch.frombuffer(source, dtype=torch.uint8))
    else:
        # The two ctypes objects also keep the memory alive while the copy runs without the interpreter lock.
        to, origin = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
        ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), size)


class _Idle(NamedTuple):
    memory: memoryview
    since: float


class ReceivePool:
    """Memory to receive large buffers into, recycled when the tensors over it have died.

    Over TCP a tensor's bytes go straight from the socket into memory that becomes the tensor's storage. Fresh memory is
    several times slower to fill than memory whose pages exist. So the pool keeps returned memory for a while, last in,
    first out, up to ``limit_bytes``. The limit does not count tensors in use: those are the user's memory.

    Thread-safe. Returning memory takes no lock. Private pages: after a fork the child has its own copy.
    Mutable, under the lock: the idle memory. Without it: the leases and the returned memory, which callbacks change.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Idle memory by size, the warmest last. "since" is the time of the last trim before its return.
        self._idle: dict[int, deque[_Idle]] = {}
        self._idle_bytes = 0
        self._now = 0.0
        self._leases: dict[int, Lease] = {}
        self._returned: deque[memoryview] = deque()
        self._closed = False

    def take(self, size: int) -> memoryview:
        """Uninitialised memory of ``size`` bytes. It returns to the pool by itself when its last use ends."""
        if size < SMALLEST_RECYCLED_BYTES:
            return memoryview(bytearray(size))
        if self._closed:
            return _fresh(size)  # pages cost nothing until bytes arrive, however many bytes a peer has announced
        capacity = rounded_size(size)
        memory = None
        if self._lock.acquire(True, _PATIENCE_S):
            try:
                if self._returned:
                    self._collect()
                memory = self._take_idle(capacity)
            finally:
                self._lock.release()
        if memory is None:
            memory = _fresh(capacity)
        # The lease watches a slice, which dies; "memory" itself returns to the pool.
        view, lease = leased(memory[:size], self._on_death, memory)
        self._leases[id(lease)] = lease
        return view

    def trim(self, now: float, idle_s: float = 10.0) -> None:
        """Return memory that was idle for ``idle_s`` to the system; call it from time to time."""
        with self._lock:
            self._now = now
            self._collect()
            for capacity, idle in self._idle.items():
                while idle and now - idle[0].since >= idle_s:
                    idle.popleft()
                    self._idle_bytes -= capacity

    def close(self) -> None:
        """Return all idle memory to the system, and keep none from now on."""
        self._closed = True
        with self._lock:
            self._leases.clear()
            self._returned.clear()
            self._idle.clear()
            self._idle_bytes = 0

    @destructor
    def _on_death(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is not None:
            self._returned.append(lease.holder)

    def _collect(self) -> None:
        """Make returned memory idle, and drop idle memory beyond the limit."""
        while self._returned:
            memory = self._returned.popleft()
            capacity = len(memory)
            self._idle.setdefault(capacity, deque()).append(_Idle(memory, self._now))
            self._idle_bytes += capacity
            while self._idle_bytes > self._limit_bytes:
                self._drop_one(capacity)

    def _drop_one(self, newest_capacity: int) -> None:
        """Drop the coldest idle memory, if possible of another size than the newest: that size is in use now."""
        for capacity, idle in self._idle.items():
            if idle and capacity != newest_capacity:
                idle.popleft()
                self._idle_bytes -= capacity
                return
        self._idle[newest_capacity].popleft()
        self._idle_bytes -= newest_capacity

    def _take_idle(self, capacity: int) -> memoryview | None:
        candidate = capacity
        for _ in range(1 + _NEAR_FITS):
            idle = self._idle.get(candidate)
            if idle:
                self._idle_bytes -= candidate
                return idle.pop().memory
            candidate = rounded_size(candidate + 1)
        return None


def _fresh(capacity: int) -> memoryview:
    if not _PRIVATE:
        return memoryview(bytearray(capacity))
    mapping = mmap.mmap(-1, capacity, flags=_PRIVATE)
    if _HUGE_PAGES is not None and capacity >= _HUGE_PAGE_BYTES:
        try:
            mapping.madvise(_HUGE_PAGES)  # one page fault instead of 512
        except OSError:
            pass  # a kernel without them
    return memoryview(mapping)
