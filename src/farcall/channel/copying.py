"""Copies into memory that already exists, in the quickest way for the size.

Small: a slice assignment, cheapest to start. Large: the C library's copy, during which other Python threads
run. Very large, on a machine with cores to spare: torch's copy, which uses several of them. (Not earlier: its
worker threads must all be scheduled, and on a busy machine one of them may wait a whole time slice. Measured:
1 MiB took 8 ms instead of 25 us.) Knows nothing of where the memory lives.
"""

from __future__ import annotations

import ctypes
import os

import torch

# Up to here a slice assignment keeps the interpreter lock for some ten microseconds at most.
_LARGE_BYTES = 256 * 1024
_WORTH_MANY_CORES_BYTES = 64 << 20
_CORES_TO_SPARE = 8
# ctypes takes no read-only memory, so that is copied in pieces between which others may run.
_PIECE_BYTES = 4 << 20

_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` (contiguous, any format) into the beginning of ``target`` (bytes, at least as long)."""
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
        # The two stand-ins also keep the memory from being released while the copy runs without the lock.
        to, origin = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
        ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), size)
