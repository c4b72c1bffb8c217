"""A shared tensor at its owner: the functions that `RemoteTensor` (`remote_tensor.py`) calls, and its shared memory.

`lend`, `lend_memory`, `settle`, `read` and `write` are ordinary functions, called by ordinary requests. None of them
runs user code. So the owner's I/O thread may run them (`runtime/calls/run_inline.py`), and they are allowed even where
a program restricts the functions that others may call (`serialize/allowance.py`).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from farcall.channel.device_api import current_stream
from farcall.errors import Delivery, ReferenceLost, RpcError
from farcall.rpc.owned_values import find_owned
from farcall.rpc.transfers import ExportedTensor
from farcall.runtime.calls.serving import asking_peer
from farcall.runtime.node import Runtime, current_runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.peers.shared_memory import SHARED_BYTES

logger: logging.Logger = logging.getLogger("farcall")

Region = tuple[tuple[int, int, int], ...]
"""Start, stop and step in each of the first dimensions; empty: the whole tensor."""
_ALONE = 2
"""The use count of a storage with a single tensor: one for the tensor, one for the object that asks for the count."""
_making_events = threading.Lock()


class SharedTensor:
    """A tensor at its owner, and whether others may write it. Mutable: ``settled``, made at the first loan.

    ``exported`` is set by `share`, before anybody else knows the tensor.
    """

    __slots__ = ("exported", "settled", "tensor", "writable")

    def __init__(self, tensor: torch.Tensor, writable: bool) -> None:
        self.tensor: torch.Tensor = tensor.detach()
        self.writable: bool = writable
        self.exported: ExportedTensor | None = None
        """Its memory, as the node's transfer engine has exported it."""
        self.settled: Any = None
        """On a device: the event that readers wait for, and its handle. It is recorded behind the work of calls."""


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The view of ``tensor`` that ``region`` selects."""
    return tensor[tuple(slice(*one) for one in region)] if region else tensor


def move_in(node: Runtime, tensor: torch.Tensor) -> str:
    """Move ``tensor`` into shared memory, unless it is there. Return the reason if that is impossible, else ""."""
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
    # A numpy array holds the tensor, not its storage, so the count misses it; but torch makes a storage that was given
    # to numpy not resizable.
    if count is None or count(storage._cdata) > _ALONE or not storage.resizable():
        return "a view, an array or another tensor shares its memory: make the tensor with farcall.shared_empty"
    moved = pool.empty(tensor.shape, tensor.dtype)
    if pool.find(moved.data_ptr(), moved.nbytes) is None:
        return "no more shared memory may be used"
    moved.copy_(tensor.detach())
    tensor.data = moved
    return ""


def _find(created_on: int, local_id: int) -> SharedTensor:
    found = find_owned(created_on, local_id).get()
    if not isinstance(found, SharedTensor):
        raise ReferenceLost(f"{current_runtime().info.name} shares no such tensor", Delivery.EXECUTED)
    return found


def sendable(tensor: torch.Tensor, peer: Peer) -> torch.Tensor:
    """``tensor``, moved to host memory unless a device map exists to or from ``peer``."""
    return tensor if peer.devices is not None else tensor.cpu()


def lend(created_on: int, local_id: int) -> torch.Tensor | bool:
    """The tensor itself, for a worker on this host. True: its memory is being offered, ask again. False: never."""
    tensor = _find(created_on, local_id).tensor
    node, peer = current_runtime(), asking_peer()
    if node.pool is None or not isinstance(peer, RemotePeer) or peer.lending is None:
        return False
    found = node.pool.find(tensor.data_ptr(), tensor.nbytes)
    if found is None:
        return False
    return tensor.view(-1) if peer.lending.reaches(found[0]) else peer.lending.is_wanted


def lend_memory(created_on: int, local_id: int) -> tuple[Any, ...] | bool:
    """The handles that open the device memory of a tensor and its event; or a bool: the tensor goes by value.

    True: by value this time. False: by value always.
    """
    shared, devices = _find(created_on, local_id), current_runtime().devices
    tensor, peer = shared.tensor, asking_peer()
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
    """Record the event of a tensor on a device behind the work of all calls so far; False: it has no event."""
    shared = _find(created_on, local_id)
    if shared.settled is None:
        return False
    shared.settled[0].record(current_stream(shared.tensor.get_device()))
    return True


def read(created_on: int, local_id: int, region: Region) -> torch.Tensor:
    """A part of the tensor, by value."""
    part = part_of(_find(created_on, local_id).tensor, region).contiguous()
    return sendable(part, asking_peer())


def write(created_on: int, local_id: int, region: Region, source: torch.Tensor) -> None:
    """Copy ``source`` into a part of the tensor."""
    shared = _find(created_on, local_id)
    if not shared.writable:
        raise RpcError(f"{current_runtime().info.name} shares this tensor read-only")
    with torch.no_grad():
        part_of(shared.tensor, region).copy_(source)
