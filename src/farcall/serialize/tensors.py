"""Tensors and storages taken apart for a message.

Owns the descriptors: a tensor is pickled as a call of a function in ``rebuild.py``, with a dtype code, a
shape, strides, an offset and a storage, never with its elements as Python objects. Small storages are part
of the pickle; a large one is an index into the message's segments (``spans.py``). It does not know frames;
``devices.py`` describes tensors on devices other than the CPU.

Invariant: tensors are appended to ``Encoding.tensors`` in the order in which the reader rebuilds them.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

import torch

from farcall.errors import SerializationError
from farcall.serialize.bounds import must_be_written_out
from farcall.serialize.code import reduce_code
from farcall.serialize.context import IN_BAND_LIMIT_BYTES, Encoding
from farcall.serialize.devices import PeerDevices, describe_on_device
from farcall.serialize.policy import REDUCERS, register_reducer
from farcall.serialize.rebuild import (
    CODES,
    CONJUGATE,
    NEGATIVE,
    REQUIRES_GRAD,
    find_operator,
    find_script_function,
    load_script_module,
    rebuild_alias,
    rebuild_as,
    rebuild_inline,
    rebuild_named_tuple,
    rebuild_special,
    rebuild_storage,
    rebuild_typed_storage,
    rebuild_view,
    set_attributes,
)
from farcall.serialize.spans import StorageRecord, copy_of

_strided = torch.strided
_state_of: Any = torch._utils._get_obj_state
_Descriptor = tuple[Any, tuple[Any, ...]]


def reduce_tensor(tensor: torch.Tensor, encoding: Encoding) -> Any:
    """Describe a plain ``torch.Tensor``."""
    if not tensor.is_cpu or tensor.layout is not _strided or tensor.dtype not in CODES or tensor.is_nested:
        return _reduce_special(tensor, encoding) if not _is_on_device(tensor) else _reduce_on_device(tensor, encoding)
    if encoding.tensors is not None:
        encoding.tensors.append(tensor)
    descriptor = _describe(tensor, encoding, tensor.requires_grad)
    if tensor.__dict__:
        return (*descriptor, _state_of(tensor), None, None, set_attributes)
    return descriptor


def _is_on_device(tensor: torch.Tensor) -> bool:
    """Does ``devices.py`` describe ``tensor``? Others go to torch; the parts of a sparse tensor then come back here."""
    return (
        not tensor.is_cpu
        and not tensor.is_meta
        and tensor.layout is _strided
        and tensor.dtype in CODES
        and not tensor.is_nested
    )


def _reduce_on_device(tensor: torch.Tensor, encoding: Encoding) -> Any:
    """Describe a plain tensor that is on a device, or that a device map sends to one."""
    if encoding.tensors is not None:
        encoding.tensors.append(tensor)
    descriptor = describe_on_device(tensor, encoding, tensor.requires_grad)
    if tensor.__dict__:
        return (*descriptor, _state_of(tensor), None, None, set_attributes)
    return descriptor


def _describe(tensor: torch.Tensor, encoding: Encoding, requires_grad: bool) -> _Descriptor:
    flags = REQUIRES_GRAD if requires_grad else 0
    if tensor.is_neg():
        flags |= NEGATIVE
    dtype = tensor.dtype
    if dtype.is_complex and tensor.is_conj():
        flags |= CONJUGATE
    code = CODES[dtype]
    shape = tuple(tensor.shape)
    strides = tensor.stride()
    offset: Any = tensor.storage_offset()
    storage = tensor.untyped_storage()
    size_bytes = storage.nbytes()
    if 0 in shape:
        # An empty tensor shares no element, so it needs no storage, however large its own is.
        encoding.inline_count += 1
        return rebuild_inline, (bytearray(), code, shape, strides, 0, flags)
    if must_be_written_out(shape, strides, dtype.itemsize):
        written_out = tensor.contiguous()
        encoding.kept.append(written_out)
        return _describe(written_out, encoding, requires_grad)
    known = encoding.storages.get(storage._cdata)
    if known is None:
        try:
            pointer = storage.data_ptr()
        except RuntimeError:
            pointer = 0
        if not pointer:
            return _describe_without_memory(tensor, encoding, requires_grad, size_bytes)
        if size_bytes <= IN_BAND_LIMIT_BYTES:
            encoding.storages[storage._cdata] = encoding.inline_count
            encoding.inline_count += 1
            data = copy_of(pointer, size_bytes)
            if not flags and strides == (1,) and shape[0] * dtype.itemsize == size_bytes:
                return rebuild_inline, (data, code)
            return rebuild_inline, (data, code, shape, strides, offset, flags)
        known = StorageRecord(len(encoding.records), storage)
        encoding.storages[storage._cdata] = known
        encoding.records.append(known)
    elif known.__class__ is int:
        return rebuild_alias, (known, code, shape, strides, offset, flags)
    assert isinstance(known, StorageRecord)
    item_bytes = dtype.itemsize
    low = offset * item_bytes
    if tensor.is_contiguous():
        high = low + tensor.numel() * item_bytes
    else:
        high = low + item_bytes
        for size, stride in zip(shape, strides, strict=True):
            high += (size - 1) * stride * item_bytes
    if high > size_bytes:
        raise SerializationError(
            f"a tensor of shape {shape} needs {high} bytes of its storage, which has {size_bytes}: "
            "was the storage resized?"
        )
    known.views.append((low, high, dtype, shape, strides, offset))
    return rebuild_view, (known.index, code, shape, strides, offset, flags)


def _describe_without_memory(
    tensor: torch.Tensor, encoding: Encoding, requires_grad: bool, size_bytes: int
) -> _Descriptor:
    """Describe a tensor whose storage has no address: freed by its owner, or torch's lazy zeros."""
    if not size_bytes or not tensor._is_zerotensor():
        raise SerializationError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory behind it: was its storage resized to 0?"
        )
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    # Storages are known by address, and the pickler does not hold this copy: keep it until the message is complete,
    # or another storage could get its address.
    encoding.kept.append(zeros)
    return _describe(zeros, encoding, requires_grad)


def _reduce_subclass(tensor: torch.Tensor, encoding: Encoding, to_device: bool = False) -> Any:
    """Describe a subclass: its memory like any tensor's, then its class and attributes."""
    # A subclass may override ``shape`` or ``stride()``; this code needs the layout of the memory itself.
    with torch._C.DisableTorchFunctionSubclass():
        if (
            tensor.is_meta
            or tensor.layout is not _strided
            or tensor.dtype not in CODES
            or tensor.is_nested
            or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        ):
            return _reduce_special(tensor, encoding)
        if encoding.tensors is not None:
            encoding.tensors.append(tensor)
        describe = _describe if tensor.is_cpu and not to_device else describe_on_device
        function, arguments = describe(tensor, encoding, False)
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        state = _state_of(tensor)
    descriptor = (rebuild_as, (type(tensor), function, arguments, flags))
    return (*descriptor, state, None, None, set_attributes) if state else descriptor


class _Recorded:
    """A marker behind a special tensor's parts: the tensor is recorded after them, in the reader's order."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _reduce_recorded(marker: _Recorded, encoding: Encoding) -> Any:
    if encoding.tensors is not None:
        encoding.tensors.append(marker.tensor)
    return bool, (True,)


def _reduce_special(tensor: torch.Tensor, encoding: Encoding) -> Any:
    """Let torch reduce the tensor; the pickler hands the tensors and storages inside back to this module."""
    encoding.temporaries = True
    function, arguments, *rest = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    marker = None if encoding.tensors is None else _Recorded(tensor)
    return (rebuild_special, (function, arguments, tensor.requires_grad, marker), *rest)


def _reduce_untyped_storage(storage: torch.UntypedStorage, encoding: Encoding) -> Any:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type != "cpu":
        return rebuild_storage, describe_on_device(whole, encoding, False)
    return rebuild_storage, _describe(whole, encoding, False)


def _reduce_typed_storage(storage: torch.TypedStorage, encoding: Encoding) -> Any:
    return rebuild_typed_storage, (storage._untyped_storage, storage.dtype)


def _reduce_script_module(module: torch.jit.ScriptModule, encoding: Encoding) -> Any:
    if hasattr(module._c, "module_rref"):
        raise SerializationError(
            "Passing a script RemoteModule over RPC is not supported. Send its module_rref, and make another from that "
            "there: RemoteModule.init_from_module_rref"
        )
    file = io.BytesIO()
    torch.jit.save(module, file)
    return load_script_module, (pickle.PickleBuffer(file.getbuffer()),)


def _reduce_script_function(function: Any, encoding: Encoding) -> Any:
    return find_script_function, (function.qualified_name,)


def _reduce_operator(operator: Any, encoding: Encoding) -> Any:
    return find_operator, (str(operator),)


def _reduce_array(array: Any, encoding: Encoding) -> Any:
    """Describe a numpy array; copy one with gaps, which numpy would write into the pickle element by element."""
    if array.nbytes > IN_BAND_LIMIT_BYTES and not array.flags.forc and not array.dtype.hasobject:
        array = array.copy(order="C")
    return array.__reduce_ex__(5)


def reduce_other(value: Any, encoding: Encoding) -> Any:
    """Describe code, and instances of subclasses of the registered classes; leave everything else to pickle."""
    if isinstance(value, FunctionType | type):
        return reduce_code(value, encoding)
    if isinstance(value, torch.Tensor):
        own = type(value).__reduce_ex__
        if own is not torch.Tensor.__reduce_ex__ and own is not torch.nn.Parameter.__reduce_ex__:
            return NotImplemented
        encoding.contextual = True
        return REDUCERS[torch.nn.Parameter](value, encoding)  # which goes by a device map, if the node has one
    if isinstance(value, torch.jit.ScriptModule):
        return _reduce_script_module(value, encoding)
    kind = type(value)
    if kind.__module__ == "torch._jit_internal" and isinstance(value, tuple):
        # TorchScript makes a new class for each named tuple that it returns, and no module holds that class.
        return rebuild_named_tuple, (kind.__name__, kind._fields, tuple(value))
    return NotImplemented


def map_cpu_tensors() -> None:
    """From now on check every CPU tensor against the peer's device map. Called once a node has such a map."""
    register_reducer(torch.Tensor, reduce_mapped)
    register_reducer(torch.nn.Parameter, reduce_mapped)


def reduce_mapped(tensor: torch.Tensor, encoding: Encoding) -> Any:
    """Describe a CPU tensor according to the peer's device map, if there is one."""
    devices: PeerDevices | None = getattr(encoding.peer, "devices", None)
    is_plain = type(tensor) is torch.Tensor
    if devices is not None and tensor.is_cpu and tensor.layout is _strided and tensor.dtype in CODES:
        target = devices.target(tensor.device, encoding.is_request)
        if target is not None and target.type != "cpu":
            return _reduce_on_device(tensor, encoding) if is_plain else _reduce_subclass(tensor, encoding, True)
    return reduce_tensor(tensor, encoding) if is_plain else _reduce_subclass(tensor, encoding)


def _register() -> None:
    register_reducer(torch.Tensor, reduce_tensor)
    register_reducer(torch.nn.Parameter, _reduce_subclass)
    register_reducer(_Recorded, _reduce_recorded)
    register_reducer(torch.UntypedStorage, _reduce_untyped_storage)
    register_reducer(torch.TypedStorage, _reduce_typed_storage)
    register_reducer(torch.jit._script.RecursiveScriptModule, _reduce_script_module)
    register_reducer(torch.jit.ScriptFunction, _reduce_script_function)
    register_reducer(torch._ops.OpOverload, _reduce_operator)
    register_reducer(torch._ops.OpOverloadPacket, _reduce_operator)
    # If numpy is installed, torch has imported it by now.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        register_reducer(numpy.ndarray, _reduce_array)


_register()
