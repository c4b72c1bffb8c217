"""The streams of devices that calls run on: one of each device (`CallStreams`) for each call under way.

The rules a program can rely on:
- A call sees the work that its caller had put onto its current stream: decoding waits for that, by events.
- A function runs with its call's streams as the current ones, from the reading of its arguments to the writing of its
  answer. Calls that overlap have different streams; a call that begins after another one has returned sees all the work
  on the streams of that one, so that a model stepped by one call is used by the next.
- A result is ready on the stream of the thread that waits for it.

Sequential calls use the same streams again, the warmest first: torch keeps memory by stream. No event is needed then;
one is recorded where a call begins, or ends, on other streams than the call that ended last.

    streams are   by       become
    idle          take     taken: they wait for the calls that have ended, wherever those ran
    taken         leave    idle
    taken         keep     taken until ``leave`` is called for them, by a coroutine that goes on after the thread

Nothing here is made, and no device is looked at, in a node without devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from farcall.channel.device_api import StreamId, current_stream, current_stream_id

MOST_STREAMS = 32
"""torch has no more streams of a device."""

logger: logging.Logger = logging.getLogger("farcall")

T = TypeVar("T")
_C: Any = torch._C


class CallStreams:
    """A stream of each device, for one call. A context manager: they are the current ones; the current device stays."""

    __slots__ = ("_before", "_device", "_ids", "kept", "streams")

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self.streams: Sequence[torch.cuda.Stream] = streams
        self.kept: bool = False
        self._ids: list[StreamId] = [(s.stream_id, s.device_index, s.device_type) for s in streams]
        self._before: list[StreamId] = []
        self._device = 0

    def __enter__(self) -> CallStreams:
        # Through torch's inner functions: those that programs use take ten times as long, and this is once a call.
        self._device = _C._cuda_getDevice()
        self._before = [_C._cuda_getCurrentStream(device) for _, device, _ in self._ids]
        self._set(self._ids)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set(self._before)

    def _set(self, ids: Iterable[StreamId]) -> None:
        index = self._device
        for stream_id, index, kind in ids:
            _C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)  # and its device
        if index != self._device:
            _C._cuda_setDevice(self._device)

    def follow(self, other: CallStreams) -> None:
        """Have these streams wait for the work that is on the other ones now."""
        for mine, theirs in zip(self.streams, other.streams, strict=False):
            if not theirs.query():
                mine.wait_event(theirs.record_event())


class _Taken(threading.local):
    call_streams: CallStreams | None = None


class StreamPool:
    """The streams of one node's calls. ``ordered``: calls that begin see the work of those that have ended."""

    def __init__(self, devices: Callable[[], Sequence[torch.device]], ordered: bool = True) -> None:
        self._devices = devices
        self._ordered = ordered
        self._lock = threading.Lock()
        self._idle: list[CallStreams] = []  # the warmest last
        self._last: CallStreams | None = None  # behind the work of all calls that have ended
        self._taken = _Taken()

    def take(self) -> CallStreams:
        """Streams for one call."""
        devices = self._devices()
        try:
            call_streams = self._idle.pop()
        except IndexError:
            call_streams = None
        if call_streams is None or len(call_streams.streams) != len(devices):  # a map came since
            torch.cuda.init()  # type: ignore[no-untyped-call]
            call_streams = CallStreams([torch.cuda.Stream(device) for device in devices])  # type: ignore[no-untyped-call]
        last = self._last
        if last is not None and last is not call_streams:
            call_streams.follow(last)
        return call_streams

    def leave(self, call_streams: CallStreams) -> None:
        """The call is over on the host; what it has put onto the streams may not be done."""
        call_streams.kept = False
        if self._ordered and self._last is not call_streams:
            with self._lock:
                if self._last is not None:
                    call_streams.follow(self._last)
                self._last = call_streams
        if len(self._idle) < MOST_STREAMS:
            self._idle.append(call_streams)

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on streams of its own; without any where there is no device, or none that works."""
        if not self._devices():
            return function()  # maps may name the CPU alone
        try:
            call_streams = self.take()
        except Exception:
            # Whoever waits for the call must hear of it: that says what uses the device, in the call itself.
            logger.exception("cannot get CUDA streams")
            return function()
        before, self._taken.call_streams = self._taken.call_streams, call_streams
        try:
            with call_streams:
                return function()
        finally:
            self._taken.call_streams = before
            if not call_streams.kept:
                self.leave(call_streams)

    def keep(self) -> CallStreams | None:
        """The streams that the calling thread runs on, to be left later, by another thread."""
        call_streams = self._taken.call_streams
        if call_streams is not None:
            call_streams.kept = True
        return call_streams


class StreamTask:
    """A task of the executor, run on streams of its own."""

    __slots__ = ("_stream_pool", "_task")

    def __init__(self, task: Any, stream_pool: StreamPool) -> None:
        self._task = task
        self._stream_pool = stream_pool

    @property
    def expected_s(self) -> float:
        return float(self._task.expected_s)

    def run(self, more: bool) -> None:
        self._stream_pool.run(lambda: self._task.run(more))

    def drop(self) -> None:
        self._task.drop()


class StreamCoroutine(Coroutine[Any, Any, T]):
    """A coroutine, each step of which runs on its call's streams."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], call_streams: CallStreams) -> None:
        self._coroutine = coroutine
        self._lane = call_streams

    def send(self, value: Any) -> Any:
        with self._lane:
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._lane:
            return self._coroutine.throw(*error)

    def close(self) -> None:
        with self._lane:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("it is run as a task")


class Stamp:
    """When a value on devices is ready: what was on the current streams then. ``wait`` costs the host nothing."""

    __slots__ = ("_events", "_fresh", "_tensors")

    def __init__(self, devices: Iterable[int], tensors: list[torch.Tensor], fresh: bool = False) -> None:
        """``fresh``: the memory of ``tensors`` is of the current streams, and of no third one."""
        self._fresh = fresh
        self._events = [
            (device, current_stream_id(device), current_stream(device).record_event()) for device in devices
        ]
        self._tensors = tensors

    def wait(self) -> None:
        """Have the current streams wait for it, and its memory be kept until they are done with it."""
        elsewhere = set()
        for device, made_on, event in self._events:
            if current_stream_id(device) != made_on:
                elsewhere.add(device)
                current_stream(device).wait_event(event)
        for tensor in self._tensors:
            if not self._fresh or tensor.get_device() in elsewhere:
                tensor.record_stream(current_stream(tensor.get_device()))


def stamp(value: Any, devices: Sequence[torch.device], fresh: bool = False) -> Stamp | None:
    """The stamp of a value made just now; None: it is known to have nothing on a device.

    ``fresh``: it was read from a message, on the current streams.

    In tensors, modules and containers what is on devices is found. Other objects are not looked into: they may have
    something on any of the node's ``devices``.
    """
    found: list[torch.Tensor] = []
    if _find(value, found):
        return Stamp({tensor.get_device() for tensor in found}, found, fresh) if found else None
    return Stamp({*(device.index for device in devices), *(tensor.get_device() for tensor in found)}, found, fresh)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _find(value: Any, found: list[torch.Tensor]) -> bool:
    """Add the tensors on devices in ``value`` to ``found``; False: there may be others."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda and value.layout is torch.strided:
            found.append(value)
        return value.is_cpu or value.layout is torch.strided
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, list | tuple):
        return False not in [_find(part, found) for part in value]
    if isinstance(value, dict):
        return _find([*value.values()], found)
    if isinstance(value, torch.nn.Module):
        _find([*value.parameters(), *value.buffers()], found)
    return False
