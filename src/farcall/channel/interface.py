"""What the channels share: how memory is named on the wire, and how it tells that nobody uses it any more.

A channel moves the bytes of large buffers beside a transport, which carries only a ticket for them. The
receiver gets a ``memoryview``; tensors and arrays are built over it without a copy. When the last of them
dies the memory can be used again. ``leased`` makes such a view and calls back then.

Invariant: the callback runs after every object that can reach the bytes is gone: tensors, arrays, slices and
casts of the view included. It may run on any thread, even inside a garbage collection that interrupted a
holder of any lock, so it must not take one: append to a deque, set a flag.
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections.abc import Callable
from typing import Any

#: Blocks start at multiples of this: a cache line, and more than any dtype needs.
ALIGNMENT_BYTES = 64


class SegmentRefused(ValueError):
    """A peer offered a segment, or named memory in one, that cannot be so; the message says what."""


class Lease(weakref.ref[memoryview]):
    """A watch over one view; ``holder`` is whatever its owner needs when the view has died."""

    __slots__ = ("holder",)

    holder: Any


def leased(memory: memoryview, on_death: Callable[[Any], None], holder: Any) -> tuple[memoryview, Lease]:
    """A view of ``memory`` to give away, and the lease on it; ``on_death(lease)`` runs when all use of it
    ended.

    The caller keeps the lease, or the callback never runs. ``memory`` must be given up by the caller.

    A slice, a cast or a numpy array of a memoryview does not keep that memoryview alive, only the buffer
    below it. The detour through a pickle buffer puts a new buffer on top whose owner is ``memory`` itself:
    whatever is derived from the view given away keeps ``memory`` alive, and ``memory`` is what the lease
    watches.
    """
    lease = Lease(memory, on_death)
    lease.holder = holder
    return memoryview(pickle.PickleBuffer(memory)), lease


def address_of(view: memoryview) -> int:
    """Where the memory of ``view`` is; 0 if it is read-only or empty."""
    if view.readonly or not view.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def rounded_size(size: int) -> int:
    """``size`` rounded up to one of few sizes, so that freed memory fits again; wastes at most an eighth."""
    if size <= 8 * ALIGNMENT_BYTES:
        return max(1, -(-size // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    step = min(1 << ((size - 1).bit_length() - 4), 2 << 20)
    return -(-size // step) * step
