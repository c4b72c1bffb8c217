"""`share` and `RemoteTensor`: a tensor that stays at its owner, while other workers read and write parts of it.

A `RemoteTensor` is a reference (`rref.py`) to a `SharedTensor`: the owner keeps the tensor as long as a reference to it
exists, it travels where references travel, and it is lost with its owner.

    the reader is            the tensor is       bytes move by
    the owner itself         anywhere            one copy
    on the owner's host      in shared memory    one copy, out of mapped memory: the owner does nothing
    on the owner's host,     on a device         one copy on the device, from 1 MiB, out of memory that it has opened;
    with a device map                            the owner says what must be done first (`settle`)
    anywhere else, with      in host memory      a transfer of the engine, from 1 MiB: the owner's program does nothing
    the owner's engine                           (`transfers.py`); if that fails, as in the next line
    anywhere else            anywhere            a call of `read` or `write`, which its owner answers; of a device's
                                                 memory, as a device map says, and else through the host's

The owner's side is `shared_tensor.py`. Reads are not atomic: a reader that copies while another worker writes gets old
and new bytes. For consistent versions use `farcall.weights`.

Over 400 lines: the ways of one read or write, each of which falls back to the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch

from farcall.channel.device_api import DeviceApi, current_stream
from farcall.channel.transfer_engine import Ranges
from farcall.destructors import destructor
from farcall.errors import RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.backoff import Backoff
from farcall.rpc.call import encode_request
from farcall.rpc.owner_calls import ask
from farcall.rpc.rref import RRef
from farcall.rpc.shared_tensor import (
    Region,
    SharedTensor,
    lend,
    lend_memory,
    move_in,
    part_of,
    read,
    sendable,
    settle,
    write,
)
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.rpc.transfers import OpenedTensor, Transfers, ranges_of
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize.bounds import check_layout

logger: logging.Logger = logging.getLogger("farcall")

Slices = slice | Sequence[slice] | None
_WORTH_OPENING_BYTES = 1 << 20
"""Smaller tensors go faster by value: a reader of the owner's memory must wait for its copy to end."""
_FIRST_LOOK_S, _LAST_LOOK_S = 20e-6, 1e-3
"""The first and the longest pause between two polls of the owner's event."""
_MOMENT_S = 1e-3
_MOST_OFFERS = 4
"""How often a reader asks for memory that it has not mapped yet, before it asks for the bytes instead."""


def region_of(slices: Slices, shape: Sequence[int]) -> Region:
    """``slices`` of a tensor of that shape, as numbers; raises if they do not fit."""
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


class _Limit:
    """The timeout of one read or write, for all of its steps together."""

    __slots__ = ("_seconds", "_timeout", "deadline")

    def __init__(self, timeout: float | None, default_s: float) -> None:
        self._timeout = timeout
        self._seconds = (default_s if timeout is UNSET_TIMEOUT else check_timeout(timeout)) or NEVER
        self.deadline: float = monotonic() + self._seconds

    def left(self) -> float | None:
        """The timeout of the next call to the owner; the given one, as errors tell it, if no time has passed."""
        left_s = self.deadline - monotonic()
        if self.deadline == NEVER or left_s > self._seconds - _MOMENT_S:
            return self._timeout
        return max(left_s, _MOMENT_S)  # no seconds at all would mean no limit


class _OpenedMemory:
    """Device memory of an owner, opened by a reader. When the owner leaves, the link closes it: ``tensor`` is None."""

    __slots__ = ("__weakref__", "event", "tensor")

    def __init__(self, tensor: torch.Tensor, event: Any) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.event = event

    def close(self) -> None:
        self.tensor = None


class _InUse:
    """A reference that a transfer uses: as long as this lives, the node does not give it up, even when it leaves.

    Otherwise the owner would free memory that the transfer may still read. Of a member that has left, the owner knows
    that its transfers may go on (`transfers.py`).
    """

    __slots__ = ("_rref",)

    def __init__(self, rref: RRef[SharedTensor]) -> None:
        self._rref = rref
        rref._references.in_use[id(self)] = rref._fork.fork_id

    @destructor
    def __del__(self) -> None:
        self._rref._references.in_use.pop(id(self), None)


class RemoteTensor:
    """A tensor of another worker, to read and write in place, without a user function that runs there.

    Made by `share`. It can be sent to any worker, as an argument or a result. The owner keeps the tensor as long as any
    worker holds a `RemoteTensor` of it. Once the owner is gone, every use raises `ReferenceLost` with the owner's name.
    """

    __slots__ = (
        "_exported",
        "_mappable",
        "_mapped",
        "_openable",
        "_opened",
        "_rref",
        "_transferable",
        "dtype",
        "shape",
        "writable",
    )

    def __init__(
        self,
        rref: RRef[SharedTensor],
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        writable: bool,
        mappable: bool,
        exported: tuple[str, bytes] | None = None,
    ) -> None:
        """For `share`, and for workers that receive a `RemoteTensor`."""
        # Mutable: the owner's memory once it is mapped or opened, and whether that is worth another attempt.
        self._rref = rref
        self._exported = exported  # the owner's transfer engine, and its description of the memory
        self._transferable: OpenedTensor | bool = exported is not None
        self._mapped: torch.Tensor | None = None
        self._opened: _OpenedMemory | None = None
        self._openable = True  # until the owner says otherwise
        self._mappable = mappable
        self.shape: torch.Size = torch.Size(shape)
        """The shape of the owner's tensor."""
        self.dtype: torch.dtype = dtype
        """Its dtype; `read_into` and `write_from` convert."""
        self.writable: bool = writable
        """May other workers write it?"""

    def __repr__(self) -> str:
        return f"<RemoteTensor {tuple(self.shape)} {self.dtype} of {self.owner.name!r}>"

    def __reduce__(self) -> Any:
        return _arrived, (self._rref, tuple(self.shape), self.dtype, self.writable, self._mappable, self._exported)

    @property
    def owner(self) -> WorkerInfo:
        """The worker that owns the tensor."""
        return self._rref.owner()

    @property
    def in_shared_memory(self) -> bool:
        """Is the owner's tensor in memory that workers of its host can map?"""
        return self._mappable

    @property
    def is_mapped(self) -> bool:
        """Has this worker mapped the owner's memory, so that it reads and writes without the owner?"""
        return self._mapped is not None

    def read_into(
        self, target: torch.Tensor, slices: Slices = None, timeout: float | None = UNSET_TIMEOUT
    ) -> torch.Tensor:
        """Copy the present values of the owner's tensor into ``target``, and return ``target``.

        Args:
            target: a tensor with the shape of the part that is read, of any dtype and on any device.
            slices: one slice of the owner's tensor for each dimension (the last ones may be left out).
            timeout: seconds; None for no limit; by default that of the options.
        """
        region = region_of(slices, self.shape)
        self._check_shape(target, region, "read into")
        limit = _Limit(timeout, self._rref._references.node.timeout_s)
        with torch.no_grad():
            memory = self._memory(limit)
            if memory is not None:
                target.copy_(part_of(memory, region))
                self._check_owner()  # mapped memory outlives a dead owner, but is no longer its tensor
            elif (opened := self._open(target, limit)) is not None:
                target.copy_(part_of(opened, region), non_blocking=True)
                self._finish(opened)
            else:
                target.copy_(self._receive(region, target.shape, limit))
        return target

    def write_from(self, source: torch.Tensor, slices: Slices = None, timeout: float | None = UNSET_TIMEOUT) -> None:
        """Copy ``source`` into the owner's tensor; the values have arrived when this returns.

        The owner must have called ``share(tensor, writable=True)``. The arguments are those of `read_into`.
        """
        if not self.writable:
            raise RpcError(f"{self!r} is read-only: its owner shares it without writable=True")
        region = region_of(slices, self.shape)
        self._check_shape(source, region, "write")
        limit = _Limit(timeout, self._rref._references.node.timeout_s)
        memory = self._memory(limit)
        if memory is not None:
            with torch.no_grad():
                part_of(memory, region).copy_(source)
            self._check_owner()
        elif (opened := self._open(source, limit)) is not None:
            with torch.no_grad():
                part_of(opened, region).copy_(source, non_blocking=True)
            self._finish(opened)
        else:
            self._send(region, source.detach(), limit)

    # ------------------------------------------------------------------ inside

    def _memory(self, limit: _Limit) -> torch.Tensor | None:
        """The owner's tensor itself, if this process owns it or can map it; None: the bytes must be sent."""
        if self._rref.is_owner():
            return self._rref.local_value().tensor
        self._check_owner()
        if self._mapped is not None or not self._mappable:
            return self._mapped
        peer = self._rref._references.peer(self._rref)
        if not isinstance(peer, RemotePeer) or peer.segments is None:
            return None
        for _ in range(_MOST_OFFERS):
            with torch.inference_mode(False):  # an inference tensor could not be written later, outside that mode
                lent: torch.Tensor | bool = self._ask(lend, (), limit)
            if isinstance(lent, torch.Tensor):
                # If the connection broke between the owner's check and its answer, this is a copy, not the memory.
                if peer.segments.holds(lent.data_ptr()):
                    self._mapped = lent.view(self.shape)
                    return self._mapped
            elif not lent:
                self._mappable = False
                break
        return None

    def _receive(self, region: Region, shape: torch.Size, limit: _Limit) -> torch.Tensor:
        """A part of the tensor, by the transfer engine or by a call."""
        way = self._way(region)
        if way is not None:
            # Not the program's own tensor: after a timeout a transfer may go on writing.
            received = torch.empty(shape, dtype=self.dtype, device="cpu")
            if self._transfer(*way, received, limit.deadline, write=False):
                return received
        part: torch.Tensor = self._ask(read, (region,), limit)
        return part

    def _send(self, region: Region, source: torch.Tensor, limit: _Limit) -> None:
        """Write a part of the tensor, by the transfer engine or by a call."""
        way = self._way(region)
        if way is not None:
            # A copy: after a timeout the program may change its tensor, and a transfer go on reading.
            copied = torch.empty(source.shape, dtype=self.dtype, device="cpu").copy_(source)
            if self._transfer(*way, copied, limit.deadline, write=True):
                return
        peer = self._rref._references.peer(self._rref)
        self._ask(write, (region, sendable(source.to(self.dtype), peer)), limit)

    def _way(self, region: Region) -> tuple[OpenedTensor, Ranges] | None:
        """The owner's memory, opened by the transfer engine, and the bytes of a part; None: by a call."""
        opened = self._transferable
        if self._exported is None or not opened:
            return None
        name, description = self._exported
        transfers = self._rref._references.node.part(Transfers)
        ranges = ranges_of(region, self.shape, self.dtype.itemsize) if transfers.name == name else None
        if ranges is None:
            return None
        if opened is True:
            opened = self._transferable = transfers.open(description) or False
        return (opened, ranges) if isinstance(opened, OpenedTensor) else None

    def _transfer(
        self, opened: OpenedTensor, ranges: Ranges, local: torch.Tensor, deadline: float, *, write: bool
    ) -> bool:
        """Copy between ``local`` and the owner's tensor; False: the engine has failed, and is not used again."""
        transfers = self._rref._references.node.part(Transfers)
        check, kept = self._check_owner, _InUse(self._rref)
        done = transfers.copy(opened, local, ranges, write=write, deadline=deadline, keeps=kept, check=check)
        if not done:
            self._transferable = False
        self._check_owner()
        return done

    def _open(self, local: torch.Tensor, limit: _Limit) -> torch.Tensor | None:
        """The owner's tensor on a device, for a copy from or to ``local`` on the current stream; None: go by value."""
        if not self._openable or not local.is_cuda or local.nbytes < _WORTH_OPENING_BYTES:
            return None
        peer = self._rref._references.peer(self._rref)
        node = current_runtime()
        if peer.devices is None or node.devices is None:
            return None
        opened = self._opened
        if opened is None or opened.tensor is None:
            opened = self._opened = self._open_first(peer, node.devices.api, limit)
            if opened is None:
                return None
        elif not self._ask(settle, (), limit):
            return None
        self._wait_for(opened.event, limit)
        return opened.tensor

    def _wait_for(self, event: Any, limit: _Limit) -> None:
        """Wait until the owner's earlier work is done. Poll, since a stream could wait for a dead owner for ever."""
        pauses = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        while not event.query():
            self._check_owner()
            if monotonic() >= limit.deadline:
                raise RpcTimeout(f"{self!r}: work on the owner's device is not done in time")
            time.sleep(pauses.next_s())

    def _open_first(self, peer: Peer, api: DeviceApi, limit: _Limit) -> _OpenedMemory | None:
        lent: tuple[Any, ...] | bool = self._ask(lend_memory, (), limit)
        if isinstance(lent, bool):
            self._openable = lent
            return None
        number, export, offset, handle = lent
        device = peer.devices.here(number)
        if device is None:
            return None
        try:
            with torch.inference_mode(False):  # as in `_memory`
                storage = api.open(export, device).untyped_storage()
                tensor = torch.empty(0, dtype=self.dtype, device=torch.device("cuda", device))
                strides = torch.empty(self.shape, device="meta").stride()
                check_layout(tuple(self.shape), strides, offset, self.dtype.itemsize, storage.nbytes())
                tensor.set_(storage, offset, self.shape, strides)
            opened = _OpenedMemory(tensor, api.open_event(handle, device))
        except Exception as error:  # the driver raises errors of many types
            logger.info("memory of %s is not opened, its tensors come by value: %s", peer.info.name, error)
            return None
        return opened if peer.devices.borrow(opened) else None

    def _finish(self, opened: torch.Tensor) -> None:
        """Wait for the copy: once this worker goes on, the owner may write to its tensor, or free it."""
        current_stream(opened.get_device()).synchronize()
        self._check_owner()

    def _check_owner(self) -> None:
        if not self._rref.is_owner():
            self._rref._references.peer(self._rref)  # raises if the owner is gone

    def _check_shape(self, tensor: torch.Tensor, region: Region, what: str) -> None:
        sizes = [len(range(*one)) for one in region]
        shape = (*sizes, *self.shape[len(sizes) :])
        if tuple(tensor.shape) != shape:
            raise ValueError(f"cannot {what} a tensor of shape {tuple(tensor.shape)}: the part asked for has {shape}")

    def _ask(self, function: Any, arguments: tuple[Any, ...], limit: _Limit) -> Any:
        ref = self._rref._fork.ref
        peer = self._rref._references.peer(self._rref)
        frame = encode_request(peer, function, (ref.created_on, ref.local_id, *arguments), None)
        return ask(self._rref, peer, function, frame, limit.left())


def _arrived(
    rref: RRef[SharedTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    writable: bool,
    mappable: bool,
    exported: tuple[str, bytes] | None,
) -> RemoteTensor:
    return RemoteTensor(rref, shape, dtype=dtype, writable=writable, mappable=mappable, exported=exported)


def share(tensor: torch.Tensor, writable: bool = False) -> RemoteTensor:
    """Let other workers read ``tensor`` in place, and with ``writable`` write it; send them the result.

    From 64 KiB on the tensor is moved into shared memory once, so that workers on this host can map it (a tensor of
    `shared_empty` is there already). The tensor object stays the same, its ``data_ptr()`` does not. A tensor whose
    memory has other users (a view, a tensor with views, a numpy array) stays where it is, and its bytes are sent;
    ``in_shared_memory`` of the result says which of the two applies.

    Args:
        tensor: a contiguous tensor; parameters may be shared, too. No gradient flows.
        writable: may other workers write it?
    """
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor can be shared: share(tensor.contiguous()), and read slices of it")
    node = current_runtime()
    why_not = move_in(node, tensor)
    if why_not:
        logger.debug("%s shares a tensor of %d bytes that nobody can map: %s", node.info.name, tensor.nbytes, why_not)
    shared = SharedTensor(tensor, writable)
    transfers = node.part(Transfers)
    shared.exported = transfers.export(shared.tensor)
    exported = None if shared.exported is None else (transfers.name or "", shared.exported.description)
    return RemoteTensor(
        RRef(shared),
        tensor.shape,
        dtype=tensor.dtype,
        writable=writable,
        mappable=not why_not,
        exported=exported,
    )
