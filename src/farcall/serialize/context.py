"""The state of one message while it is written (``Encoding``) or read (``Decoding``).

Owns the pickler object, the tables of storages and buffers that grow beside the pickle, and the
thread-local pointer through which rebuild functions find the message they are part of. It does not know how a
tensor is described.

Invariants: ``reset`` leaves an Encoding as ``__init__`` did, so one object serves message after message;
contexts nest (a rebuild function may itself decode a message).
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from farcall.destructors import whole
from farcall.errors import Delivery, SerializationError
from farcall.protocol.frames import Frame
from farcall.serialize.policy import REDUCERS

if TYPE_CHECKING:
    from farcall.serialize.devices import DeviceRecord, DeviceTable
    from farcall.serialize.spans import SegmentTable, StorageRecord

IN_BAND_LIMIT_BYTES = 4096
"""Up to this size, memory is cheaper inside the pickle than as a separate buffer of the frame."""

_PROTOCOL = 5
# Pickle's extension codes name a function by a number: reading one costs a dict lookup, not an import. The
# first number spells "farc", to avoid collisions with the registrations of other libraries.
_FIRST_EXTENSION_CODE = 0x66617263

Function = TypeVar("Function", bound=Callable[..., Any])
Fallback = Callable[[Any, "Encoding"], Any]


class _Chunks(list[bytes]):
    """A file object for the pickler: each write is appended to the list."""

    __slots__ = ()
    write: ClassVar[Callable[..., None]] = list.append


class IfUnsent:
    """An undo for something that the receiver takes over with the message: runs only if the message never left."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __call__(self) -> None:
        self._undo()


class WithCall:
    """An undo for something that only the call needs. Its maker also runs it when the call ends, answered or not."""

    __slots__ = ("_undo", "call_id")

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo
        self.call_id: int = 0  # set by `tie`, once the call is in the table of calls

    def __call__(self) -> None:
        self._undo()


def tie(frame: Frame) -> None:
    """Give every `WithCall` of the request ``frame`` the id of its call."""
    for undo in frame.undo:
        if undo.__class__ is WithCall:
            undo.call_id = frame.call_id


@whole
def withdraw(frame: Frame) -> None:
    """Undo the side effects of writing ``frame``, which may not have been sent. Call in an ``except`` block.

    The error being handled decides which of them: farcall's errors say whether the message may have arrived.
    """
    unsent = not frame.handed_over or getattr(sys.exception(), "delivery", None) is Delivery.NOT_SENT
    for undo in frame.undo:
        if unsent or undo.__class__ is not IfUnsent:
            undo()
    frame.undo = ()
    if frame.message_id:
        frame.recording.withdraw_send(frame.message_id)
        frame.message_id = 0


def decline(frame: Frame, peer: Any) -> None:
    """Report to the autograd context that ``frame`` came from ``peer`` and nobody will read it."""
    if frame.message_id and frame.recording is not None:
        frame.recording.decline_receive(peer, frame.message_id)


class _Seeds:
    """Functions that every message's memo holds from the start, so that naming one costs two bytes.

    A fresh pickler's memo already holds them, and ``prelude`` makes the unpickler's memo hold them too.
    Without this, naming a rebuild function costs more than all the rest of a small tensor.
    """

    __slots__ = ("functions", "memo", "prelude")

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []
        self.memo: Any = {}
        self.prelude: bytes = pickle.PROTO + bytes([_PROTOCOL])

    def add(self, function: Callable[..., Any]) -> None:
        code = _FIRST_EXTENSION_CODE + len(self.functions)
        copyreg.add_extension(function.__module__, function.__qualname__, code)
        self.functions.append(function)
        self.prelude += pickle.EXT4 + code.to_bytes(4, "little") + pickle.MEMOIZE + pickle.POP
        seeded = pickle.Pickler(_Chunks(), _PROTOCOL)
        seeded.memo = {id(known): (index, known) for index, known in enumerate(self.functions)}
        # Keep the memo proxy, not the dict: assigning a proxy to a pickler is one C-level copy of a small table.
        self.memo = seeded.memo


SEEDS = _Seeds()


def seed(function: Function) -> Function:
    """Decorate a rebuild function that hot messages use; the order of registration is part of the format."""
    SEEDS.add(function)
    return function


_Tensor = torch.Tensor


class Encoding(pickle.Pickler):
    """One message being written. Mutable: every field belongs to the present message; `reset` clears them."""

    __slots__ = (
        "buffers",
        "chunks",
        "contextual",
        "device_records",
        "fallback",
        "inline_count",
        "is_request",
        "kept",
        "notes",
        "peer",
        "records",
        "storages",
        "temporaries",
        "tensors",
        "undo",
    )

    peer: Any
    """The receiver of the message; reducers of references need it."""
    tensors: list[torch.Tensor] | None
    """Every tensor met, in the order in which the reader meets them; None if no autograd context records them."""
    temporaries: bool
    """May a reducer have made objects that only the memo holds, and whose destructors run code?"""
    is_request: bool
    """Is this a call, and not an answer? Device maps have a direction."""
    device_records: list[DeviceRecord] | None
    """Storages on devices, or bound for one; None if the message has none."""

    def __init__(self, fallback: Fallback) -> None:
        self.chunks: _Chunks = _Chunks()
        super().__init__(self.chunks, _PROTOCOL, buffer_callback=self._take_buffer)
        self.fallback: Fallback = fallback
        self.peer = None
        self.tensors = None
        self.is_request = False
        self.device_records = None
        self.contextual: bool = False
        self.buffers: list[memoryview] = []
        self.storages: dict[int, int | StorageRecord | DeviceRecord] = {}
        self.records: list[StorageRecord] = []
        self.inline_count: int = 0
        self.temporaries = False
        self.kept: list[Any] = []
        self.notes: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.memo = SEEDS.memo

    def reducer_override(self, value: Any) -> Any:
        """Reduce ``value``; the pickler calls this for everything that is not a builtin value."""
        kind = type(value)
        if kind is not _Tensor:
            self.temporaries = True
        reducer = REDUCERS.get(kind)
        if reducer is not None:
            self.contextual = True
            return reducer(value, self)
        return self.fallback(value, self)

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Register the undo of a reducer's side effect, for the case that the message cannot be written or sent."""
        self.undo.append(undo)

    def note(self, note: Any, undo: Callable[[], None]) -> int:
        """Send ``note`` beside the pickle; return its index. ``undo``: see ``on_failure`` and `withdraw`."""
        self.on_failure(undo)
        self.notes.append(note)
        return len(self.notes) - 1

    def reset(self) -> None:
        """Forget the message."""
        # Objects that reducers made for this message live in the memo alone. None of them may die while pickle empties
        # the memo: a garbage collection at that moment, in a destructor or after one released the GIL (as those of
        # tensors do), would visit freed entries. So a copy keeps them alive until the memo is replaced.
        held = self.memo.copy() if self.temporaries else None
        # Replace the memo by a new small table: a cleared one keeps the size of the largest message ever sent, and
        # each later clearing would cost as much.
        self.memo = SEEDS.memo
        if held is not None:
            self.temporaries = False
            del held
        self.chunks.clear()
        if self.undo:
            self.undo = []
            self.notes = []
        if self.contextual or self.buffers:
            self.contextual = False
            self.peer = self.tensors = None
            self.buffers = []
            self.storages.clear()
            self.records = []
            self.device_records = None
            self.inline_count = 0
            self.kept.clear()
        else:
            self.peer = self.tensors = None

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Move a large buffer out of the pickle; True leaves a small one in."""
        memory = buffer.raw()
        if memory.nbytes <= IN_BAND_LIMIT_BYTES:
            return True
        self.buffers.append(memory)
        return False


class Decoding:
    """One message being read. Mutable: ``inline``, ``storages`` and ``tensors`` grow as tensors are rebuilt."""

    __slots__ = ("buffers", "devices", "forks", "inline", "peer", "segments", "storages", "table", "tensors")

    def __init__(
        self,
        buffers: Sequence[memoryview],
        peer: Any = None,
        tensors: list[torch.Tensor] | None = None,
        segments: SegmentTable | None = None,
        forks: Sequence[Any] = (),
    ) -> None:
        self.buffers: Sequence[memoryview] = buffers
        self.forks: Sequence[Any] = forks
        self.peer: Any = peer
        self.tensors: list[torch.Tensor] | None = tensors
        self.segments: SegmentTable | None = segments
        self.devices: DeviceTable | None = None
        self.inline: list[torch.Tensor] = []
        self.storages: dict[Any, torch.Tensor] = {}
        self.table: Sequence[torch.Tensor] = ()


class _Current(threading.local):
    decoding: Decoding | None = None
    encoding: Encoding | None = None


CURRENT = _Current()


def current_decoding() -> Decoding:
    """Return the message that this thread is reading. For rebuild functions."""
    decoding = CURRENT.decoding
    if decoding is None:
        raise SerializationError("this value can only be read as part of a farcall message, not by pickle alone")
    return decoding


def current_encoding() -> Encoding | None:
    """Return the message that a user's pickler is writing in this thread, if any."""
    return CURRENT.encoding


def enter_decoding(decoding: Decoding | None) -> Decoding | None:
    """Make ``decoding`` this thread's current message; return the previous one, to be restored later."""
    previous = CURRENT.decoding
    CURRENT.decoding = decoding
    return previous


def enter_encoding(encoding: Encoding | None) -> Encoding | None:
    """Make ``encoding`` the message that a user's pickler writes for; return the previous one."""
    previous = CURRENT.encoding
    CURRENT.encoding = encoding
    return previous
