"""The device streams that calls run on: each call under way has one stream per device (`CallStreams`).

Programs can rely on these rules:
- A call sees the work that its caller had put onto its current stream: decoding waits for that, by events.
- A function runs with its call's streams as the current ones, from reading its arguments to writing its answer. Calls
  that overlap have different streams; a call that begins after another one has returned sees all work on the streams of
  the earlier call, so the next call uses the model that the last one stepped.
- A result is ready on the stream of the thread that waits for it.

Sequential calls reuse the same streams, the warmest first, since torch caches memory per stream. That needs no event;
an event is recorded if a call begins, or ends, on other streams than the call that ended last.

    streams are   by       become
    idle          take     taken: they wait for the calls that have ended, wherever those ran
    taken         leave    idle
    taken         keep     taken until ``leave``, by a coroutine that goes on after the thread

A node without devices makes no streams, and touches no device.
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
"""How many streams torch has per device."""

logger: logging.Logger = logging.getLogger("farcall")

T = TypeVar("T")
_C: Any = torch._C


class CallStreams:
    """One stream per device, for one call. As a context manager, makes them current; the current device stays."""

    __slots__ = ("_before", "_device", "_ids", "kept", "streams")

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self.streams: Sequence[torch.cuda.Stream] = streams
        self.kept: bool = False
        self._ids: list[StreamId] = [(s.stream_id, s.device_index, s.device_type) for s in streams]
        self._before: list[StreamId] = []
        self._device = 0

    def __enter__(self) -> CallStreams:
        # With torch's private functions: the public ones take ten times as long, and every call passes here.
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
            # Also makes the stream's device the current one, hence the reset below.
            _C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)
        if index != self._device:
            _C._cuda_setDevice(self._device)

    def follow(self, other: CallStreams) -> None:
        """Make these streams wait for the work on the streams of ``other``."""
        for mine, theirs in zip(self.streams, other.streams, strict=False):
            if not theirs.query():
                mine.wait_event(theirs.record_event())


class _Taken(threading.local):
    """The streams of the call that the current thread runs."""

    call_streams: CallStreams | None = None


class StreamPool:
    """The streams of one node's calls. ``ordered``: a call that begins sees the work of the calls that have ended."""

    def __init__(self, devices: Sequence[torch.device], ordered: bool = True) -> None:
        """``devices``: a list that grows when peers' maps arrive."""
        self._devices = devices
        self._ordered = ordered
        self._lock = threading.Lock()
        self._idle: list[CallStreams] = []  # the warmest last
        self._last: CallStreams | None = None  # under the lock; its streams follow the work of all ended calls
        self._taken = _Taken()

    def take(self) -> CallStreams:
        """Streams for one call, behind the work of the calls that have ended."""
        try:
            call_streams = self._idle.pop()
        except IndexError:
            call_streams = None
        if call_streams is None or len(call_streams.streams) != len(self._devices):  # a new map added a device
            torch.cuda.init()  # type: ignore[no-untyped-call]
            call_streams = CallStreams([torch.cuda.Stream(device) for device in self._devices])  # type: ignore[no-untyped-call]
        last = self._last
        if last is not None and last is not call_streams:
            call_streams.follow(last)
        return call_streams

    def leave(self, call_streams: CallStreams) -> None:
        """The call has ended on the host; its work on the streams may still run."""
        call_streams.kept = False
        if self._ordered and self._last is not call_streams:
            with self._lock:
                if self._last is not None:
                    call_streams.follow(self._last)
                self._last = call_streams
        if len(self._idle) < MOST_STREAMS:
            self._idle.append(call_streams)

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on its own streams; without any if there is no device, or none works."""
        if not self._devices:
            return function()  # maps may name only the CPU
        try:
            call_streams = self.take()
        except Exception:
            # Run it all the same, so that the caller gets an error: the function fails where it uses the device.
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
        """Keep the streams of the calling thread's call; another thread must `leave` them later."""
        call_streams = self._taken.call_streams
        if call_streams is not None:
            call_streams.kept = True
        return call_streams


class StreamTask:
    """A task of the executor that runs another task on its own streams."""

    __slots__ = ("_stream_pool", "_task")

    def __init__(self, task: Any, stream_pool: StreamPool) -> None:
        self._task = task
        self._stream_pool = stream_pool

    def run(self, more: bool) -> None:
        self._stream_pool.run(lambda: self._task.run(more))

    def drop(self) -> None:
        self._task.drop()


class StreamCoroutine(Coroutine[Any, Any, T]):
    """A coroutine, each step of which runs on its call's streams."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], call_streams: CallStreams) -> None:
        self._coroutine = coroutine
        self._call_streams = call_streams

    def send(self, value: Any) -> Any:
        with self._call_streams:
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._call_streams:
            return self._coroutine.throw(*error)

    def close(self) -> None:
        with self._call_streams:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("it is run as a task")


class Stamp:
    """When a value on devices is ready: events on the streams that made it. Streams wait for it, the host never."""

    __slots__ = ("_events", "_fresh", "_tensors")

    def __init__(self, devices: Iterable[int], tensors: list[torch.Tensor], fresh: bool = False) -> None:
        """``fresh``: the memory of ``tensors`` was allocated on the current streams, and no other stream uses it."""
        self._fresh = fresh
        self._events = [
            (device, current_stream_id(device), current_stream(device).record_event()) for device in devices
        ]
        self._tensors = tensors

    def wait(self) -> None:
        """Make the current streams wait for the value, and keep its memory until they are done with it."""
        elsewhere = set()
        for device, made_on, event in self._events:
            if current_stream_id(device) != made_on:
                elsewhere.add(device)
                current_stream(device).wait_event(event)
        for tensor in self._tensors:
            # Without this, torch's allocator could reuse the memory while the current stream still reads it.
            if not self._fresh or tensor.get_device() in elsewhere:
                tensor.record_stream(current_stream(tensor.get_device()))


def stamp(value: Any, devices: Sequence[torch.device], fresh: bool = False) -> Stamp | None:
    """The stamp of a value made just now; None: no part of it is on a device.

    ``fresh``: it was read from a message, on the current streams. Tensors are found in modules and containers; any
    other object may have tensors on each of the node's ``devices``.
    """
    found: list[torch.Tensor] = []
    if _find(value, found, set()):
        return Stamp({tensor.get_device() for tensor in found}, found, fresh) if found else None
    return Stamp({*(device.index for device in devices), *(tensor.get_device() for tensor in found)}, found, fresh)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _find(value: Any, found: list[torch.Tensor], seen: set[int]) -> bool:
    """Add the device tensors in ``value`` to ``found``; False: it may have others, which were not found.

    ``seen``: the containers that this is inside of, or has left: one may hold itself.
    """
    if isinstance(value, torch.Tensor):
        if value.is_cuda and value.layout is torch.strided:
            found.append(value)
        return value.is_cpu or value.layout is torch.strided
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, list | tuple | dict):
        if id(value) in seen:
            return True  # counted where it was seen first
        seen.add(id(value))
        parts = [*value.values()] if isinstance(value, dict) else value
        return False not in [_find(part, found, seen) for part in parts]
    if isinstance(value, torch.nn.Module):
        for tensor in [*value.parameters(), *value.buffers()]:
            _find(tensor, found, seen)
    return False
