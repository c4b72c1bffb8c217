"""Twins: copies of blocks in device memory, at their owner and at their readers.

A twin is a shortcut to bytes that are also in host memory. It is filled with its block, under the same leases. A reader
that cannot open the twin, or finds its owner dead, reads the block instead. So no version is lost with a twin, and no
reader waits for one.

    a twin is    by                                              becomes
    missing      a push from its device, for a subscriber that   filled; unless that would take more device memory
                 can open memory of it                           than `MemoryOptions.device_memory_limit_bytes`
    filled       its block is filled again, as above             filled
    filled       the same, but no subscriber can open it         missing
    filled       its block is given up                           missing
    filled       the same, and a reader is out of reach          resting: nobody else gets the memory
    filled       its node ends, and not all others with it       resting: a reader may not have heard of it yet
    resting      `REST_S` have passed                            missing
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

import torch

from farcall.channel.device_memory import REST_S
from farcall.protocol.weights.messages import OnDevice
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import RemotePeer
from farcall.serialize.allowance import loads
from farcall.weights.manifest import Content
from farcall.weights.memory import Block
from farcall.weights.version import HeldVersion

if TYPE_CHECKING:
    from farcall.weights.node import Weights

logger: logging.Logger = logging.getLogger("farcall")


class Twin:
    """The bytes of one block in device memory. Mutable: the export that each member opens it with."""

    __slots__ = ("device", "memory", "openers")

    def __init__(self, device: int, memory: torch.Tensor) -> None:
        self.device: int = device
        self.memory: torch.Tensor = memory
        self.openers: dict[int, bytes] = {}


class _OpenedTwin:
    """A twin of another process, opened here; ``memory`` is None if that failed, or after the owner has left."""

    __slots__ = ("__weakref__", "memory", "opener")

    def __init__(self, opener: bytes, memory: torch.Tensor | None) -> None:
        self.opener = opener
        self.memory = memory

    def close(self) -> None:
        self.memory = None


class Twins:
    """The twins of one node's blocks, and the twins of others that it has opened.

    Mutable, under its lock: the opened twins by owner and block, and the resting memory.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._making = threading.Lock()  # between threads that push: from the check of the limit to the new twin
        self._opening = threading.Lock()  # between threads that load; not `_lock`, because the driver may take long
        self._opened: dict[tuple[int, int], _OpenedTwin] = {}
        self._resting: list[tuple[float, torch.Tensor]] = []
        self._rest_timer = weights.node.timer(self._on_rested)

    # ------------------------------------------------------------------ at their owner

    @property
    def total_bytes(self) -> int:
        """The device memory of this node's twins, resting memory included."""
        with self._lock:
            resting = sum(memory.numel() for _, memory in self._resting)
        return self._weights.blocks.twin_bytes + resting

    def prepare(self, block: Block, device: int, members: Iterable[int]) -> None:
        """Before ``block`` is filled from ``device``: give it a twin there if one of ``members`` can open it."""
        devices = self._weights.node.devices
        if device < 0 or devices is None or not any(self._can_open(member, device) for member in members):
            block.twin = None
            return
        if block.twin is not None and block.twin.device == device:
            return
        block.twin = None
        with self._making:
            if self.total_bytes + block.size <= devices.options.memory.device_memory_limit_bytes:
                memory = devices.api.allocate(device, block.size)
                if memory is not None:
                    block.twin = Twin(device, memory)

    def openers(self, blocks: Sequence[Block], peer: RemotePeer) -> list[OnDevice]:
        """The twins of ``blocks``, the blocks of a version, with the exports by which ``peer`` opens them."""
        found = []
        for index, twin in enumerate([block.twin for block in blocks]):  # read once: a node that ends clears it
            opener = b"" if twin is None else self._opener(twin, peer)
            if twin is not None and opener:
                found.append(OnDevice(index, twin.device, opener))
        return found

    def give_up(self, block: Block) -> None:
        """Give up the twin of a retired block; its memory rests if a reader is out of reach."""
        twin, block.twin = block.twin, None
        if twin is not None and block.is_stranded:
            rested_at = monotonic() + REST_S
            with self._lock:
                self._resting.append((rested_at, twin.memory))
                is_first = len(self._resting) == 1
            if is_first:  # otherwise the timer is set already, and `_on_rested` sets it for the next
                self._rest_timer.at(rested_at)

    def _on_rested(self, now: float) -> float:
        with self._lock:
            self._resting = [one for one in self._resting if one[0] > now]
            return min((rested_at for rested_at, _ in self._resting), default=NEVER)

    def _can_open(self, member: int, device: int) -> bool:
        peer = self._weights.peer(member)
        if not isinstance(peer, RemotePeer) or peer.devices is None or peer.lending is None:
            return False
        can: bool = peer.devices.shares(device)
        return can

    def _opener(self, twin: Twin, peer: RemotePeer) -> bytes:
        devices = self._weights.node.devices
        if devices is None or not self._can_open(peer.incarnation, twin.device):
            return b""
        opener = twin.openers.get(peer.incarnation)
        if opener is None:
            try:
                opener = pickle.dumps(devices.api.export(devices.api.alias(twin.memory)), 5)
            except Exception as error:  # memory that the driver cannot share: of another allocator, say
                logger.info("weights on cuda:%d go through the host: %s", twin.device, error)
                opener = b""
            twin.openers[peer.incarnation] = opener
        return opener

    # ------------------------------------------------------------------ at their readers

    def open(self, held: HeldVersion) -> list[torch.Tensor | None]:
        """For each content of a version its bytes on a device, or None where this process cannot open them."""
        contents = held.manifest.contents
        found: list[torch.Tensor | None] = [None] * len(contents)
        # A fetched version is a copy without a lease: its publisher may have filled the twins again.
        if not held.was_fetched and self.are_there(held):
            for place in held.on_devices:
                found[place.content] = self._open(contents[place.content], place)
        return found

    def are_there(self, held: HeldVersion) -> bool:
        """Do the owners of a version's twins live? Only then are bytes valid that were just copied out of them.

        An owner whose connection has just ended may be dead: its memory goes at that moment, the verdict comes later.
        """
        owners = {held.manifest.contents[place.content].owner for place in held.on_devices}
        peers = [self._weights.peer(owner) for owner in owners]
        return all(isinstance(peer, RemotePeer) and peer.linked and peer.link.up for peer in peers)

    def close(self, owner: int, block_id: int | None = None) -> None:
        """Close the twin of another process's block; None: those of all its blocks."""
        with self._lock:
            gone = [key for key in self._opened if key[0] == owner and block_id in (None, key[1])]
            closed = [self._opened.pop(key) for key in gone]
        # On a worker thread: torch waits for the work on a stream before it closes such memory.
        for one in closed:
            self._weights.node.write_later(one.close)

    def end(self, blocks: Iterable[Block], *, all_end: bool) -> None:
        """Give up the twins of ``blocks`` with the node. ``all_end``: all nodes end together, so no reader is left."""
        memory = []
        for block in blocks:
            twin, block.twin = block.twin, None
            if twin is not None:
                memory.append(twin.memory)
        with self._lock:  # only swap here: closing memory may wait for a device, so it happens outside the lock
            opened, self._opened = self._opened, {}
            resting, self._resting = self._resting, []
        del opened
        memory += [one for _, one in resting]
        if memory and not all_end:
            # The process may live on, and torch would hand it this memory to write to while a reader still reads. A
            # thread's timer, because those of the node end with it.
            rest = threading.Timer(REST_S, memory.clear)
            rest.daemon = True
            try:
                rest.start()
            except RuntimeError:
                pass  # no thread to be had; or the interpreter ends, and all memory with it

    def _open(self, content: Content, place: OnDevice) -> torch.Tensor | None:
        key = content.owner, content.block_id
        with self._opening:  # two threads may load at once; each memory is opened once
            known = opened = self._opened.get(key)
            if opened is None or opened.opener != place.opener:
                opened = self._open_first(content, place)
                with self._lock:
                    self._opened[key] = opened
                if self._weights.peer(content.owner) is None:
                    self.close(content.owner)  # the owner left meanwhile, before this entry existed: close it here
        del known  # outside the lock: closing the replaced memory may take as long as the work on the device
        return opened.memory

    def _open_first(self, content: Content, place: OnDevice) -> _OpenedTwin:
        opened = _OpenedTwin(place.opener, None)
        peer, devices = self._weights.peer(content.owner), self._weights.node.devices
        if devices is None or peer is None or peer.devices is None:
            return opened
        device = peer.devices.here(place.device)
        try:
            if device is None:
                raise LookupError(f"its cuda:{place.device} is not visible here")
            memory = devices.api.open(loads(place.opener), device)
            if memory.numel() < content.size_bytes:
                raise ValueError(f"{memory.numel()} bytes were lent, not {content.size_bytes}")
            opened.memory = memory  # before `borrow`: from then on the link may close it at any time
            if not peer.devices.borrow(opened):
                opened.memory = None
        except Exception as error:  # the driver raises errors of many types
            logger.info("weights of %s come through the host: %s", peer.info.name, error)
        return opened
