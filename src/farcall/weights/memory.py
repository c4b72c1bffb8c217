"""Blocks: the memory that holds versions, at its owner and at its readers.

A block is a memory file (``memfd``) with one writer, its owner. It is sealed: other processes can map it, but neither
write to it nor change its size. Between two fillings it never changes. Owners refill blocks, because touching fresh
pages costs several times the copy, but only blocks without readers (`protocol/weights/lending.py` decides that).

On systems without memory files a block is private memory of its owner, and its bytes are sent.

The owner and each reader pin a block, each for its own process, before a device copies from or to it. On an H200
pinning takes 45 ms per GiB of touched pages; copies then run at 51 GiB/s instead of 6 to 14.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    import fcntl
    import mmap
except ImportError:  # not POSIX: no block is ever shared, but importing must work
    pass

from farcall.channel.device_runtime import loaded_runtime
from farcall.channel.host_memory import ALIGNMENT_BYTES, address_of
from farcall.channel.segment_map import check_fixed, map_file
from farcall.transport.descriptors import close_in_children

if TYPE_CHECKING:
    from farcall.weights.twins import Twin

_SEAL_SHRINK, _SEAL_GROW, _SEAL_SEAL, _SEAL_FUTURE_WRITE = 0x2, 0x4, 0x1, 0x10
_ROUNDED_BYTES = 1 << 20
_to_unpin: list[tuple[memoryview, int]] = []
"""The memory of dropped blocks, with the device that pinned it. The list keeps it mapped until it is unpinned."""


def aligned(offset: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """``offset``, rounded up to the alignment; by default that of any tensor."""
    return -(-offset // alignment) * alignment


def host_bytes() -> int:
    """The size of this host's memory."""
    if not hasattr(os, "sysconf"):
        return 1 << 47
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Pin:
    """The pinning of one block's memory, which keeps that memory mapped. All fields are mutable."""

    __slots__ = ("_is_over", "_lock", "_pinned", "_process", "_was_tried")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # between threads that pin; `end` must not take it
        self._was_tried = False
        self._is_over = False
        # At most one entry. A list, because its pop is atomic: of two threads in `end` only one gets the entry.
        self._pinned: list[tuple[memoryview, int]] = []
        self._process = os.getpid()

    def begin(self, memory: memoryview, device: int, *, writable: bool) -> None:
        """Pin ``memory`` for all devices, unless that was tried before. If pinning fails, copies are slower.

        ``device`` is one that this process uses: on any other the driver would create a context, which takes memory.
        """
        with self._lock:
            runtime = None if self._was_tried else loaded_runtime()
            self._was_tried = True
            if runtime is not None and runtime.pin(address_of(memory), memory.nbytes, device, writable=writable):
                self._pinned.append((memory, device))
        if self._is_over:  # `end` ran meanwhile, before there was anything to unpin
            self.end()

    def end(self) -> None:
        """Unpin the memory of a dropped block. Takes no lock and never waits: a garbage collection may call it."""
        self._is_over = True
        try:
            pinned = self._pinned.pop()
        except IndexError:
            return  # not pinned
        if self._process != os.getpid():
            return  # a forked child has neither the pin nor the device
        _to_unpin.append(pinned)
        try:
            # On a thread: the driver first waits for all work on the device, and the I/O thread may be here.
            _thread.start_new_thread(_unpin, ())
        except RuntimeError:
            pass  # no thread to be had: the next `_unpin` takes this entry, too; or the interpreter ends


def _unpin() -> None:
    runtime = loaded_runtime()
    assert runtime is not None
    while True:
        try:
            memory, device = _to_unpin.pop()
        except IndexError:
            return  # another thread was faster
        runtime.unpin(address_of(memory), device)


class BorrowedBlock:
    """A block of another process, mapped here for reading. It keeps the descriptor for private mappings."""

    __slots__ = ("__weakref__", "_close", "_pin", "address", "descriptor", "size", "view")

    def __init__(self, descriptor: int, size: int) -> None:
        """Take over ``descriptor``, even if this raises. It is closed when the last version in the block is dropped."""
        self.descriptor: int = descriptor
        self.size: int = size
        try:
            check_fixed(descriptor, size)
            self.view: memoryview = map_file(descriptor, size, writable=False)
        except BaseException:
            os.close(descriptor)
            raise
        self.address: int = address_of(self.view)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._pin = _Pin()
        weakref.finalize(self, self._pin.end).atexit = False
        close_in_children(self)

    def pin(self, device: int) -> None:
        """Pin the block: ``device`` is about to copy from it."""
        self._pin.begin(self.view, device, writable=False)

    def private_view(self) -> memoryview:
        """A copy-on-write view of the block: writes to it are visible through this view only."""
        return map_file(self.descriptor, self.size, private=True)

    def close_after_fork(self) -> None:
        """In a forked child: close the descriptor. The mapping stays readable."""
        self._close()
        self.descriptor = -1  # the number may soon belong to another file


class Block:
    """A block of this process, its only writer.

    Mutable: ``fill`` counts its fillings, ``users`` the versions in it; ``offered_to`` are the members that have its
    descriptor.
    """

    __slots__ = (
        "__weakref__",
        "_pin",
        "address",
        "block_id",
        "descriptor",
        "fill",
        "is_stranded",
        "offered_to",
        "size",
        "twin",
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
        """A process that this node cannot reach may read the block for ever: it is never filled again."""
        self.offered_to: set[int] = set()
        self.twin: Twin | None = None
        """The same bytes in device memory."""
        self._pin = _Pin()
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

    def pin(self, device: int) -> None:
        """Pin the block: ``device`` is about to copy from or to it."""
        self._pin.begin(self.view, device, writable=True)

    def private_view(self) -> memoryview:
        """A copy-on-write view of the block; without a descriptor, a copy of it."""
        if self.descriptor < 0:
            return memoryview(bytearray(self.view))
        return map_file(self.descriptor, self.size, private=True)

    def close(self) -> None:
        """Give up descriptor and mapping. Views that exist stay valid."""
        self._pin.end()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.view = memoryview(b"")

    close_after_fork = close


class BlockStore:
    """The blocks of one node. Thread-safe.

    Mutable, under the lock: all blocks, the free ones, which may be filled again, and the retired ones.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._next_id = 1
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self._retired: list[Block] = []

    @property
    def total_bytes(self) -> int:
        """The size of all blocks, free ones included."""
        with self._lock:
            return sum(block.size for block in self._blocks.values())

    @property
    def twin_bytes(self) -> int:
        """The device memory of all twins."""
        with self._lock:
            twins = [block.twin for block in self._blocks.values()]
        return sum(twin.memory.numel() for twin in twins if twin is not None)

    def get(self, block_id: int) -> Block | None:
        """The block with that number."""
        return self._blocks.get(block_id)

    def take(self, size: int, device: int = -1) -> Block:
        """A block to fill, of at least ``size`` bytes, with a twin on ``device`` if possible; its ``users`` is 1."""
        with self._lock:
            fitting = [block for block in self._free if size <= block.size <= 2 * size + _ROUNDED_BYTES]
            if fitting:
                block = min(fitting, key=lambda block: (_twin_device(block) != device, block.size))
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
        """Count one more version in a block."""
        with self._lock:
            block.users += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one version less in each block; a block without versions becomes free, or retired if stranded."""
        with self._lock:
            for block in blocks:
                block.users -= 1
                if block.users == 0:
                    if block.is_stranded:
                        self._retire(block)
                    else:
                        self._free.append(block)

    def trim(self, keep_bytes: int) -> None:
        """Give up free blocks, all but the ``keep_bytes`` that became free last."""
        with self._lock:
            kept = 0
            for block in reversed(self._free[:]):
                kept += block.size
                if kept > keep_bytes:
                    self._free.remove(block)
                    self._retire(block)

    def take_retired(self) -> list[Block]:
        """The blocks given up since the last call. The caller notifies the members in ``offered_to``."""
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def close(self) -> list[Block]:
        """Give up all blocks, and return them."""
        with self._lock:
            closed = [*self._blocks.values(), *self._retired]
            for block in closed:
                block.close()
            self._blocks.clear()
            self._free.clear()
            self._retired.clear()
            return closed

    def _retire(self, block: Block) -> None:
        del self._blocks[block.block_id]
        block.close()
        self._retired.append(block)


def _twin_device(block: Block) -> int:
    twin = block.twin
    return -1 if twin is None else twin.device
