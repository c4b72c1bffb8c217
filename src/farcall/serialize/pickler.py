"""Values to bytes and back: the payload and out-of-band buffers of one message.

Owns the form of a payload. Pickle ends with b"." and ignores what follows, so the last byte names the form:

    prelude  pickle  "."                    plain: no tensor, nothing that needs a Decoding
    prelude  pickle  "."  "T"               rebuild functions need a Decoding; storage n is one whole buffer
    prelude  pickle  "."  table  u32  "S"   the same, and a pickled segment table of that length
    one of the two  table  u32  "D"         and a pickled table of storages on devices (``devices.py``)
    one of the above, of (data, tensors)  "C"   ``data`` was written by a pickler that the user installed
    description  data  u32  "F"             plain values and plain tensors, without pickle (``flat.py``)

Buffers: first pickle's own (numpy) in its order, then those of devices, then the storages' in reverse.
It does not know sockets or peers. Invariant: a failed ``write_value`` undoes all its side effects.

Over 400 lines: the forms of a payload, written and read side by side.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from types import AsyncGeneratorType, GeneratorType
from typing import Any

import torch

from farcall.destructors import whole
from farcall.errors import FunctionNotFound, NotAllowed, NotPicklable, RpcError, SerializationError
from farcall.protocol.frames import LARGE_BYTES, REQUEST, Frame
from farcall.serialize import policy
from farcall.serialize.allowance import INSTALLED, Allowance, install, loads
from farcall.serialize.code import HINT
from farcall.serialize.context import (
    CURRENT,
    SEEDS,
    Decoding,
    Encoding,
    current_decoding,
    current_encoding,
    enter_decoding,
    enter_encoding,
)
from farcall.serialize.devices import (
    DEVICES_FORM,
    Beside,
    before_table,
    drop_tickets,
    has_devices,
    read_device_table,
    rebuild_in_order,
    write_device_table,
    write_flat_table,
)
from farcall.serialize.diagnosis import find_culprit
from farcall.serialize.flat import FLAT, OUT_OF_BAND_BYTES, Written, read_flat, write_copied, write_flat
from farcall.serialize.functions import forget_names
from farcall.serialize.policy import REDUCERS, REFERENCES
from farcall.serialize.recording import RECORDING
from farcall.serialize.spans import SegmentTable, plan
from farcall.serialize.tensors import reduce_mapped, reduce_other, reduce_tensor

_PLAIN = ord(".")
_CONTEXTUAL = b"T"
_SEGMENTED = b"S"
_CUSTOM = b"C"
FLAT_FORM = bytes([FLAT])
"""The last byte of a payload that runs no code of a user's when it is read, and is read quickly."""
# The opcode with which a pickle names a class or function, whose code may do anything. (The byte may also be data.)
_NAMES_A_CLASS = pickle.STACK_GLOBAL
_table_length = struct.Struct("<I")

_PRELUDE = SEEDS.prelude
_loads: Callable[..., Any] = pickle.loads
_idle: list[Encoding] = []
_MOST_IDLE = 64


def write_value(frame: Frame, value: Any, peer: Any = None) -> None:
    """Write ``value``, for ``peer``, into ``frame``: its payload, its buffers, and the forks of its references.

    The buffers keep the memory under them alive. If the frame belongs to a distributed autograd context, its tensors
    are recorded there, in the order in which the reader meets them.
    """
    recording = frame.recording
    tensors: list[torch.Tensor] | None = None if recording is None else []
    reducer = REDUCERS[torch.Tensor]
    if reducer is reduce_tensor or (reducer is reduce_mapped and getattr(peer, "devices", None) is None):
        references: list[Any] | None = [] if INSTALLED.takes_pickles else None
        on_devices: list[torch.Tensor] | None = None
        if references is not None and getattr(peer, "devices", None) is not None:
            on_devices = []
        written = write_flat(value, tensors, OUT_OF_BAND_BYTES, REFERENCES.kind, references, on_devices)
        if (
            written is not None
            and (not references or _fork_references(frame, references, peer))
            and (not on_devices or _copy_to_devices(frame, written, on_devices, peer))
        ):
            if not on_devices:
                frame.payload, frame.buffers = written
            if tensors is not None:
                frame.message_id = recording.record_send(peer, tensors)
            return
        if tensors:
            tensors = []
    if not INSTALLED.takes_pickles:
        _write_without_pickle(frame, value, tensors, peer)
        return
    try:
        # An encoding leaves the pool while in use: a reducer may write another message meanwhile.
        encoding = _idle.pop()
    except IndexError:
        encoding = Encoding(reduce_other)
    encoding.peer = peer
    encoding.tensors = tensors
    encoding.is_request = frame.kind == REQUEST
    try:
        encoding.dump(value)
        chunks = encoding.chunks
        frame.payload = _PRELUDE + chunks[0] if len(chunks) == 1 else b"".join((_PRELUDE, *chunks))
        if encoding.contextual:
            _complete(encoding, frame)
            if encoding.undo:
                frame.forks, frame.undo = encoding.notes, encoding.undo
        elif encoding.buffers:
            frame.buffers = encoding.buffers
    except BaseException as error:
        _undo(encoding)
        if not isinstance(error, Exception) or _says_it_all(error):
            raise
        raise _explain(value, error, frame.kind == REQUEST) from error
    encoding.reset()
    if len(_idle) < _MOST_IDLE:
        _idle.append(encoding)
    if tensors is not None:
        frame.message_id = recording.record_send(peer, tensors)


@whole
def _fork_references(frame: Frame, references: list[Any], peer: Any) -> bool:
    """Note the forks of a flat payload's references, in order. False: none is noted; pickle does it, or says why."""
    forks: list[Any] = []
    undo: list[Callable[[], None]] = []
    try:
        for reference in references:
            forked = REFERENCES.fork(reference, peer)
            if forked is None:
                return False
            forks.append(forked[0])
            undo.append(forked[1])
        frame.forks, frame.undo = forks, undo
    except Exception:
        return False
    finally:
        if len(forks) < len(references):
            for take_back in reversed(undo):
                take_back()
    return True


def _copy_to_devices(frame: Frame, written: Written, tensors: list[torch.Tensor], peer: Any) -> bool:
    """Write a flat payload with tensors on devices into ``frame``. False: pickle does it, or says why not."""
    payload, buffers = written
    beside = Beside(buffers, frame.kind == REQUEST)
    table: bytes | None = None
    try:
        table = write_flat_table(tensors, beside, peer.devices)
    finally:
        if table is None:  # take back the forks of the references, too
            for take_back in reversed(frame.undo):
                take_back()
            frame.forks = frame.undo = ()
    if table is None:
        return False
    frame.payload = payload + table
    frame.buffers = beside.buffers
    frame.undo = (*frame.undo, *beside.undo)
    return True


def _write_without_pickle(frame: Frame, value: Any, tensors: list[torch.Tensor] | None, peer: Any) -> None:
    """Write a value that `write_flat` refused, for members that accept no pickles (``trust="data"``)."""
    try:
        frame.payload, frame.buffers = write_copied(value, tensors, OUT_OF_BAND_BYTES)
    except TypeError as error:
        raise NotPicklable(f"{error}; this group exchanges plain data only (farcall.allow with trust='data')") from None
    if tensors is not None:
        frame.message_id = frame.recording.record_send(peer, tensors)


def write_call(frame: Frame, value: Any, peer: Any = None) -> None:
    """Like `write_value`, for a call's function and arguments; uses the pickler that the user installed, if any.

    The frame joins the distributed autograd context of the calling code.
    """
    recording = RECORDING.get()
    if recording is not None and recording.admits(peer):
        frame.recording = recording
    pickler = policy.INSTALLED.pickler
    if pickler is None:
        write_value(frame, value, peer)
        return
    outer = Encoding(reduce_other)
    outer.peer = peer
    previous = enter_encoding(outer)
    try:
        data, table = pickler.serialize(value)
        # Wrapped in a PickleBuffer, large data leaves the pickle; plain bytes would be copied into it.
        write_value(frame, (pickle.PickleBuffer(data), tuple(table)), peer)
        frame.payload = bytes(frame.payload) + _CUSTOM
        if outer.notes:
            frame.forks, frame.undo = outer.notes, (*outer.undo, *frame.undo)
    except BaseException as error:
        _undo(outer)
        if not isinstance(error, Exception) or _says_it_all(error):
            raise
        raise SerializationError(
            f"the installed pickler {type(pickler).__name__} could not write the call: {_text(error)}"
        ) from error
    finally:
        enter_encoding(previous)


def restrict(allowance: Allowance | None) -> None:
    """From now on read and call only what ``allowance`` names; None: whatever members send."""
    global _loads
    if allowance is not None and policy.INSTALLED.pickler is not None:
        raise RuntimeError("leave the block of use_rpc_pickler first: its pickler would go round the table")
    install(allowance)
    _loads = pickle.loads if allowance is None else loads
    forget_names()


def takes_long(payload: bytes | memoryview) -> bool:
    """May reading this payload take long, or run the user's code?"""
    if has_devices(payload):
        payload = before_table(payload)
    if payload[-1:] == FLAT_FORM:
        return False
    return len(payload) >= LARGE_BYTES or _NAMES_A_CLASS in bytes(payload)


def read_value(frame: Frame, peer: Any = None) -> Any:
    """Rebuild the value that `write_value` wrote.

    Tensors and arrays view the frame's buffers, and keep their memoryview objects alive; read-only buffers are copied.
    If the frame belongs to a distributed autograd context, its tensors are recorded there.
    """
    if not frame.message_id or frame.recording is None:
        payload = frame.payload
        if payload[-1:] == FLAT_FORM:
            try:
                return read_flat(payload, frame.buffers, None, frame.forks if INSTALLED.takes_pickles else ())
            except Exception:
                pass  # read it again below, where errors are explained
        return _read(frame.payload, frame.buffers, frame.forks, peer)
    # The message is received or declined below; with a number of 0, `decline` skips it later.
    message_id, frame.message_id = frame.message_id, 0
    tensors: list[torch.Tensor] = []
    try:
        value = _read(frame.payload, frame.buffers, frame.forks, peer, tensors)
    except BaseException:
        frame.recording.decline_receive(peer, message_id)
        raise
    frame.recording.record_receive(peer, message_id, tensors)
    return value


def _read(
    payload: bytes | memoryview,
    buffers: Sequence[memoryview],
    forks: Sequence[Any],
    peer: Any,
    tensors: list[torch.Tensor] | None = None,
) -> Any:
    """Rebuild the value of a payload; append its tensors to ``tensors``, if given."""
    devices = None
    try:
        form = payload[-1]
        if form == FLAT:
            return read_flat(payload, buffers, tensors, forks if INSTALLED.takes_pickles else ())
        if form == _PLAIN:
            return _loads(payload, buffers=map(_owning, buffers)) if buffers else _loads(payload)
        if form == _CUSTOM[0]:
            data, table = _read(memoryview(payload)[:-1], buffers, forks, peer, tensors)
            return _read_custom(bytes(data), table, forks, peer)
        if form == DEVICES_FORM:
            devices, payload = read_device_table(payload)
            form = payload[-1]
            if form == FLAT:
                decoding = Decoding(buffers, peer)
                decoding.devices = devices
                return read_flat(payload, buffers, tensors, forks, rebuild_in_order(decoding))
        segments = _read_table(payload) if form == _SEGMENTED[0] else None
        decoding = Decoding(buffers, peer, tensors, segments, forks)
        decoding.devices = devices
        current = CURRENT
        previous, current.decoding = current.decoding, decoding
        try:
            return _loads(payload, buffers=map(_owning, buffers))
        finally:
            current.decoding = previous
    except SerializationError:
        raise
    except Exception as error:
        raise unreadable(error) from error
    finally:
        if devices is not None:
            drop_tickets(devices, peer)  # on success only those are left that no tensor of the value needed


def unreadable(error: Exception) -> SerializationError | FunctionNotFound:
    """The error for a message, or its code, that could not be read."""
    told = f"a message could not be read: {_text(error)}"
    if _names_something_missing(error):
        why = "the RPC pickler does not serialize code: every worker must define or import the same"
        return FunctionNotFound(f"{told} ({why})")
    return SerializationError(told)


def _read_custom(data: bytes, table: Sequence[torch.Tensor], forks: Sequence[Any], peer: Any) -> Any:
    """Rebuild a value that a user's pickler wrote: with the pickler installed here, else with the default."""
    if INSTALLED.allowance is not None:
        raise NotAllowed("a call that an installed pickler wrote is not allowed here: it would go round farcall.allow")
    pickler = policy.INSTALLED.pickler or TablePickler()
    previous = enter_decoding(Decoding((), peer, forks=forks))
    try:
        return pickler.deserialize(data, list(table))
    finally:
        enter_decoding(previous)


class TablePickler:
    """A pickler in the form that ``use_rpc_pickler`` accepts, to be subclassed.

    Its bytes name tensors by their index in the list beside them.
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
            decoding.forks = previous.forks
        try:
            return _loads(data)
        finally:
            enter_decoding(previous)


def tensor_at(index: int) -> torch.Tensor:
    """Return a tensor of the table that came with the bytes being read."""
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


def _complete(encoding: Encoding, frame: Frame) -> None:
    """Append the tables of storages, which are known only when the pickle is complete."""
    device_table = b""
    if encoding.device_records is not None:
        # Before the storages: device parts that travel through the host come right after pickle's own buffers.
        device_table = write_device_table(encoding)
    payload = bytes(frame.payload)
    if not encoding.records:
        frame.payload = payload + _CONTEXTUAL + device_table
        frame.buffers = encoding.buffers
        return
    buffers, table = plan(encoding.records)
    buffers.reverse()
    frame.buffers = encoding.buffers + buffers if encoding.buffers else buffers
    if table is None:
        frame.payload = payload + _CONTEXTUAL + device_table
    else:
        written = pickle.dumps(table, 5)
        frame.payload = b"".join((payload, written, _table_length.pack(len(written)), _SEGMENTED, device_table))


def _read_table(payload: bytes | memoryview) -> SegmentTable:
    end = len(payload) - 1 - _table_length.size
    (length,) = _table_length.unpack_from(payload, end)
    table: SegmentTable = _loads(payload[end - length : end])
    return table


def _owning(buffer: memoryview) -> Any:
    """Return ``buffer`` in a form whose every view keeps the memoryview object itself alive.

    A memoryview of a memoryview keeps only the owner of the memory alive, and the runtime releases the memory when
    the memoryview object itself dies.
    """
    return pickle.PickleBuffer(bytearray(buffer) if buffer.readonly else buffer)


@whole
def _undo(encoding: Encoding) -> None:
    for undo in reversed(encoding.undo):
        undo()
    encoding.reset()  # an Encoding refers to itself: without this it would hold the value until a garbage collection


def _says_it_all(error: BaseException) -> bool:
    """Did one of farcall's reducers refuse for a reason that is not about pickling, or that names the culprit?"""
    return isinstance(error, RpcError) and (
        not isinstance(error, SerializationError) or isinstance(error, NotPicklable)
    )


def _explain(value: Any, error: Exception, is_request: bool) -> SerializationError:
    where, culprit = find_culprit(value, is_request)
    if isinstance(error, SerializationError):
        return SerializationError(f"cannot send {where}: {error}")
    hint = ""
    from farcall.foreign_errors import is_of_local_code  # most programs never need it

    if is_of_local_code(error):
        hint = f"; {HINT}"
    is_future = issubclass(culprit, torch.futures.Future)
    kind = NotPicklable if is_future or isinstance(error, TypeError) else SerializationError
    if is_future:
        hint = "; send its result (future.result()), or let remote(...) make the value and send the reference"
    elif issubclass(culprit, GeneratorType | AsyncGeneratorType):
        hint = "; the items of a generator are read as a stream: farcall.worker(name).stream(function, ...)"
        if is_request:
            hint = "; the items of an iterable of the caller's travel as a stream: farcall.outgoing(iterable)"
    elif kind is NotPicklable and not hint:
        hint = "; send what it is made of, or keep it where it is and send a reference (RRef)"
    return kind(f"cannot send {where}, a {culprit.__module__}.{culprit.__qualname__}: {_text(error)}{hint}")


def _names_something_missing(error: Exception) -> bool:
    from farcall.foreign_errors import is_attribute_missing  # most programs never need it

    return isinstance(error, ModuleNotFoundError | FunctionNotFound) or (
        isinstance(error, AttributeError) and is_attribute_missing(error)
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
