"""Values to bytes and back: the payload and out-of-band buffers of one message.

Owns the form of a payload. Pickle ends with b"." and ignores what follows, so the last byte tells the form:

    prelude  pickle  "."                    plain: no tensor, nothing that needs a Decoding
    prelude  pickle  "."  "T"               rebuild functions need a Decoding; storage n is one whole buffer
    prelude  pickle  "."  table  u32  "S"   the same, and a pickled segment table of that length
    one of the two  table  u32  "D"         and a pickled table of storages on devices (``devices.py``)
    one of the above, of (data, tensors)  "C"   ``data`` was written by a pickler that the user installed

Buffers: first pickle's own (numpy) in its order, then those of devices, then the storages' in reverse.
It does not know frames, sockets or peers. Invariant: a failed ``encode`` leaves nothing behind.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.errors import FunctionNotFound, RpcError, SerializationError
from farcall.serialize import policy
from farcall.serialize.context import (
    SEEDS,
    Annotated,
    Decoding,
    Encoding,
    current_decoding,
    current_encoding,
    enter_decoding,
    enter_encoding,
)
from farcall.serialize.devices import DEVICES_FORM, drop_tickets, read_device_table, write_device_table
from farcall.serialize.diagnosis import find_culprit
from farcall.serialize.policy import REDUCERS
from farcall.serialize.recording import RECORDING, Recording
from farcall.serialize.spans import SegmentTable, plan
from farcall.serialize.tensors import reduce_other

__all__ = ["Encoded", "TablePickler", "decode", "encode", "encode_call", "encode_recorded", "is_custom"]

Encoded = tuple[bytes, Sequence[memoryview]]
"""A payload, and the memory that travels beside it; the views keep what they show alive."""

_PLAIN = ord(".")
_CONTEXTUAL = b"T"
_SEGMENTED = b"S"
_CUSTOM = b"C"
_table_length = struct.Struct("<I")

_PRELUDE = SEEDS.prelude
_loads = pickle.loads
_idle: list[Encoding] = []
_MOST_IDLE = 64


def encode(
    value: Any, peer: Any = None, tensors: list[torch.Tensor] | None = None, is_request: bool = False
) -> Encoded:
    """Return the payload and buffers of ``value``.

    ``peer`` is whom it is for. Every tensor met is appended to ``tensors``, if given, in the order in which
    ``decode`` meets them. ``is_request``: see ``Encoding``.
    """
    try:
        # Taken out while in use, so that a reducer may encode another message.
        encoding = _idle.pop()
    except IndexError:
        encoding = Encoding(reduce_other)
    encoding.peer = peer
    encoding.tensors = tensors
    encoding.is_request = is_request
    try:
        encoding.dump(value)
        chunks = encoding.chunks
        payload = _PRELUDE + chunks[0] if len(chunks) == 1 else b"".join((_PRELUDE, *chunks))
        buffers: Sequence[memoryview] = ()
        if encoding.contextual:
            payload, buffers = _complete(encoding, payload)
            if encoding.undo:
                buffers = Annotated(buffers, encoding.notes, encoding.undo)
        elif encoding.buffers:
            buffers = encoding.buffers
    except BaseException as error:
        _undo(encoding)
        if not isinstance(error, Exception) or _says_it_all(error):
            raise
        raise _explain(value, error, is_request) from error
    encoding.reset()
    if len(_idle) < _MOST_IDLE:
        _idle.append(encoding)
    return payload, buffers


def encode_call(value: Any, peer: Any = None, tensors: list[torch.Tensor] | None = None) -> Encoded:
    """Like ``encode``, but by the pickler the user installed, if any: for a call's function and arguments.

    In a distributed autograd context the message is recorded there.
    """
    recording = RECORDING.get()
    if recording is not None and tensors is None and recording.admits(peer):
        return encode_recorded(recording, value, peer, encode_call)
    pickler = policy.installed_pickler()
    if pickler is None:
        return encode(value, peer, tensors, True)
    outer = Encoding(reduce_other)
    outer.peer = peer
    previous = enter_encoding(outer)
    try:
        data, table = pickler.serialize(value)
        # A writable buffer leaves the pickle when it is large; bytes would not.
        written = pickle.PickleBuffer(data)
        payload, buffers = encode((written, tuple(table)), peer, tensors, True)
        if outer.notes:
            inner = buffers.undo if buffers.__class__ is Annotated else ()
            buffers = Annotated(buffers, outer.notes, (*outer.undo, *inner))
    except BaseException as error:
        _undo(outer)
        if not isinstance(error, Exception) or _says_it_all(error):
            raise
        raise SerializationError(
            f"the installed pickler {type(pickler).__name__} could not write the call: {_text(error)}"
        ) from error
    finally:
        enter_encoding(previous)
    return payload + _CUSTOM, buffers


def encode_recorded(
    recording: Recording,
    value: Any,
    peer: Any,
    encode: Callable[[Any, Any, list[torch.Tensor]], Encoded] = encode,
) -> Encoded:
    """Like ``encode``, for a message of a distributed autograd context."""
    tensors: list[torch.Tensor] = []
    payload, buffers = encode(value, peer, tensors)
    message_id = recording.record_send(peer, tensors)
    if buffers.__class__ is Annotated:
        buffers.recording, buffers.message_id = recording, message_id
        return payload, buffers
    return payload, Annotated(buffers, [], (), recording, message_id)


def is_custom(payload: bytes | memoryview) -> bool:
    """Whether a pickler that the user installed wrote this payload."""
    return payload[-1] == _CUSTOM[0]


def decode(
    payload: bytes | memoryview,
    buffers: Sequence[memoryview] = (),
    peer: Any = None,
    tensors: list[torch.Tensor] | None = None,
) -> Any:
    """Rebuild the value of ``encode``.

    Tensors and arrays lie over ``buffers``, whose memoryview objects live as long as what was built on them;
    read-only ones are copied. Tensors met are appended to ``tensors``, if given; those of a message of a
    distributed autograd context are recorded there.
    """
    if buffers.__class__ is Annotated and buffers.message_id and tensors is None:
        return _decode_recorded(payload, buffers, peer)
    try:
        form = payload[-1]
        if form == _PLAIN:
            return _loads(payload, buffers=map(_owning, buffers)) if buffers else _loads(payload)
        if form == _CUSTOM[0]:
            return _decode_custom(payload, buffers, peer, tensors)
        if form == DEVICES_FORM:
            return _decode_with_devices(payload, buffers, peer, tensors)
        segments = _read_table(payload) if form == _SEGMENTED[0] else None
        previous = enter_decoding(Decoding(buffers, peer, tensors, segments))
        try:
            return _loads(payload, buffers=map(_owning, buffers))
        finally:
            enter_decoding(previous)
    except SerializationError:
        raise
    except Exception as error:
        kind = FunctionNotFound if _names_something_missing(error) else SerializationError
        raise kind(
            f"a message could not be read: {_text(error)}"
            + (
                " (the RPC pickler does not serialize code: define it on both sides)"
                if kind is FunctionNotFound
                else ""
            )
        ) from error


def _decode_with_devices(
    payload: bytes | memoryview, buffers: Sequence[memoryview], peer: Any, tensors: list[torch.Tensor] | None
) -> Any:
    """Read a message with tensors on devices; whatever comes of it, what was lent for it is given back."""
    table, payload = read_device_table(payload)
    try:
        segments = _read_table(payload) if payload[-1] == _SEGMENTED[0] else None
        decoding = Decoding(buffers, peer, tensors, segments)
        decoding.devices = table
        previous = enter_decoding(decoding)
        try:
            return _loads(payload, buffers=map(_owning, buffers))
        finally:
            enter_decoding(previous)
    finally:
        drop_tickets(table, peer)


def _decode_recorded(payload: bytes | memoryview, buffers: Annotated, peer: Any) -> Any:
    recording, message_id = buffers.recording, buffers.message_id
    assert recording is not None
    tensors: list[torch.Tensor] = []
    try:
        value = decode(payload, buffers, peer, tensors)
    except BaseException:
        recording.decline_receive(peer, message_id)
        raise
    recording.record_receive(peer, message_id, tensors)
    return value


class TablePickler:
    """A pickler in the form that ``use_rpc_pickler`` accepts, to be subclassed.

    Its bytes name tensors by their place in the list beside them.
    """

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the bytes of ``value`` and its tensors."""
        chunks: list[bytes] = []
        writer = _TableWriter(chunks)
        writer.dump(value)
        return b"".join(chunks), writer.tensors

    def deserialize(self, data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
        """Rebuild a value from its bytes and tensors."""
        decoding = Decoding(())
        decoding.table = tensors
        previous = enter_decoding(decoding)
        if previous is not None:
            decoding.peer = previous.peer
            decoding.buffers = previous.buffers
        try:
            return _loads(data)
        finally:
            enter_decoding(previous)


def tensor_at(index: int) -> torch.Tensor:
    """Return a tensor of the table beside the bytes being read."""
    return current_decoding().table[index]


class _TableFile:
    __slots__ = ("write",)

    def __init__(self, chunks: list[bytes]) -> None:
        self.write = chunks.append


class _TableWriter(pickle.Pickler):
    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__(_TableFile(chunks), 5)
        self.tensors: list[torch.Tensor] = []
        self.encoding = current_encoding() or Encoding(reduce_other)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return tensor_at, (len(self.tensors) - 1,)
        reducer = REDUCERS.get(type(value))
        if reducer is not None and not type(value).__module__.startswith(("torch", "numpy")):
            return reducer(value, self.encoding)
        return NotImplemented


def _decode_custom(
    payload: bytes | memoryview, buffers: Sequence[memoryview], peer: Any, tensors: list[torch.Tensor] | None
) -> Any:
    data, table = decode(memoryview(payload)[:-1], buffers, peer, tensors)
    pickler = policy.installed_pickler() or TablePickler()
    previous = enter_decoding(Decoding(buffers if type(buffers) is Annotated else (), peer))
    try:
        return pickler.deserialize(bytes(data), list(table))
    finally:
        enter_decoding(previous)


def _complete(encoding: Encoding, payload: bytes) -> Encoded:
    """Add to a pickle what is known only at its end: which memory its storages need."""
    if encoding.device_records is not None:
        # First of all: what they leave to the host goes behind pickle's own buffers.
        devices = write_device_table(encoding)
        encoding.device_records = None
        payload, buffers_ = _complete(encoding, payload)
        return payload + devices, buffers_
    if not encoding.records:
        return payload + _CONTEXTUAL, encoding.buffers
    buffers, table = plan(encoding.records)
    buffers.reverse()
    if encoding.buffers:
        buffers = encoding.buffers + buffers
    if table is None:
        return payload + _CONTEXTUAL, buffers
    written = pickle.dumps(table, 5)
    return b"".join((payload, written, _table_length.pack(len(written)), _SEGMENTED)), buffers


def _read_table(payload: bytes | memoryview) -> SegmentTable:
    end = len(payload) - 1 - _table_length.size
    (length,) = _table_length.unpack_from(payload, end)
    table: SegmentTable = _loads(payload[end - length : end])
    return table


def _owning(buffer: memoryview) -> Any:
    """Return ``buffer`` in a form whose every view keeps the memoryview object itself alive.

    A memoryview of a memoryview does not: it keeps only the memory's owner, and the runtime takes the death
    of the object for the release of the memory.
    """
    return pickle.PickleBuffer(bytearray(buffer) if buffer.readonly else buffer)


def _undo(encoding: Encoding) -> None:
    for undo in reversed(encoding.undo):
        undo()
    encoding.reset()  # it is in a cycle with itself, and must not hold what it met until a garbage collection


def _says_it_all(error: BaseException) -> bool:
    """Whether a reducer of ours refused for a reason that is not about pickling."""
    return isinstance(error, RpcError) and not isinstance(error, SerializationError)


class NotPicklable(SerializationError, TypeError):
    """Something of a type that pickle does not know: a TypeError, as it is with pickle alone."""


def _explain(value: Any, error: Exception, is_request: bool) -> SerializationError:
    where, culprit = find_culprit(value, is_request)
    if isinstance(error, SerializationError):
        return SerializationError(f"cannot send {where}: {error}")
    hint = ""
    if "<lambda>" in str(error) or "<locals>" in str(error) or "local object" in str(error):
        hint = (
            "; define it at module level, or use a pickler that writes code, such as cloudpickle, by _use_rpc_pickler"
        )
    kind = NotPicklable if isinstance(error, TypeError) else SerializationError
    if kind is NotPicklable and not hint:
        hint = "; send what it is made of, or keep it where it is and send a reference (RRef)"
    return kind(f"cannot send {where}, a {culprit}: {_text(error)}{hint}")


def _names_something_missing(error: Exception) -> bool:
    return isinstance(error, AttributeError | ModuleNotFoundError) and (
        isinstance(error, ModuleNotFoundError) or "attribute" in str(error) or "TorchScript" in str(error)
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
