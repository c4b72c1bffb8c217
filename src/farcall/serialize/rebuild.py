"""Tensors and storages rebuilt from a message.

Owns the functions that a pickled tensor calls, and the wire codes of dtypes and flags. It does not know how a
tensor is taken apart (``tensors.py``), nor frames, nor devices other than the CPU.

    rebuild_inline(bytes, dtype [, shape, strides, offset, flags])
        the storage's bytes are here; without a shape it is all of them, one-dimensional
    rebuild_alias(n, dtype, shape, strides, offset, flags)       another view of the n-th inline storage
    rebuild_view(index, dtype, shape, strides, offset, flags)    a view of a storage that is out of band
    rebuild_as(class, function, arguments, flags)                one of the above, as a subclass
    rebuild_special(function, arguments, requires_grad, recorded)
        sparse, quantized, nested, meta: by a function of torch

Invariants: tensors are appended to ``Decoding.tensors`` in the order in which the writer met them; each passes
`check_layout` before torch makes it.
"""

from __future__ import annotations

import collections
import functools
import io
from typing import Any

import torch

from farcall.errors import FunctionNotFound, SerializationError
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.bounds import check_layout
from farcall.serialize.context import CURRENT, Decoding, current_decoding, seed
from farcall.serialize.spans import SegmentTable, compact_strides

REQUIRES_GRAD = 1
NEGATIVE = 2
CONJUGATE = 4

# Append only: the position is the code on the wire. Dtypes that are not listed travel by name.
_DTYPE_NAMES = [
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
DTYPES: dict[int | str, torch.dtype] = {}
CODES: dict[torch.dtype, int | str] = {}


def _fill_dtype_tables() -> None:
    named = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    for name, dtype in named.items():
        if dtype not in _QUANTIZED:
            code = _DTYPE_NAMES.index(name) if name in _DTYPE_NAMES else name
            DTYPES[code] = dtype
            CODES[dtype] = code


_fill_dtype_tables()


_frombuffer = torch.frombuffer
_TypedStorage: Any = torch.TypedStorage
_set_state: Any = torch._utils._set_obj_state
_set_negative: Any = torch._C._set_neg
_set_conjugate: Any = torch._C._set_conj


@seed
def rebuild_inline(
    data: bytearray,
    code: int | str,
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] = (),
    offset: int = 0,
    flags: int = 0,
) -> torch.Tensor:
    """Rebuild a tensor over memory that came inside the pickle."""
    decoding = CURRENT.decoding or current_decoding()
    tensor = _build_inline(decoding, data, code, shape, strides, offset)
    return _finish(decoding, tensor, flags)


@seed
def rebuild_view(
    index: int, code: int | str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, flags: int
) -> torch.Tensor:
    """Rebuild a view of an out-of-band storage."""
    decoding = CURRENT.decoding or current_decoding()
    return _finish(decoding, _build_view(decoding, index, code, shape, strides, offset), flags)


@seed
def rebuild_as(cls: type[torch.Tensor], function: Any, arguments: tuple[Any, ...], flags: int) -> torch.Tensor:
    """Rebuild a subclass of Tensor, without running its constructor."""
    decoding = current_decoding()
    tensor = _build_bare(decoding, function, arguments)
    # Not `as_subclass`, whose result is a view: an autograd context could not make it the output of a receive.
    result: torch.Tensor = torch.Tensor._make_subclass(cls, tensor, bool(flags & REQUIRES_GRAD))
    if decoding.tensors is not None:
        decoding.tensors.append(result)
    return result


@seed
def rebuild_alias(
    number: int, code: int | str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, flags: int
) -> torch.Tensor:
    """Rebuild a further view of a storage that came inside the pickle."""
    decoding = current_decoding()
    return _finish(decoding, _view_of(decoding.inline[number], code, shape, strides, offset), flags)


def rebuild_special(
    function: Any, arguments: tuple[Any, ...], requires_grad: bool, recorded: bool | None
) -> torch.Tensor:
    """Rebuild a tensor from torch's own reduction."""
    decoding = current_decoding()
    _check_special(function, arguments)
    tensor: torch.Tensor = function(*arguments)
    if function is torch._utils._rebuild_sparse_tensor:
        _settle_sparse(tensor)
    if requires_grad and not tensor.requires_grad:
        tensor.requires_grad_(True)
    if recorded and decoding.tensors is not None:
        decoding.tensors.append(tensor)
    return tensor


def _check_special(function: Any, arguments: tuple[Any, ...]) -> None:
    """Check the layouts of quantized and nested tensors: torch's functions for them resize, or read what is beyond."""
    if function is torch._utils._rebuild_nested_tensor:
        memory, *rows = arguments
        held = memory.untyped_storage().nbytes()
        for shape, strides, offset in zip(*(row.tolist() for row in rows), strict=True):
            check_layout(tuple(shape), tuple(strides), offset, memory.itemsize, held)
    elif len(arguments) > 3 and isinstance(arguments[0], _TypedStorage):
        storage, offset, shape, strides = arguments[:4]
        held = storage._untyped_storage.nbytes() * _PACKED.get(storage.dtype, 1)
        check_layout(tuple(shape), tuple(strides), offset, storage.dtype.itemsize, held)


def _settle_sparse(tensor: torch.Tensor) -> None:
    """Validate a sparse tensor, and take it off torch's list: only `torch.load` empties that, so tensors would leak."""
    waiting = torch._utils._sparse_tensors_to_validate
    for index in range(len(waiting) - 1, -1, -1):
        if waiting[index] is tensor:
            del waiting[index]
            break
    if tensor.layout is torch.sparse_coo:
        # Where members trust each other, only the bounds count: to look for order takes four times as long.
        looks_for_order = tensor.is_coalesced() and INSTALLED.allowance is not None
        parts = (tensor._indices(), tensor._values(), tensor.size(), looks_for_order)
        torch._validate_sparse_coo_tensor_args(*parts)
        return
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    torch._validate_sparse_compressed_tensor_args(*indices, tensor.values(), tensor.size(), tensor.layout)


def rebuild_storage(function: Any, arguments: tuple[Any, ...]) -> torch.UntypedStorage:
    """Rebuild a storage sent without a tensor."""
    return _build_bare(current_decoding(), function, arguments).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Rebuild a typed storage around its untyped one."""
    typed: torch.TypedStorage = _TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return typed


def load_script_module(data: Any) -> Any:
    """Load a module that ``torch.jit.save`` wrote."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields, module="torch._jit_internal")  # like the original


def rebuild_named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Rebuild a named tuple that came out of TorchScript."""
    return _named_tuple(name, fields)(*values)


def find_script_function(qualified_name: str) -> Any:
    """Return the TorchScript function of that name compiled in this process."""
    function: Any = torch.jit._state._python_cu.find_function(qualified_name)
    if function is None:
        name = qualified_name.rpartition(".")[2]
        raise FunctionNotFound(
            f"attempted to get undefined function {name}: no TorchScript function {qualified_name!r} has been compiled "
            "in this process; compile it on both sides"
        )
    return function


def find_operator(name: str) -> Any:
    """Return ``torch.ops.<namespace>.<operator>[.<overload>]``; refuse any other attribute on that path."""
    namespace, operator, *overload = name.split(".")
    found: Any = getattr(getattr(torch.ops, namespace), operator)
    if not isinstance(found, torch._ops.OpOverloadPacket) or len(overload) > 1:
        raise FunctionNotFound(f"{name!r} is not an operator of torch")
    if not overload:
        return found
    if overload[0] not in found.overloads():  # type: ignore[no-untyped-call]
        raise FunctionNotFound(f"the operator {namespace}.{operator} has no overload {overload[0]!r}")
    return getattr(found, overload[0])


def set_attributes(tensor: torch.Tensor, state: Any) -> None:
    """Set the Python attributes of a rebuilt tensor. (``Tensor.__setstate__`` does something else.)"""
    _set_state(tensor, state)


def _build_bare(decoding: Decoding, function: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild without recording: the result is only the memory of another tensor or storage."""
    tensors, decoding.tensors = decoding.tensors, None
    try:
        tensor: torch.Tensor = function(*arguments)
    finally:
        decoding.tensors = tensors
    return tensor


def _dtype(code: int | str) -> torch.dtype:
    dtype = DTYPES.get(code)
    if dtype is None:
        name = _DTYPE_NAMES[code] if isinstance(code, int) else code
        raise SerializationError(f"the sender's torch has a dtype {name}, which this torch ({torch.__version__}) lacks")
    return dtype


def _build_inline(
    decoding: Decoding,
    data: bytearray,
    code: int | str,
    shape: tuple[int, ...] | None,
    strides: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    dtype = DTYPES.get(code) or _dtype(code)
    if data.__class__ is not bytearray:
        raise ValueError("the message is malformed: a tensor over memory that must not be written")
    memory = memoryview(data)  # else whoever has the bytearray as well could resize it under the tensor
    if shape is None:
        tensor = _frombuffer(memory, dtype=dtype)
        decoding.inline.append(tensor)
        return tensor
    check_layout(shape, strides, offset, dtype.itemsize, len(data))
    if not data:
        tensor = torch.empty(0, dtype=dtype, device="cpu").as_strided_(shape, strides)
    elif len(data) % dtype.itemsize:
        tensor = _view_of(_frombuffer(memory, dtype=torch.uint8), code, shape, strides, offset)
    else:
        tensor = _frombuffer(memory, dtype=dtype).as_strided_(shape, strides, offset)
    decoding.inline.append(tensor)
    return tensor


def _build_view(
    decoding: Decoding,
    index: int,
    code: int | str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    dtype = DTYPES.get(code) or _dtype(code)
    key: Any = index
    buffer: Any
    if decoding.segments is None:
        # Storages are counted from the end of the list: pickle's own buffers come first.
        buffer = decoding.buffers[~index]
    else:
        key, low, buffer, compact = _find_segment(decoding, decoding.segments, index, offset * dtype.itemsize)
        if compact:
            strides = compact_strides(shape, strides)
            offset = 0
        else:
            offset -= low // dtype.itemsize
    first = decoding.storages.get(key)
    if first is not None:
        return _view_of(first, code, shape, strides, offset)
    check_layout(shape, strides, offset, dtype.itemsize, len(buffer))
    if buffer.__class__ is memoryview:
        buffer = bytearray(buffer) if buffer.readonly else buffer
    elif buffer.__class__ is not bytearray:
        raise ValueError("the message is malformed: a tensor over memory that must not be written")
    if len(buffer) % dtype.itemsize:
        first = _aligned(_frombuffer(buffer, dtype=torch.uint8))
        tensor = _view_of(first, code, shape, strides, offset)
    else:
        tensor = _aligned(_frombuffer(buffer, dtype=dtype)).as_strided_(shape, strides, offset)
    decoding.storages[key] = tensor
    return tensor


def _find_segment(
    decoding: Decoding, table: SegmentTable, index: int, low: int
) -> tuple[tuple[int, int], int, memoryview | bytearray, bool]:
    """Return the key, low byte, memory and compactness of the segment that holds byte ``low`` of a storage."""
    buffer_number = sum(segment[1] is None for segments in table[:index] for segment in segments)
    found: tuple[int, int] | None = None
    for position, segment in enumerate(table[index]):
        if segment[0] > low:
            break
        found = position, buffer_number
        buffer_number += segment[1] is None
    if found is None:
        raise SerializationError("the message describes a tensor outside the memory it brought")
    segment_low, inline, compact = table[index][found[0]]
    if inline is not None and inline.__class__ is not bytearray:  # it would be copied for each segment that names it
        raise ValueError("the message is malformed: a tensor over memory that must not be written")
    memory = decoding.buffers[~found[1]] if inline is None else inline
    return (index, found[0]), segment_low, memory, compact


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy if its memory is not aligned as kernels expect."""
    return tensor if not tensor.data_ptr() % 16 else tensor.clone()


def _view_of(
    first: torch.Tensor, code: int | str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor that shares the storage of ``first``. As on the sender, autograd does not see it as a view."""
    storage, empty = first.untyped_storage(), torch.empty(0, dtype=_dtype(code), device="cpu")
    check_layout(shape, strides, offset, empty.itemsize, storage.nbytes())
    return empty.set_(storage, offset, shape, strides)


def _finish(decoding: Decoding, tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags:
        # In place: each view that torch makes of a tensor takes a kilobyte, for a message's few bytes.
        if flags & NEGATIVE:
            _set_negative(tensor, True)
        if flags & CONJUGATE and tensor.is_complex():
            _set_conjugate(tensor, True)
        if flags & REQUIRES_GRAD:
            tensor.requires_grad_(True)
    if decoding.tensors is not None:
        decoding.tensors.append(tensor)
    return tensor
