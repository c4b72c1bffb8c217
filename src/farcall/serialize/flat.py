"""The flat form of a payload: plain values and plain tensors, as most calls carry, without pickle.

``_speedups.c`` is a compiled copy of this code, used if it could be built and torch supports DLPack's exchange API;
``FARCALL_SPEEDUPS=0`` switches it off. Every member reads this form; members without the compiled code write pickles.

    description  data  u32  "F"      the length of the description, and the mark of the form

    N T F              None, True, False
    i i64   f f64      numbers
    s u32 utf-8   b u32 bytes
    B                  bytes, OUT_OF_BAND_BYTES or more: the next buffer of the message
    ( u32 items   [ u32 items   { u32 keys and values     tuple, list, dict; keys are texts and integers
    t u8 u8 u8 i64*n   tensor: dtype (``rebuild.py``), 1 if it requires a gradient, number of dimensions, shape;
                       its elements are the next ones in ``data``, row by row
    o u8 u8 u8 i64*n   the same of OUT_OF_BAND_BYTES or more: its elements are the next buffer of the message
    d u8 u8 u8 i64*n   the same on a device: its elements are the next storage of the table in ``devices.py``
    r u32              a tensor that came before: its number among the tensors of the message, from 0
    n                  a reference: the next one in the notes of the message

All integers are little-endian. `write_flat` returns None for a value that does not fit: a subclass, another class, a
tensor with strides or attributes, and a container, reference, storage or large ``bytes`` met twice,
whose identity only pickle keeps. It does not know frames. Invariant: a reader compares every length with the bytes that
are left. (Writer and reader share a file because they are read side by side, and beside their C copies.)
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.serialize.bounds import size_of
from farcall.serialize.rebuild import CODES, DTYPES
from farcall.serialize.spans import copy_of, memory_of

FLAT = ord("F")
OUT_OF_BAND_BYTES = 64 * 1024
"""From this size on, a tensor's elements are a buffer of the message, which may travel through shared memory."""

_VERSION = 5
"""The version of the format that ``_speedups.c`` and this file share: a library with another version is not used."""
_MOST_DEPTH = 32
_MOST_DIMENSIONS = 64
_MOST_TEXT_BYTES = 1 << 16
_MOST_BYTES = (1 << 32) - 1
_REQUIRES_GRAD = 1
_MOST_CODE = 11
"""The form supports the first dtypes of ``rebuild.py``, up to this code."""

_count = struct.Struct("<cI")
_integer = struct.Struct("<cq")
_real = struct.Struct("<cd")
_tensor = struct.Struct("<cBBB")
_end = struct.Struct("<IB")

Written = tuple[bytes, list[memoryview] | tuple[()]]
Tensors = list[torch.Tensor] | None
References = list[Any] | None
OnDevice = Callable[[int, tuple[int, ...]], torch.Tensor] | None


class _NotFlat(Exception):
    """The value does not fit the flat form: pickle must write it."""


class _Writer:
    """One value being written. Mutable: the lists, ``seen`` and ``numbers`` grow."""

    __slots__ = (
        "buffers",
        "data",
        "kept",
        "most_text_bytes",
        "numbers",
        "on_devices",
        "out_of_band_bytes",
        "reference_class",
        "references",
        "seen",
        "tensors",
        "text",
    )

    def __init__(
        self,
        tensors: Tensors,
        out_of_band_bytes: int,
        most_text_bytes: int = _MOST_TEXT_BYTES,
        reference_class: type[Any] | None = None,
        references: References = None,
        on_devices: Tensors = None,
    ) -> None:
        self.on_devices = on_devices
        self.most_text_bytes = most_text_bytes
        self.out_of_band_bytes = out_of_band_bytes
        self.reference_class = reference_class
        self.references = references
        self.text: list[bytes] = []
        self.data: list[bytearray] = []
        self.buffers: list[memoryview] = []
        self.seen: set[int] = set()
        self.kept: list[object] = []  # ``seen`` and ``numbers`` go by address: no address may be reused
        self.numbers: dict[int, int] = {}  # the tensors' numbers, by address
        self.tensors = tensors

    def write(self, value: Any, depth: int = 0) -> None:
        kind = value.__class__
        text = self.text
        if value is None:
            text.append(b"N")
        elif kind is bool:
            text.append(b"T" if value else b"F")
        elif kind is torch.Tensor:
            self._write_tensor(value)
        elif kind is int:
            if not -(1 << 63) <= value < 1 << 63:
                raise _NotFlat
            text.append(_integer.pack(b"i", value))
        elif kind is float:
            text.append(_real.pack(b"f", value))
        elif kind is bytes and len(value) >= self.out_of_band_bytes:
            self._meet(value)
            text.append(b"B")
            self.buffers.append(memoryview(value))
        elif kind is str or kind is bytes:
            content = value if kind is bytes else value.encode()
            if len(content) > self.most_text_bytes:
                raise _NotFlat
            text += (_count.pack(b"b" if kind is bytes else b"s", len(content)), content)
        elif kind is self.reference_class and self.references is not None:
            self._meet(value)
            text.append(b"n")
            self.references.append(value)
        elif depth == _MOST_DEPTH:
            raise _NotFlat
        elif kind is tuple:
            text.append(_count.pack(b"(", len(value)))
            for item in value:
                self.write(item, depth + 1)
        elif kind is list:
            self._meet(value)
            text.append(_count.pack(b"[", len(value)))
            for item in value:
                self.write(item, depth + 1)
        elif kind is dict:
            self._meet(value)
            text.append(_count.pack(b"{", len(value)))
            for key, item in value.items():
                if key.__class__ is not str and key.__class__ is not int:
                    raise _NotFlat
                self.write(key, depth + 1)
                self.write(item, depth + 1)
        else:
            raise _NotFlat

    def _meet(self, value: Any) -> None:
        if id(value) in self.seen:
            raise _NotFlat
        self.seen.add(id(value))

    def _write_tensor(self, tensor: torch.Tensor) -> None:
        number = self.numbers.get(id(tensor))
        if number is not None:
            self.text.append(_count.pack(b"r", number))
            return
        self.numbers[id(tensor)] = len(self.numbers)
        self.kept.append(tensor)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_neg() or tensor.is_nested:
            raise _NotFlat
        on_devices = None if tensor.is_cpu else self.on_devices
        if on_devices is None and not tensor.is_cpu:
            raise _NotFlat
        dtype = tensor.dtype
        code = CODES.get(dtype)
        if not isinstance(code, int) or code > _MOST_CODE or (dtype.is_complex and tensor.is_conj()):
            raise _NotFlat
        if tensor.__dict__:
            raise _NotFlat
        shape = tuple(tensor.shape)
        if len(shape) > _MOST_DIMENSIONS or tensor.stride() != _row_major(shape):
            raise _NotFlat
        try:
            size = size_of(shape, dtype.itemsize)
        except ValueError:
            raise _NotFlat from None  # an empty tensor, whose shape no reader takes
        is_large = size >= self.out_of_band_bytes
        tag = b"d" if on_devices is not None else b"o" if is_large else b"t"
        self.text += (
            _tensor.pack(tag, code, tensor.requires_grad, len(shape)),
            struct.pack(f"<{len(shape)}q", *shape),
        )
        if self.tensors is not None:
            self.tensors.append(tensor)
        if on_devices is not None:
            on_devices.append(tensor)
        if not size:
            return
        storage = tensor.untyped_storage()
        self._meet(storage)
        self.kept.append(storage)
        low = int(tensor.storage_offset()) * dtype.itemsize
        if low + size > storage.nbytes() or not storage.data_ptr():
            raise _NotFlat  # the storage was shrunk, or holds torch's lazy zeros
        if on_devices is not None:
            return
        if is_large:
            self.buffers.append(memory_of(storage, low, low + size))
        else:
            self.data.append(copy_of(storage.data_ptr() + low, size))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def write_in_python(
    value: Any,
    tensors: Tensors,
    out_of_band_bytes: int,
    reference_class: type[Any] | None = None,
    references: References = None,
    on_devices: Tensors = None,
) -> Written | None:
    """See `write_flat`."""
    writer = _Writer(tensors, out_of_band_bytes, _MOST_TEXT_BYTES, reference_class, references, on_devices)
    try:
        writer.write(value)
    except (_NotFlat, RuntimeError, UnicodeEncodeError):  # RuntimeError: torch has no address for this tensor
        return None
    return _joined(writer)


def _joined(writer: _Writer) -> Written:
    text = b"".join(writer.text)
    payload = b"".join((text, *writer.data, _end.pack(len(text), FLAT)))
    return payload, writer.buffers or ()


def write_copied(value: Any, tensors: Tensors, out_of_band_bytes: int) -> Written:
    """Like `write_flat`, for readers that accept no pickles: a value met twice is copied twice.

    Raises ``TypeError``, which names the part that does not fit.
    """
    writer = _Writer(tensors, out_of_band_bytes, _MOST_BYTES)
    try:
        writer.write(_copied(value, 0))
    except (_NotFlat, RuntimeError, UnicodeEncodeError) as error:
        raise TypeError(f"a value cannot be sent without pickle ({type(error).__name__})") from error
    return _joined(writer)


def _copied(value: Any, depth: int) -> Any:
    """Copy ``value`` so that no part occurs twice and all tensors are row-major."""
    kind = value.__class__
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return value
    if depth < _MOST_DEPTH:
        if kind is tuple or kind is list:
            return kind(_copied(item, depth + 1) for item in value)
        if kind is dict and all(key.__class__ is str or key.__class__ is int for key in value):
            return {_copied(key, depth + 1): _copied(item, depth + 1) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.is_cpu and value.layout is torch.strided:
        plain = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if isinstance(code := CODES.get(plain.dtype), int) and code <= _MOST_CODE:
            return plain.clone(memory_format=torch.contiguous_format)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent without pickle: numbers of 64 bits, texts, bytes, "
        "tuples, lists, dicts with texts and numbers as keys, and CPU tensors can"
    )


class _Reader:
    """One payload being read. Mutable: the four positions, and the list of tensors ``made``."""

    __slots__ = (
        "buffers",
        "data_at",
        "data_end",
        "made",
        "next_buffer",
        "next_reference",
        "on_device",
        "payload",
        "references",
        "tensors",
        "text_at",
        "text_end",
    )

    def __init__(
        self,
        payload: memoryview,
        buffers: Sequence[memoryview],
        tensors: Tensors,
        references: Sequence[Any],
        on_device: OnDevice,
    ) -> None:
        self.data_end: int = len(payload) - _end.size
        if self.data_end < 0:
            raise _malformed("its parts are longer than the whole")
        self.text_end: int = _end.unpack_from(payload, self.data_end)[0]
        if self.text_end > self.data_end:
            raise _malformed("its parts are longer than the whole")
        self.payload = payload
        self.text_at: int = 0
        self.data_at: int = self.text_end
        self.buffers: Sequence[memoryview] = buffers
        self.next_buffer: int = 0
        self.references = references
        self.on_device = on_device
        self.next_reference: int = 0
        self.made: list[torch.Tensor] = []
        self.tensors = tensors

    def take(self, size: int, what: str) -> memoryview:
        begin = self.text_at
        if size > self.text_end - begin:
            raise _malformed(what)
        self.text_at = begin + size
        return self.payload[begin : self.text_at]

    def read(self, depth: int = 0) -> Any:
        tag = self.take(1, "it ends too early")[0]
        match tag:
            case 0x4E:  # N
                return None
            case 0x54 | 0x46:  # T, F
                return tag == 0x54
            case 0x69 | 0x66:  # i, f
                return struct.unpack("<q" if tag == 0x69 else "<d", self.take(8, "a number is cut off"))[0]
            case 0x73 | 0x62:  # s, b
                content = bytes(self.take(self._number(), "a text is cut off"))
                return content.decode() if tag == 0x73 else content
            case 0x42:  # B
                return bytes(self._next_buffer())
            case 0x6E:  # n
                if self.next_reference >= len(self.references):
                    raise _malformed("a reference is missing in its notes")
                self.next_reference += 1
                return self.references[self.next_reference - 1]
            case 0x74 | 0x6F | 0x64:  # t, o, d
                return self._read_tensor(tag)
            case 0x72:  # r
                number = self._number()
                if number >= len(self.made):
                    raise _malformed("it repeats what it has not told")
                return self.made[number]
            case 0x28 | 0x5B | 0x7B:  # ( [ {
                return self._read_container(tag, depth + 1)
        raise _malformed("it has a value of unknown kind")

    def _number(self) -> int:
        number: int = struct.unpack("<I", self.take(4, "a number is cut off"))[0]
        return number

    def _read_container(self, tag: int, depth: int) -> Any:
        count = self._number()
        if depth > _MOST_DEPTH or count > self.text_end - self.text_at:
            raise _malformed("a container's length makes no sense")
        if tag != 0x7B:
            items = [self.read(depth) for _ in range(count)]
            return tuple(items) if tag == 0x28 else items
        made = {}
        for _ in range(count):
            if self.text_at < self.text_end and self.payload[self.text_at] not in b"si":
                raise _malformed("a key is neither a text nor a number")
            key = self.read(depth)
            made[key] = self.read(depth)
        return made

    def _read_tensor(self, tag: int) -> torch.Tensor:
        code, flags, dimensions = self.take(3, "a tensor's description is cut off")
        if code > _MOST_CODE or flags > _REQUIRES_GRAD or dimensions > _MOST_DIMENSIONS:
            raise _malformed("a tensor's description makes no sense")
        shape = struct.unpack(f"<{dimensions}q", self.take(8 * dimensions, "a tensor's shape is cut off"))
        dtype = DTYPES[code]
        size = size_of(shape, dtype.itemsize)
        if tag == 0x64:
            if self.on_device is None:
                raise _malformed("it has a tensor on a device, and no table of devices")
            tensor = self.on_device(code, shape)
        else:
            tensor = self._over_memory(shape, dtype, size, tag == 0x6F)
        if flags & _REQUIRES_GRAD:
            tensor.requires_grad_(True)
        self.made.append(tensor)
        if self.tensors is not None:
            self.tensors.append(tensor)
        return tensor

    def _over_memory(self, shape: tuple[int, ...], dtype: torch.dtype, size: int, is_large: bool) -> torch.Tensor:
        memory: bytearray | memoryview
        if is_large:
            memory = self._take_buffer(size)
        else:
            if size > self.data_end - self.data_at:
                raise _malformed("a tensor has fewer bytes than its shape says")
            memory = bytearray(self.payload[self.data_at : self.data_at + size])
            self.data_at += size
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(memory, dtype=dtype).as_strided_(shape, _row_major(shape))
        return tensor.clone() if tensor.data_ptr() % 16 else tensor

    def _take_buffer(self, size: int) -> bytearray | memoryview:
        if not size:
            raise _malformed("a tensor has fewer bytes than its shape says")
        buffer = self._next_buffer()
        if len(buffer) != size:
            raise _malformed("a tensor's shape does not fit its buffer")
        return bytearray(buffer) if buffer.readonly else buffer

    def _next_buffer(self) -> memoryview:
        if self.next_buffer == len(self.buffers):
            raise _malformed("a buffer is missing")
        self.next_buffer += 1
        return self.buffers[self.next_buffer - 1]


def _malformed(what: str) -> ValueError:
    return ValueError(f"the message is malformed: {what}")


def read_in_python(
    payload: bytes | memoryview,
    buffers: Sequence[memoryview],
    tensors: Tensors,
    references: Sequence[Any] = (),
    on_device: OnDevice = None,
) -> Any:
    """See `read_flat`."""
    reader = _Reader(memoryview(payload), buffers, tensors, references, on_device)
    value = reader.read()
    if reader.text_at != reader.text_end or reader.data_at != reader.data_end:
        raise _malformed("there is more of it than it tells of")
    return value


def _leave_to_pickle(value: Any, tensors: Tensors, out_of_band_bytes: int, *_: Any) -> None:
    """Stand in for `write_flat` without compiled code: C pickle is faster than `write_in_python`."""


def _load_speedups() -> Any:
    """Return the compiled module, set up; or the reason why it cannot be used."""
    if os.environ.get("FARCALL_SPEEDUPS") == "0":
        return "switched off by FARCALL_SPEEDUPS=0"
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return f"torch {torch.__version__} has no exchange API of DLPack (2.11 and later have)"
    try:
        found = importlib.import_module("farcall.serialize._speedups")
        found.setup(_VERSION, capsule, torch.Tensor, torch.strided, tuple(DTYPES[n] for n in range(_MOST_CODE + 1)))
    except (ImportError, ValueError) as error:
        return f"they were not built, or not for this torch: {error}"
    return found


_loaded = _load_speedups()
speedups: str = _loaded if isinstance(_loaded, str) else ""
"""Why the compiled code is not in use; empty if it is."""

copy_and_sum: Callable[[int, int, int], int] | None = getattr(_loaded, "copy_and_sum", None)
"""A compiled function of `weights/checksums.py`; None without the library."""
write_flat: Callable[..., Written | None] = _leave_to_pickle if speedups else _loaded.write
"""``write_flat(value, tensors, out_of_band_bytes, reference_class, references, on_devices)``: the payload and its
buffers; None: pickle must write the value.

Tensors met are appended to the list ``tensors``, unless that is None. Instances of exactly ``reference_class`` are
appended to the list ``references``, and tensors on devices to the list ``on_devices``; without such a list, pickle must
write them.
"""
read_flat: Callable[..., Any] = read_in_python if speedups else _loaded.read
"""``read_flat(payload, buffers, tensors, references, on_device)``: the value. Its large tensors view the buffers.

``on_device(code, shape)`` returns the next tensor of the table of devices.

Raises:
    ValueError: the payload is malformed.
"""
