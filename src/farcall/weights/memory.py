"""Blocks: the memory that versions lie in, at its owner and at those who read it.

A block is a memory file (``memfd``) with one writer, its owner. It is sealed: others can map it, but neither write to
it nor change its size. Between two fillings it never changes; an owner fills a block again only when nobody reads it
(`protocol/weights/lending.py` says when that is), because touching fresh pages costs several times the copy.

Where there are no memory files, a block is plain memory of its owner, whose bytes travel.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: no block is ever shared, but importing must work
    pass

from farcall.channel.host_memory import ALIGNMENT_BYTES, address_of
from farcall.channel.segment_map import map_file
from farcall.channel.segments import SegmentRefused
from farcall.transport.descriptors import close_in_children

_SEAL_SHRINK, _SEAL_GROW, _SEAL_SEAL, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x1, 0x10
_ROUNDED_BYTES = 1 << 20


def aligned(offset: int) -> int:
    """The next offset at which any tensor may lie."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def host_bytes() -> int:
    """The memory of this host."""
    if not hasattr(os, "sysconf"):
        return 1 << 47
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class BorrowedBlock:
    """A block of another process, mapped here for reading; its descriptor is kept, to be mapped again or passed on."""

    __slots__ = ("__weakref__", "_close", "address", "descriptor", "size", "view")

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes ``descriptor`` over, also if it raises; it is closed when the last version in the block is dropped."""
        self.descriptor: int = descriptor
        self.size: int = size
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            really = os.fstat(descriptor).st_size
            # Memory that can shrink under us would end this process with SIGBUS at the next touch.
            if size <= 0 or not seals & _SEAL_SHRINK or really < size:
                raise SegmentRefused(f"the memory file has {really} bytes (seals {seals}), not a fixed {size}")
            self.view: memoryview = map_file(descriptor, size, writable=False)
        except BaseException:
            os.close(descriptor)
            raise
        self.address: int = address_of(self.view)
        self._close = weakref.finalize(self, os.close, descriptor)
        close_in_children(self)

    def private_view(self) -> memoryview:
        """The block, copy on write: what is written to this view is seen through it alone."""
        return map_file(self.descriptor, self.size, private=True)

    def close_after_fork(self) -> None:
        """In a forked child: what is mapped can be read on."""
        self._close()
        self.descriptor = -1  # the number may be another file's by the next look


class Block:
    """A block of this process, on which it alone writes.

    Mutable: ``fill`` counts its fillings, ``users`` the versions that lie in it, ``offered_to`` who has its descriptor.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "block_id",
        "descriptor",
        "fill",
        "is_stranded",
        "offered_to",
        "size",
        "users",
        "view",
    )

    def __init__(self, block_id: int, size: int, *, is_shared: bool) -> None:
        self.block_id: int = block_id
        self.size: int = size
        self.descriptor: int = -1
        self.fill: int = 0
        self.users: int = 0
        self.is_stranded: bool = False
        """Somebody out of reach may read it for good: it is never filled again."""
        self.offered_to: set[int] = set()
        if is_shared:
            self.descriptor = os.memfd_create(f"farcall-weights-{block_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.descriptor, size)
                self.view: memoryview = map_file(self.descriptor, size)
                seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL
                try:
                    fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE)
                except OSError:  # before Linux 5.1
                    fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            except BaseException:
                os.close(self.descriptor)
                raise
            close_in_children(self)
        else:
            self.view = memoryview(mmap.mmap(-1, size))
        self.address: int = address_of(self.view)

    def private_view(self) -> memoryview:
        """The block, copy on write; a copy of it where there is no descriptor to map again."""
        if self.descriptor < 0:
            return memoryview(bytearray(self.view))
        return map_file(self.descriptor, self.size, private=True)

    def close(self) -> None:
        """Give descriptor and mapping up; views live on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.view = memoryview(b"")

    close_after_fork = close


class BlockStore:
    """The blocks of one node. Thread-safe; mutable: those in use, and those that may be filled again."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._next_id = 1
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self._retired: list[Block] = []

    @property
    def total_bytes(self) -> int:
        """What all blocks take, those that may be filled again included."""
        with self._lock:
            return sum(block.size for block in self._blocks.values())

    @property
    def free_bytes(self) -> int:
        """What may be filled again."""
        with self._lock:
            return sum(block.size for block in self._free)

    def get(self, block_id: int) -> Block | None:
        """The block of that number."""
        return self._blocks.get(block_id)

    def take(self, size: int) -> Block:
        """A block to fill, of at least ``size`` bytes; its ``users`` are 1."""
        with self._lock:
            fitting = [block for block in self._free if size <= block.size <= 2 * size + _ROUNDED_BYTES]
            if fitting:
                block = min(fitting, key=lambda block: block.size)
                self._free.remove(block)
            else:
                rounded = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
                block = Block(self._next_id, rounded, is_shared=self._is_shared)
                self._next_id += 1
                self._blocks[block.block_id] = block
            block.fill += 1
            block.users = 1
            return block

    def share(self, block: Block) -> None:
        """One version more lies in it."""
        with self._lock:
            block.users += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One version less lies in each of them."""
        with self._lock:
            for block in blocks:
                block.users -= 1
                if block.users == 0:
                    if block.is_stranded:
                        self._retire(block)
                    else:
                        self._free.append(block)

    def trim(self, keep_bytes: int) -> None:
        """Give up blocks that may be filled again, but for the last ``keep_bytes`` of them."""
        with self._lock:
            kept = 0
            for block in reversed(self._free[:]):
                kept += block.size
                if kept > keep_bytes:
                    self._free.remove(block)
                    self._retire(block)

    def take_retired(self) -> list[Block]:
        """Blocks given up since the last look: those in ``offered_to`` are to be told."""
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> None:
        """Give all up."""
        with self._lock:
            for block in self._blocks.values():
                block.close()
            self._blocks.clear()
            self._free.clear()
            self._retired.clear()

    def _retire(self, block: Block) -> None:
        del self._blocks[block.block_id]
        block.close()
        self._retired.append(block)
