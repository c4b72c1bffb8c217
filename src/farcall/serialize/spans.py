"""The bytes of each storage that a message needs, and their layout in its buffers.

Owns the sender's records (one per large storage met), the plan made from them once the pickle is complete,
and the table through which the reader finds a storage's bytes. It does not know pickle.

A record becomes one segment [low, high) that covers all its views, so that they stay views of one storage.
If that would send much more than the views hold, the record is split: views whose ranges overlap stay
together, and a view that shares no element with another is sent as a compact copy.

    segment: (low_bytes, in_band bytes or None, compact?)     None: the next buffer
    table:   one list of segments per storage, each ordered by low_bytes; absent when every storage is one
             buffer from byte 0

Invariant: two views that share an element share a segment.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from farcall.serialize.context import IN_BAND_LIMIT_BYTES

Segment = tuple[int, bytearray | None, bool]
SegmentTable = list[list[Segment]]
View = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""low byte, high byte, dtype, shape, strides, offset in elements."""

_ALIGNMENT_BYTES = 64
# Splitting and compacting cost copies and entries in the frame: savings below this are not worth it.
_WORTHWHILE_BYTES = 1 << 16
_MOST_RUNS_COMPARED = 1 << 22

# One array type larger than any storage, instead of one new type per size. Only slices within the storage are
# ever read.
_AnyMemory = ctypes.c_char * (1 << 46)
_copy_to_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_copy_to_bytearray.restype = ctypes.py_object
_copy_to_bytearray.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


class StorageRecord:
    """A storage that travels out of band, and the views of it met so far. Mutable: ``views`` grows."""

    __slots__ = ("index", "storage", "views")

    def __init__(self, index: int, storage: torch.UntypedStorage) -> None:
        self.index: int = index
        self.storage: torch.UntypedStorage = storage
        self.views: list[View] = []


def memory_of(storage: torch.UntypedStorage, low: int, high: int) -> memoryview:
    """Return bytes [low, high) of ``storage`` as a view that keeps the storage alive."""
    memory: Any = _AnyMemory.from_address(storage.data_ptr())
    memory.owner = storage
    return memoryview(memory).cast("B")[low:high]


def copy_of(pointer: int, size_bytes: int) -> bytearray:
    """Return a copy of the memory at ``pointer``."""
    copy: bytearray = _copy_to_bytearray(pointer, size_bytes)
    return copy


def compact_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a view's compact copy: row-major, except that strides of 0 stay 0."""
    result: list[int] = []
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        result.append(step if stride else 0)
        if stride:
            step *= size
    return tuple(reversed(result))


def plan(records: list[StorageRecord]) -> tuple[list[memoryview], SegmentTable | None]:
    """Return the buffers of a message's storages and, if the reader needs it, their table.

    Buffers are in the order of those segments of the table that are not in-band.
    """
    buffers: list[memoryview] = []
    table: SegmentTable = []
    needs_table = False
    for record in records:
        storage, views = record.storage, record.views
        low, high, dtype, shape, _, _ = views[0]
        if low == 0 and len(views) == 1 and math.prod(shape) * dtype.itemsize == high == storage.nbytes():
            # The usual tensor fills its storage: one part, and no table needed.
            buffers.append(memory_of(storage, 0, high))
            table.append([(0, None, False)])
            continue
        segments = [
            _whole(storage, low, high, buffers) if view is None else _compact(storage, view, buffers)
            for low, high, view in parts_of(views)
        ]
        needs_table = needs_table or len(segments) != 1 or segments[0] != (0, None, False)
        table.append(segments)
    return buffers, table if needs_table else None


def parts_of(views: list[View]) -> list[tuple[int, int, View | None]]:
    """The parts of a storage that ``views`` need, by low byte: bytes [low, high), or one view to be sent compact."""
    low, high = views[0][0], views[0][1]
    if len(views) > 1:
        views = list(dict.fromkeys(views))
        low = min(view[0] for view in views)
        high = max(view[1] for view in views)
    if high - low <= _WORTHWHILE_BYTES or not _is_wasteful(low, high, views):
        return [(low, high, None)]
    parts: list[tuple[int, int, View | None]] = []
    for group_low, group_high, group in _overlapping_groups(views):
        if _is_wasteful(group_low, group_high, group) and _are_disjoint(group):
            parts.extend((view[0], view[1], view) for view in group)
        else:
            parts.append((group_low, group_high, None))
    return parts


def _whole(storage: torch.UntypedStorage, low: int, high: int, buffers: list[memoryview]) -> Segment:
    # Rounding down gives every element the alignment in the buffer that it had in the storage.
    low -= low % _ALIGNMENT_BYTES
    if high - low <= IN_BAND_LIMIT_BYTES:
        return low, copy_of(storage.data_ptr() + low, high - low), False
    buffers.append(memory_of(storage, low, high))
    return low, None, False


def _compact(storage: torch.UntypedStorage, view: View, buffers: list[memoryview]) -> Segment:
    low, _, dtype, shape, strides, offset = view
    shape = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
    # Build the source from the storage, not the tensor: the copy must not resolve a conj or neg bit.
    strided = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)
    copy = torch.empty(shape, dtype=dtype, device="cpu").copy_(strided)
    size = copy.numel() * dtype.itemsize
    if size <= IN_BAND_LIMIT_BYTES:
        return low, copy_of(copy.data_ptr(), size), True
    buffers.append(memory_of(copy.untyped_storage(), 0, size))
    return low, None, True


def _is_wasteful(low: int, high: int, views: list[View]) -> bool:
    span = high - low
    needed = sum(_needed_bytes(view) for view in views)
    return span > 2 * needed and span - needed > _WORTHWHILE_BYTES


def _needed_bytes(view: View) -> int:
    _, _, dtype, shape, strides, _ = view
    needed = dtype.itemsize
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            needed *= size
    return needed


def _overlapping_groups(views: list[View]) -> list[tuple[int, int, list[View]]]:
    """Group views whose byte ranges overlap, ordered by where they begin."""
    groups: list[tuple[int, int, list[View]]] = []
    for view in sorted(views, key=lambda view: view[:2]):
        # Compare ranges after rounding down, as segments do begin there.
        low = view[0] - view[0] % _ALIGNMENT_BYTES
        if groups and low < groups[-1][1]:
            group_low, group_high, group = groups[-1]
            group.append(view)
            groups[-1] = (group_low, max(group_high, view[1]), group)
        else:
            groups.append((view[0], view[1], [view]))
    return groups


def _are_disjoint(views: list[View]) -> bool:
    """Are the views disjoint (like ``x[:, 0]`` and ``x[:, 1]``), and does none contain an element twice?

    The reader finds a compact segment by its low byte, so two views that begin at the same byte do not qualify
    either.
    """
    if len({view[2].itemsize for view in views}) != 1 or len({view[0] for view in views}) != len(views):
        return False
    begins, ends = [], []
    run_count = 0
    for _, _, _, shape, strides, offset in views:
        # Adjacent elements are compared as one run, so a block of columns costs one entry per row.
        run = max((size for size, stride in zip(shape, strides, strict=True) if stride == 1), default=1)
        outer = [(size, stride) for size, stride in zip(shape, strides, strict=True) if stride > 1]
        run_count += math.prod(size for size, _ in outer)
        if run_count > _MOST_RUNS_COMPARED or sum(stride == 1 for stride in strides) > 1:
            return False
        begin = torch.tensor([offset], dtype=torch.int64, device="cpu")
        for size, stride in outer:
            begin = (begin[:, None] + torch.arange(size, dtype=torch.int64, device="cpu") * stride).flatten()
        begins.append(begin)
        ends.append(begin + run)
    begin, order = torch.sort(torch.cat(begins))
    end = torch.cat(ends)[order]
    return not bool((begin[1:] < end[:-1]).any())
