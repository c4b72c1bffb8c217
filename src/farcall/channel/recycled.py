"""Memory to receive large buffers into, used again when the tensors over it have died.

Over TCP a tensor's bytes go straight from the socket into memory that becomes the tensor's storage. Fresh
memory is several times slower to fill than memory whose pages exist, so what comes back is kept, last in,
first out, up to a limit, for a while. What tensors in use take is not limited here: that is the user's
memory.

Thread-safe. Returning memory takes no lock (it happens inside garbage collection). Private pages: after a
fork the child has its own copy.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import NamedTuple

from farcall.channel.interface import Lease, leased, rounded_size

#: Smaller buffers come from the ordinary heap, which recycles them well itself.
SMALLEST_RECYCLED_BYTES = 64 * 1024
# A request may take idle memory this many sizes above its own, each up to an eighth larger.
_NEAR_FITS = 4

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_PAGE_BYTES = 2 << 20


class _Idle(NamedTuple):
    memory: memoryview
    since: float


class ReceivePool:
    """Recycled receive memory; keeps at most ``limit_bytes`` that nobody uses."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Idle memory by size, the warmest last. "since" is the time of the last trim before it came back.
        self._idle: dict[int, deque[_Idle]] = {}
        self._idle_bytes = 0
        self._now = 0.0
        self._leases: dict[int, Lease] = {}
        self._returned: deque[memoryview] = deque()
        self._closed = False

    def take(self, size: int) -> memoryview:
        """Uninitialised memory of ``size`` bytes; it comes back by itself when nothing uses it any more."""
        if size < SMALLEST_RECYCLED_BYTES or self._closed:
            return memoryview(bytearray(size))
        capacity = rounded_size(size)
        with self._lock:
            if self._returned:
                self._collect()
            memory = self._take_idle(capacity)
        if memory is None:
            memory = _fresh(capacity)
        # The lease watches a slice, which dies; "memory" itself is what comes back.
        view, lease = leased(memory[:size], self._on_death, memory)
        self._leases[id(lease)] = lease
        return view

    def trim(self, now: float, idle_s: float = 10.0) -> None:
        """Give back to the system what was not used for ``idle_s``; call it from time to time."""
        with self._lock:
            self._now = now
            self._collect()
            for capacity, idle in self._idle.items():
                while idle and now - idle[0].since >= idle_s:
                    idle.popleft()
                    self._idle_bytes -= capacity

    def close(self) -> None:
        """Give back all idle memory, and what comes back later at once."""
        self._closed = True
        with self._lock:
            self._leases.clear()
            self._returned.clear()
            self._idle.clear()
            self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Kept for later, at most the limit."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def _on_death(self, lease: Lease) -> None:
        if self._leases.pop(id(lease), None) is not None:
            self._returned.append(lease.holder)

    def _collect(self) -> None:
        """Put away what came back; what would exceed the limit goes, the coldest of its own size first."""
        while self._returned:
            memory = self._returned.popleft()
            capacity = len(memory)
            self._idle.setdefault(capacity, deque()).append(_Idle(memory, self._now))
            self._idle_bytes += capacity
            while self._idle_bytes > self._limit_bytes:
                self._drop_one(capacity)

    def _drop_one(self, newest_capacity: int) -> None:
        """Drop idle memory of some other size than the newest if there is any: sizes in use now stay."""
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
