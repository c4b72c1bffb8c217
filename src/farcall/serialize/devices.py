"""Tensors on devices, taken apart and rebuilt: CUDA tensors, and CPU tensors that a device map sends to a device.

Owns the table of such storages that follows a message's pickle. Copies are made when the pickle is complete, since only
then all views of a storage are known. The same table follows a flat payload (``flat.py``), where each storage has one
tensor that fills its only part. The peer's ``devices`` decide how the bytes travel: lent to the peer on the device (a
ticket), through the host as a buffer of the message, or inside the table.

    table:     for each storage: (target device, its parts by low byte)
    part:      (low byte, compact?, how, what)
    how, what: 0 ticket   1 the number of the buffer   2 the bytes

Invariant: each ticket of a table is either taken or dropped, exactly once, even if the message is never read
(`discard`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from farcall.errors import SerializationError
from farcall.serialize.allowance import loads
from farcall.serialize.bounds import check_layout, must_be_written_out, size_of
from farcall.serialize.context import (
    CURRENT,
    IN_BAND_LIMIT_BYTES,
    Decoding,
    Encoding,
    IfUnsent,
    current_decoding,
    seed,
)
from farcall.serialize.rebuild import CODES, CONJUGATE, DTYPES, NEGATIVE, REQUIRES_GRAD, _aligned, _dtype, _finish
from farcall.serialize.spans import View, compact_strides, memory_of, parts_of

DEVICES_FORM = ord("D")
_TICKET, _BUFFER, _BYTES = 0, 1, 2
_ALIGNMENT_BYTES = 64
_length = struct.Struct("<I")

_FORM = bytes([DEVICES_FORM])
_device = lru_cache(torch.device)
_name = lru_cache(str)

Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a contiguous tensor."""
Part = tuple[int, bool, int, Any]
DeviceTable = list[tuple[str, list[Part]]]
_Descriptor = tuple[Any, tuple[Any, ...]]


class PeerDevices(Protocol):
    """A peer's devices, as seen by messages to and from it. Peers without a device map have None instead."""

    def target(self, device: torch.device, is_request: bool) -> torch.device | None:
        """The peer's device for a tensor on ``device``; None if the map has no entry."""

    def place(
        self, source: torch.Tensor, size: int, target: torch.device, is_request: bool
    ) -> tuple[Any, ...] | bytearray | memoryview:
        """Lend the peer a copy of ``source`` (``size`` bytes), made on the current stream, and return its ticket; or
        return the bytes, to be sent through the host."""

    def take_back(self, ticket: tuple[Any, ...]) -> None:
        """Take lent blocks back: their message was not sent, or was lost on the way."""

    def take(self, ticket: Any, target: torch.device, form: Form | None = None) -> torch.Tensor:
        """Return the memory that the peer lent: as a tensor of ``form`` if it had to be copied, else as bytes."""

    def drop(self, ticket: Any) -> None:
        """Return lent blocks to the peer without reading them."""

    def to_device(self, source: memoryview, target: torch.device) -> torch.Tensor:
        """Copy bytes from the host to a device. The tensor may be longer than ``source``."""


class DeviceRecord:
    """A storage on a device, or bound for one, and the views of it met so far. Mutable: ``first`` and ``views``."""

    __slots__ = ("first", "index", "storage", "target", "views")

    def __init__(self, index: int, storage: torch.UntypedStorage, target: torch.device) -> None:
        self.index: int = index
        self.first: torch.Tensor | None = None  # if it stays the only view, it is copied as it is
        self.storage: torch.UntypedStorage = storage
        self.target: torch.device = target
        self.views: list[View] = []


class Beside:
    """What travels beside a flat payload, as an `Encoding` has it. Mutable: both lists grow."""

    __slots__ = ("buffers", "is_request", "undo")

    def __init__(self, buffers: Sequence[memoryview], is_request: bool) -> None:
        self.buffers: list[memoryview] = list(buffers)
        self.is_request: bool = is_request
        self.undo: list[Callable[[], None]] = []

    def on_failure(self, undo: Callable[[], None]) -> None:
        self.undo.append(undo)


# ---------------------------------------------------------------------- writing


def describe_on_device(tensor: torch.Tensor, encoding: Encoding, requires_grad: bool) -> _Descriptor:
    """Describe a strided tensor that is on a device, or goes to one."""
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        encoding.kept.append(tensor)
    dtype = tensor.dtype
    if must_be_written_out(tuple(tensor.shape), tensor.stride(), dtype.itemsize):
        tensor = tensor.contiguous()
        encoding.kept.append(tensor)
    flags = REQUIRES_GRAD if requires_grad else 0
    if tensor.is_neg():
        flags |= NEGATIVE
    if dtype.is_complex and tensor.is_conj():
        flags |= CONJUGATE
    storage = tensor.untyped_storage()
    known = encoding.storages.get(storage._cdata)
    if known is None:
        known = _new_record(tensor.device, storage, encoding)
    assert isinstance(known, DeviceRecord)
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    if 0 not in shape:
        low = offset * dtype.itemsize
        is_contiguous = tensor.is_contiguous()
        if is_contiguous:
            high = low + dtype.itemsize * tensor.numel()
        else:
            steps = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            high = low + dtype.itemsize * (1 + steps)
        if high > storage.nbytes():
            raise SerializationError(
                f"a tensor of shape {shape} needs {high} bytes of its storage, which has {storage.nbytes()}: "
                "was the storage resized?"
            )
        if is_contiguous and not known.views and not flags & ~REQUIRES_GRAD and low % _ALIGNMENT_BYTES == 0:
            known.first = tensor
        known.views.append((low, high, dtype, shape, strides, offset))
    return rebuild_on_device, (known.index, CODES[dtype], shape, strides, offset, flags)


def _new_record(device: torch.device, storage: torch.UntypedStorage, encoding: Encoding) -> DeviceRecord:
    devices: PeerDevices | None = getattr(encoding.peer, "devices", None)
    target = None if devices is None else devices.target(device, encoding.is_request)
    if target is None:
        raise SerializationError(_no_map(device, encoding))
    if encoding.device_records is None:
        encoding.device_records = []
    record = DeviceRecord(len(encoding.device_records), storage, target)
    encoding.device_records.append(record)
    encoding.storages[storage._cdata] = record
    return record


def _no_map(device: torch.device, encoding: Encoding) -> str:
    info = getattr(encoding.peer, "info", None)
    name = "the peer" if info is None else info.name
    if encoding.is_request:
        # Programs written for torch.distributed.rpc match the text in parentheses, which is torch's own.
        return (
            f"no device map says where a tensor on {device} goes on {name}: give the options device_maps, or send "
            "tensor.cpu(). (TensorPipe RPC backend only supports CPU tensors by default, please move your tensors "
            "to CPU before sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to "
            "explicitly configure device mapping.)"
        )
    return (
        f"Response device mapping is not available for a tensor on {device}: {name} has no device map to this worker "
        f"that leads to {device}. Give its options device_maps, or return tensor.cpu()"
    )


def write_device_table(encoding: Encoding) -> bytes:
    """Copy the memory of all records and return their table. Parts that travel as buffers are added to ``encoding``."""
    devices: PeerDevices = encoding.peer.devices
    table: DeviceTable = []
    assert encoding.device_records is not None
    for record in encoding.device_records:
        views = record.views
        if record.first is not None and len(views) == 1 and not record.first.is_cpu:
            low, high = views[0][:2]
            source = record.first.detach() if record.first.requires_grad else record.first
            parts = [_place(encoding, devices, record.target, source, low, high - low, True)]
        else:
            pieces = parts_of(views) if views else []
            parts = [_write_part(encoding, devices, record, *piece) for piece in pieces]
        table.append((_name(record.target), parts))
    return _packed(table)


def write_flat_table(tensors: list[torch.Tensor], beside: Beside, devices: PeerDevices) -> bytes | None:
    """Copy the plain tensors of a flat payload and return their table. None: pickle must do it, or say what is wrong.

    Parts that travel as buffers are added to ``beside``.
    """
    table: DeviceTable = []
    try:
        for tensor in tensors:
            target = devices.target(tensor.device, beside.is_request)
            if target is None:
                break
            source = tensor.detach() if tensor.requires_grad else tensor
            size = source.numel() * source.itemsize
            table.append((_name(target), [_place(beside, devices, target, source, 0, size, True)] if size else []))
        else:
            return _packed(table)
    except Exception:
        pass
    except BaseException:
        _take_back(beside)
        raise
    _take_back(beside)
    return None


def _take_back(beside: Beside) -> None:
    for undo in reversed(beside.undo):
        undo()


def _packed(table: DeviceTable) -> bytes:
    written = pickle.dumps(table, 5)
    return b"".join((written, _length.pack(len(written)), _FORM))


def _write_part(
    encoding: Encoding, devices: PeerDevices, record: DeviceRecord, low: int, high: int, view: View | None
) -> Part:
    storage = record.storage
    on_cpu = storage.device.type == "cpu"
    if view is None:
        low -= low % _ALIGNMENT_BYTES
        if on_cpu:
            return _write_memory(encoding, low, False, memory_of(storage, low, high))
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))
        return _place(encoding, devices, record.target, source, low, high - low, False)
    _, _, dtype, shape, strides, offset = view
    shape = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
    source = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
    size = source.numel() * dtype.itemsize
    if not on_cpu:
        return _place(encoding, devices, record.target, source, low, size, True)
    source = source.contiguous()
    begin = int(source.storage_offset()) * dtype.itemsize
    return _write_memory(encoding, low, True, memory_of(source.untyped_storage(), begin, begin + size))


def _place(
    encoding: Encoding | Beside,
    devices: PeerDevices,
    target: torch.device,
    source: torch.Tensor,
    low: int,
    size: int,
    compact: bool,
) -> Part:
    """Let the peer's devices copy a tensor that records no gradient."""
    placed = devices.place(source, size, target, encoding.is_request)
    if not isinstance(placed, tuple):
        return _write_memory(encoding, low, compact, placed)
    encoding.on_failure(IfUnsent(partial(devices.take_back, placed)))
    return low, compact, _TICKET, tuple(placed)


def _write_memory(encoding: Encoding | Beside, low: int, compact: bool, memory: bytearray | memoryview) -> Part:
    if len(memory) <= IN_BAND_LIMIT_BYTES:
        return low, compact, _BYTES, memory if isinstance(memory, bytearray) else bytearray(memory)
    encoding.buffers.append(memoryview(memory))
    return low, compact, _BUFFER, len(encoding.buffers) - 1


# ---------------------------------------------------------------------- reading


def read_device_table(payload: bytes | memoryview) -> tuple[DeviceTable, bytes | memoryview]:
    """Split a payload into its device table and the rest."""
    end = len(payload) - 1 - _length.size
    rest = before_table(payload)
    table: DeviceTable = loads(payload[len(rest) : end])
    parts = [part for _, parts in table for part in parts]
    buffers = [what for _, _, how, what in parts if how == _BUFFER]
    # Each part is copied: none may come twice.
    inline_bytes = sum(len(what) for _, _, how, what in parts if how == _BYTES)
    if len(set(buffers)) < len(buffers) or inline_bytes > len(payload):
        raise SerializationError("the message is malformed: two tensors on devices bring the same bytes")
    return table, rest


def before_table(payload: bytes | memoryview) -> memoryview:
    """The part of a payload before its device table; empty if the table is longer than the payload."""
    end = len(payload) - 1 - _length.size
    begin = end - _length.unpack_from(payload, end)[0] if end >= 0 else 0
    return memoryview(payload)[: max(begin, 0)]


def rebuild_in_order(decoding: Decoding) -> Callable[[int, tuple[int, ...]], torch.Tensor]:
    """For `read_flat`: each call returns the tensor of the table's next storage, of that dtype and shape."""
    assert decoding.devices is not None
    entries = iter(decoding.devices)

    def rebuild(code: int, shape: tuple[int, ...]) -> torch.Tensor:
        name, parts = next(entries, ("", []))
        dtype = DTYPES[code]
        size = size_of(shape, dtype.itemsize)
        if not name or bool(parts) != bool(size):
            raise SerializationError("the message describes a tensor on a device, and did not bring it")
        if not size:
            return torch.empty(shape, dtype=dtype, device=name)
        memory = _read_part(decoding, _device(name), parts, 0, (shape, dtype))
        if memory.dtype is dtype and memory.shape == shape:
            return memory
        return _view_on_device(memory, dtype, shape, compact_strides(shape, (1,) * len(shape)), 0)

    return rebuild


def drop_tickets(table: DeviceTable, peer: Any) -> None:
    """Give back the blocks that were lent for a message and not taken. Idempotent: the table is emptied."""
    for _, parts in table:
        for _, _, how, what in parts:
            if how == _TICKET:
                peer.devices.drop(what)
        parts.clear()


def has_devices(payload: bytes | memoryview) -> bool:
    """Does a message contain tensors on devices?"""
    return len(payload) > 0 and payload[-1] == DEVICES_FORM


def discard(payload: bytes | memoryview, peer: Any) -> None:
    """Give back the blocks that were lent for a message that nobody will read."""
    if has_devices(payload) and getattr(peer, "devices", None) is not None:
        drop_tickets(read_device_table(payload)[0], peer)


def withdraw_lent(payload: bytes | memoryview, peer: Any) -> None:
    """Take back the blocks that this node lent for a message that never arrived."""
    for _, parts in read_device_table(payload)[0]:
        for _, _, how, what in parts:
            if how == _TICKET:
                peer.devices.take_back(what)


@seed
def rebuild_on_device(
    index: int, code: int | str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, flags: int
) -> torch.Tensor:
    """Rebuild a view of a storage of the device table."""
    decoding = CURRENT.decoding or current_decoding()
    if decoding.devices is None:
        raise SerializationError("the message describes a tensor on a device, and brought none")
    name, parts = decoding.devices[index]
    dtype = DTYPES.get(code) or _dtype(code)
    if size_of(shape, dtype.itemsize) == 0:
        check_layout(shape, strides, 0, dtype.itemsize, 0)
        empty = torch.empty(0, dtype=dtype, device=name).as_strided_(shape, strides)
        return _finish(decoding, empty, flags)
    low = offset * dtype.itemsize
    number = len(parts) - 1
    while number >= 0 and parts[number][0] > low:
        number -= 1
    if number < 0:
        raise SerializationError("the message describes a tensor outside the memory it brought")
    part_low, compact, _, _ = parts[number]
    if compact:
        strides, offset = compact_strides(shape, strides), 0
    else:
        offset -= part_low // dtype.itemsize
    key = ("device", index, number)
    memory = decoding.storages.get(key)
    if memory is None:
        # The usual tensor fills its part in row-major order: build it directly, not as bytes with a view on top.
        form = (shape, dtype) if compact and 0 not in strides else None
        memory = decoding.storages[key] = _read_part(decoding, _device(name), parts, number, form)
        if form is not None and memory.dtype is dtype and memory.shape == shape and memory.stride() == strides:
            return _finish(decoding, memory, flags)
    return _finish(decoding, _view_on_device(memory, dtype, shape, strides, offset), flags)


def _view_on_device(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    check_layout(shape, strides, offset, dtype.itemsize, memory.numel() * memory.itemsize)
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, shape, strides)


def _read_part(
    decoding: Decoding, target: torch.device, parts: list[Part], number: int, form: Form | None
) -> torch.Tensor:
    low, compact, how, what = parts[number]
    devices: PeerDevices = decoding.peer.devices
    if how == _TICKET:
        # Before ``take``: even if that fails, `drop_tickets` must not drop the ticket again.
        parts[number] = (low, compact, _BYTES, b"")
        return devices.take(what, target, form)
    memory = memoryview(what) if how == _BYTES else decoding.buffers[what]
    if target.type != "cpu":
        return devices.to_device(memory, target)[: memory.nbytes]  # it may be longer, with bytes of others behind these
    return _aligned(torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8))
