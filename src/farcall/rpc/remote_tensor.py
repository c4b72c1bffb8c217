"""`share` and `RemoteTensor`: a tensor that stays at its owner, and that other workers read and write parts of.

A `RemoteTensor` is a reference (`rref.py`) to a `SharedTensor`: the owner keeps the tensor as long as anybody holds
one, it travels where references travel, and it is lost with its owner.

    the reader is            the tensor is       bytes move by
    the owner itself         anywhere            one copy
    on the owner's host      in shared memory    one copy, out of mapped memory: the owner does nothing
    on the owner's host,     on a device         one copy on the device, from 1 MiB, out of memory that it has opened;
    with a device map                            the owner says what must be done first (`settle`)
    anywhere else            anywhere            a call of `read` or `write`, which its owner answers; of a device's
                                                 memory, as a device map says, and else through the host's

The functions `lend`, `read` and `write` are ordinary ones, called by ordinary requests; none of them runs user code, so
the owner's I/O thread may (`runtime/calls/run_inline.py`). Nothing here makes a read atomic: a reader that is there
while somebody writes sees some of both. Whole versions are the business of `farcall.weights`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch

from farcall.channel.device_api import DeviceApi, current_stream
from farcall.errors import Delivery, ReferenceLost, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.backoff import Backoff
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout, encode_request
from farcall.rpc.owner_calls import ask
from farcall.rpc.owner_methods import find_owned
from farcall.rpc.rref import RRef
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, current_runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.peers.shared_memory import SHARED_BYTES
from farcall.serialize import functions

logger: logging.Logger = logging.getLogger("farcall")

Slices = slice | Sequence[slice] | None
Region = tuple[tuple[int, int, int], ...]
"""Start, stop and step of each dimension that is not taken whole; empty: all of the tensor."""

_ALONE = 2
"""How many hold a storage that one tensor has: the tensor, and whoever asks."""
_WORTH_OPENING_BYTES = 1 << 20
"""Less is quicker by value: whoever reads the owner's memory waits for the copy, since the owner may write next."""
_FIRST_LOOK_S, _LAST_LOOK_S = 20e-6, 1e-3
"""A reader looks so often whether the owner's work on a device is done."""
_making_events = threading.Lock()
_MOST_OFFERS = 4
"""How often a reader asks for memory that it has not mapped yet before it has the bytes sent instead."""


def region_of(slices: Slices, shape: Sequence[int]) -> Region:
    """``slices`` of a tensor of that shape, as numbers; raises where they do not fit."""
    if slices is None:
        return ()
    chosen = tuple(slices) if isinstance(slices, Sequence) else (slices,)
    if not all(isinstance(one, slice) for one in chosen):
        raise TypeError(f"slices must be slice objects, one for each dimension, not {slices!r}")
    if len(chosen) > len(shape):
        raise ValueError(f"{len(chosen)} slices for a tensor of {len(shape)} dimensions")
    region = tuple(one.indices(extent) for one, extent in zip(chosen, shape, strict=False))
    if any(step < 1 for _, _, step in region):
        raise ValueError("the step of a slice must be positive")
    return region


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The view of ``tensor`` that ``region`` names."""
    return tensor[tuple(slice(*one) for one in region)] if region else tensor


class SharedTensor:
    """A tensor at its owner, and what others may do with it."""

    __slots__ = ("settled", "tensor", "writable")

    def __init__(self, tensor: torch.Tensor, writable: bool) -> None:
        self.tensor: torch.Tensor = tensor.detach()
        self.writable: bool = writable
        self.settled: Any = None
        """On a device: the event that readers wait for. It stands for what calls have done to the tensor."""

    def write(self, region: Region, source: torch.Tensor) -> None:
        """Copy ``source`` into a part of the tensor."""
        with torch.no_grad():
            part_of(self.tensor, region).copy_(source)


class _OpenedMemory:
    """The memory of an owner's tensor on a device, as its reader sees it; closed when the owner leaves."""

    __slots__ = ("__weakref__", "event", "tensor")

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.event = event

    def close(self) -> None:
        self.tensor = None


class RemoteTensor:
    """A tensor of another worker, to be read and written in place, without a function that runs there.

    Made by `share`. It can be sent to any worker, as an argument or a result, and the owner keeps the tensor as long as
    anybody holds one. Every use raises `ReferenceLost`, with the owner's name, once the owner is gone.
    """

    __slots__ = ("_mappable", "_mapped", "_openable", "_opened", "_rref", "dtype", "shape", "writable")

    def __init__(
        self, rref: RRef[SharedTensor], shape: Sequence[int], *, dtype: torch.dtype, writable: bool, mappable: bool
    ) -> None:
        """For `share`, and for the workers that a `RemoteTensor` is sent to."""
        self._rref = rref
        self._mapped: torch.Tensor | None = None
        self._opened: _OpenedMemory | None = None
        self._openable = True  # as far as this worker knows
        self._mappable = mappable
        self.shape: torch.Size = torch.Size(shape)
        """The shape of the owner's tensor."""
        self.dtype: torch.dtype = dtype
        """Its type; `read_into` and `write_from` convert."""
        self.writable: bool = writable
        """May others write it?"""

    def __repr__(self) -> str:
        return f"<RemoteTensor {tuple(self.shape)} {self.dtype} of {self.owner.name!r}>"

    def __reduce__(self) -> Any:
        return _arrived, (self._rref, tuple(self.shape), self.dtype, self.writable, self._mappable)

    @property
    def owner(self) -> WorkerInfo:
        """The worker whose tensor it is."""
        return self._rref.owner()

    @property
    def in_shared_memory(self) -> bool:
        """Is the owner's tensor where workers of its host can map it?"""
        return self._mappable

    @property
    def is_mapped(self) -> bool:
        """Does this worker look at the owner's memory itself, and need nothing more of the owner?"""
        return self._mapped is not None

    def read_into(
        self, target: torch.Tensor, slices: Slices = None, timeout: float | None = UNSET_TIMEOUT
    ) -> torch.Tensor:
        """Copy the owner's tensor, as it is now, into ``target``, and return that.

        Args:
            target: of the shape of what is read; another type or device is converted to.
            slices: one slice for each dimension (the last ones may be left out), in the owner's tensor.
            timeout: seconds; None for no limit; by default that of the options.
        """
        region = region_of(slices, self.shape)
        self._check_shape(target, region, "read into")
        with torch.no_grad():
            memory = self._memory(timeout)
            if memory is not None:
                target.copy_(part_of(memory, region))
                self._check_owner()  # memory that a dead owner left behind is not its tensor
            elif (opened := self._open(target, timeout)) is not None:
                target.copy_(part_of(opened, region), non_blocking=True)
                self._finish(opened)
            else:
                target.copy_(self._ask(read, (region,), timeout))
        return target

    def write_from(self, source: torch.Tensor, slices: Slices = None, timeout: float | None = UNSET_TIMEOUT) -> None:
        """Copy ``source`` into the owner's tensor; it is there when this returns.

        The owner must have said ``share(tensor, writable=True)``. The arguments are those of `read_into`.
        """
        if not self.writable:
            raise RpcError(f"{self!r} is read-only: its owner shares it without writable=True")
        region = region_of(slices, self.shape)
        self._check_shape(source, region, "write")
        memory = self._memory(timeout)
        if memory is not None:
            with torch.no_grad():
                part_of(memory, region).copy_(source)
            self._check_owner()
        elif (opened := self._open(source, timeout)) is not None:
            with torch.no_grad():
                part_of(opened, region).copy_(source, non_blocking=True)
            self._finish(opened)
        else:
            peer = self._rref._references.peer(self._rref._fork)
            self._ask(write, (region, _sendable(source.detach().to(self.dtype), peer)), timeout)

    # ------------------------------------------------------------------ inside

    def _memory(self, timeout: float | None) -> torch.Tensor | None:
        """The owner's tensor itself, if this process has it or can map it; None: bytes must be sent."""
        if self._rref.is_owner():
            return self._rref.local_value().tensor
        self._check_owner()
        if self._mapped is not None or not self._mappable:
            return self._mapped
        peer = self._rref._references.peer(self._rref._fork)
        if not isinstance(peer, RemotePeer) or peer.segments is None:
            return None
        for _ in range(_MOST_OFFERS):
            with torch.inference_mode(False):  # what is kept may be written later, outside of that mode
                lent: torch.Tensor | bool = self._ask(lend, (), timeout)
            if isinstance(lent, torch.Tensor):
                # A connection may have broken between the owner's look and its answer: then this is a copy.
                if peer.segments.holds(lent.data_ptr()):
                    self._mapped = lent.view(self.shape)
                    return self._mapped
            elif not lent:
                self._mappable = False
                break
        return None

    def _open(self, local: torch.Tensor, timeout: float | None) -> torch.Tensor | None:
        """The owner's tensor on a device, to be copied from or to ``local`` on the current stream; None: by value."""
        if not self._openable or not local.is_cuda or local.nbytes < _WORTH_OPENING_BYTES:
            return None
        peer = self._rref._references.peer(self._rref._fork)
        node = current_runtime()
        if peer.devices is None or node.devices is None:
            return None
        opened = self._opened
        if opened is None or opened.tensor is None:
            opened = self._opened = self._open_first(peer, node.devices.api, timeout)
            if opened is None:
                return None
        elif not self._ask(settle, (), timeout):
            return None
        self._wait_for(opened.event, timeout)
        return opened.tensor

    def _wait_for(self, event: Any, timeout: float | None) -> None:
        """Wait until the owner's earlier work is done. Not on the stream: a dead owner's event may never come."""
        seconds = current_runtime().timeout_s if timeout == UNSET_TIMEOUT else check_timeout(timeout)
        deadline = monotonic() + (seconds or NEVER)
        pauses = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        while not event.query():
            self._check_owner()
            if monotonic() >= deadline:
                raise RpcTimeout(f"{self!r}: work on the owner's device is not done after {seconds:g} s")
            time.sleep(pauses.next_s())

    def _open_first(self, peer: Peer, api: DeviceApi, timeout: float | None) -> _OpenedMemory | None:
        lent: tuple[Any, ...] | bool = self._ask(lend_memory, (), timeout)
        if isinstance(lent, bool):
            self._openable = lent
            return None
        number, export, offset, handle = lent
        device = peer.devices.here(number)
        if device is None:
            return None
        try:
            with torch.inference_mode(False):  # as above
                storage = api.open(export, device).untyped_storage()
                tensor = torch.empty(0, dtype=self.dtype, device=torch.device("cuda", device))
                tensor.set_(storage, offset, self.shape, torch.empty(self.shape, device="meta").stride())
            opened = _OpenedMemory(tensor, api.open_event(handle, device))
        except Exception as error:  # of the driver's, which has many
            logger.info("memory of %s is not opened, its tensors come by value: %s", peer.info.name, error)
            return None
        return opened if peer.devices.borrow(opened) else None

    def _finish(self, opened: torch.Tensor) -> None:
        """Wait for the copy: the owner may write to its tensor, or let it go, once this worker goes on."""
        current_stream(opened.get_device()).synchronize()
        self._check_owner()

    def _check_owner(self) -> None:
        if not self._rref.is_owner():
            self._rref._references.peer(self._rref._fork)  # raises if it is gone

    def _check_shape(self, tensor: torch.Tensor, region: Region, what: str) -> None:
        sizes = [len(range(*one)) for one in region]
        shape = (*sizes, *self.shape[len(sizes) :])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"cannot {what} a tensor of shape {tuple(tensor.shape)}: the part asked for has {shape}")

    def _ask(self, function: Any, arguments: tuple[Any, ...], timeout: float | None) -> Any:
        ref = self._rref._fork.ref
        peer = self._rref._references.peer(self._rref._fork)
        frame = encode_request(peer, function, (ref.created_on, ref.local_id, *arguments), None)
        return ask(self._rref, peer, function, frame, timeout)


def _arrived(
    rref: RRef[SharedTensor], shape: tuple[int, ...], dtype: torch.dtype, writable: bool, mappable: bool
) -> RemoteTensor:
    return RemoteTensor(rref, shape, dtype=dtype, writable=writable, mappable=mappable)


def share(tensor: torch.Tensor, writable: bool = False) -> RemoteTensor:
    """Let other workers read ``tensor``, and with ``writable`` write it, where it is; they are sent what this returns.

    From 64 KiB on the tensor is moved into shared memory once, so that workers on this host map it (a tensor of
    `shared_empty` is there already). The tensor object stays the same, its ``data_ptr()`` does not. One whose memory
    others look at too (a view, a tensor with views, an array of numpy's) stays where it is, and its bytes are sent;
    ``in_shared_memory`` of the result tells which it was.

    Args:
        tensor: contiguous; parameters may be shared, too, and no gradient flows.
        writable: may others write it?
    """
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor can be shared: share(tensor.contiguous()), and read slices of it")
    node = current_runtime()
    why_not = _move_in(node, tensor)
    if why_not:
        logger.debug("%s shares a tensor of %d bytes that nobody can map: %s", node.info.name, tensor.nbytes, why_not)
    # Known to be quick: they need no worker thread, however busy those are.
    for function in (lend, lend_memory, settle, read, write):
        node.server.inline.quick.add(functions.encode_function(function) or b"")
    rref = RRef(SharedTensor(tensor, writable))
    return RemoteTensor(rref, tensor.shape, dtype=tensor.dtype, writable=writable, mappable=not why_not)


def _move_in(node: Runtime, tensor: torch.Tensor) -> str:
    """Have ``tensor`` in shared memory, if that can be; why not."""
    pool = node.pool
    if pool is None:
        return "shared memory is switched off"
    if tensor.device.type != "cpu":
        return f"it is on {tensor.device}"
    if tensor.nbytes < SHARED_BYTES:
        return "it is small"
    if pool.find(tensor.data_ptr(), tensor.nbytes) is not None:
        return ""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # An array of numpy's holds the tensor, not its storage; torch marks the storage of one that has been asked for.
    if count is None or count(storage._cdata) > _ALONE or not storage.resizable():
        return "a view, an array or another tensor shares its memory: make the tensor with farcall.shared_empty"
    moved = pool.empty(tensor.shape, tensor.dtype)
    if pool.find(moved.data_ptr(), moved.nbytes) is None:
        return "no more shared memory may be used"
    moved.copy_(tensor.detach())
    tensor.data = moved
    return ""


# ---------------------------------------------------------------------- at the owner


def _find(created_on: int, local_id: int) -> SharedTensor:
    found = find_owned(created_on, local_id).get()
    if not isinstance(found, SharedTensor):
        raise ReferenceLost(f"{current_runtime().info.name} shares no such tensor", Delivery.EXECUTED)
    return found


def _caller() -> Peer:
    scope = CURRENT.get()
    assert scope is not None
    assert scope.served is not None
    return current_runtime().peer(scope.served.caller)


def _sendable(tensor: torch.Tensor, peer: Peer) -> torch.Tensor:
    """``tensor``, in the host's memory unless a device map leads to ``peer``, or from it."""
    return tensor if peer.devices is not None else tensor.cpu()


def lend(created_on: int, local_id: int) -> torch.Tensor | bool:
    """The tensor itself, for a worker on this host; True: ask again, its memory is on offer. False: never."""
    tensor = _find(created_on, local_id).tensor
    node, peer = current_runtime(), _caller()
    if node.pool is None or not isinstance(peer, RemotePeer) or peer.lending is None:
        return False
    found = node.pool.find(tensor.data_ptr(), tensor.nbytes)
    if found is None:
        return False
    return tensor.view(-1) if peer.lending.reaches(found[0]) else peer.lending.is_wanted


def lend_memory(created_on: int, local_id: int) -> tuple[Any, ...] | bool:
    """What opens the memory of a tensor on a device, and its event; by value goes what gets True, this time, or False.

    False: always.
    """
    shared, devices = _find(created_on, local_id), current_runtime().devices
    tensor, peer = shared.tensor, _caller()
    if devices is None or not tensor.is_cuda or peer.devices is None:
        return False
    if peer.devices.target(tensor.device, False) is None:
        return False  # no device map leads there
    device = tensor.get_device()
    if not peer.devices.shares(device):
        return True
    try:
        export = devices.api.export(devices.api.alias(tensor))
        with _making_events:
            if shared.settled is None:
                shared.settled = devices.api.make_event(device)
    except Exception as error:  # memory that the driver cannot share: of another allocator, say
        logger.info("a tensor on cuda:%d is shared by value: %s", device, error)
        return False
    event, handle = shared.settled
    event.record(current_stream(device))
    return device, export, int(tensor.storage_offset()), handle


def settle(created_on: int, local_id: int) -> bool:
    """Have the event of a tensor on a device stand for what calls have done to it so far."""
    shared = _find(created_on, local_id)
    if shared.settled is None:
        return False
    shared.settled[0].record(current_stream(shared.tensor.get_device()))
    return True


def read(created_on: int, local_id: int, region: Region) -> torch.Tensor:
    """A part of the tensor, by value."""
    part = part_of(_find(created_on, local_id).tensor, region).contiguous()
    return _sendable(part, _caller())


def write(created_on: int, local_id: int, region: Region, source: torch.Tensor) -> None:
    """Copy ``source`` into a part of the tensor."""
    shared = _find(created_on, local_id)
    if not shared.writable:
        raise RpcError(f"{current_runtime().info.name} shares this tensor read-only")
    shared.write(region, source)
