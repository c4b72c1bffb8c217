"""On which streams of the devices calls run: one lane, a stream of each device, for each call that is under way.

The rules a program can rely on:
- A call sees what its caller had put onto its current stream: decoding waits for that, by events.
- A function runs with a lane's streams as the current ones, from the reading of its arguments to the writing of its
  answer. Calls that overlap have different lanes; a call that begins after another one has returned sees all that
  this one had put onto its streams, so that a model that was stepped by one call is used by the next.
- A result is ready on the stream of whoever waits for it.

Sequential calls use the same lane again, the warmest first: memory that torch keeps is kept by stream.

    a lane   by            becomes
    idle     enter         taken: it waits for what other lanes that are idle have still under way
    taken    leave         idle, with an event behind its work
    taken    keep          taken until ``leave`` is called for it: by what goes on after the thread (a coroutine)

Nothing here is made, and no device is looked at, in a node without devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

__all__ = ["Lane", "LaneCoroutine", "LaneTask", "Lanes", "current_streams", "on_streams", "stamp"]

MOST_LANES = 32
"""torch has no more streams of a device."""

T = TypeVar("T")
_set_stream: Any = torch.cuda.set_stream
_future: Any = torch._C.Future


def current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """The current stream of each device."""
    return [torch.cuda.current_stream(device) for device in devices]


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Generator[None, None, None]:
    """Make ``streams`` the current ones of their devices; the current device stays what it is."""
    before = [torch.cuda.current_stream(stream.device) for stream in streams]
    device = torch.cuda.current_device()
    _enter(streams, device)
    try:
        yield
    finally:
        _enter(before, device)


def _enter(streams: Sequence[torch.cuda.Stream], device: int) -> None:
    for stream in streams:
        _set_stream(stream)  # makes its device the current one, too
    if len(streams) != 1 or torch.cuda.current_device() != device:
        torch.cuda.set_device(device)


class Lane:
    """A stream of each device. A context manager: on these streams."""

    __slots__ = ("_before", "_device", "events", "kept", "streams")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self.events: list[torch.cuda.Event] = []
        self.kept = False
        self._before: list[torch.cuda.Stream] = []
        self._device = 0

    def __enter__(self) -> Lane:
        self._device = torch.cuda.current_device()
        self._before = [torch.cuda.current_stream(stream.device) for stream in self.streams]
        _enter(self.streams, self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, self._before = self._before, []
        _enter(before, self._device)


class _Taken(threading.local):
    lane: Lane | None = None


class Lanes:
    """The lanes of one node. ``ordered``: calls that begin see the work of those that have returned."""

    def __init__(self, devices: Callable[[], Sequence[torch.device]], ordered: bool = True) -> None:
        self._devices = devices
        self._ordered = ordered
        self._lock = threading.Lock()
        self._idle: list[Lane] = []  # the warmest last
        self._count = 0
        self._taken = _Taken()

    def take(self) -> Lane:
        """A lane for one call."""
        devices = self._devices()
        with self._lock:
            lane = self._idle.pop() if self._idle else None
            others = [other for other in self._idle if other.events] if self._ordered else []
        if lane is None or len(lane.streams) != len(devices):  # a map came since
            lane = Lane(devices)
        for other in others:
            if all(event.query() for event in other.events):  # type: ignore[no-untyped-call]
                other.events = []
                continue
            for event in other.events:
                for stream in lane.streams:
                    stream.wait_event(event)
        return lane

    def leave(self, lane: Lane) -> None:
        """The call is over on the host; what it has put onto the streams may not be done."""
        if self._ordered:
            lane.events = [stream.record_event() for stream in lane.streams]
        lane.kept = False
        with self._lock:
            if len(self._idle) < MOST_LANES:
                self._idle.append(lane)

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a lane of its own."""
        lane = self.take()
        before, self._taken.lane = self._taken.lane, lane
        try:
            with lane:
                return function()
        finally:
            self._taken.lane = before
            if not lane.kept:
                self.leave(lane)

    def keep(self) -> Lane | None:
        """The lane that the calling thread runs on, to be left by somebody else later."""
        lane = self._taken.lane
        if lane is not None:
            lane.kept = True
        return lane


class LaneTask:
    """A task of the executor, run on a lane."""

    __slots__ = ("_lanes", "_task")

    def __init__(self, task: Any, lanes: Lanes) -> None:
        self._task = task
        self._lanes = lanes

    @property
    def quick(self) -> bool:
        return bool(self._task.quick)

    def run(self, more: bool) -> None:
        self._lanes.run(lambda: self._task.run(more))

    def drop(self) -> None:
        self._task.drop()


class LaneCoroutine(Coroutine[Any, Any, T]):
    """A coroutine, each step of which runs on the lane."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], lane: Lane) -> None:
        self._coroutine = coroutine
        self._lane = lane

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


def stamp(value: Any) -> Any:
    """Remember that ``value`` is ready when what is on the current streams is done; None: nothing of it is on a device.

    ``wait()`` of what is returned has the then current streams wait for that, and keeps the memory until they are done
    with it. torch's own future does all this, for whatever holds tensors.
    """
    extract: Any = torch._jit_internal._extract_tensors
    devices = {tensor.device for tensor in extract(value) if tensor.is_cuda}
    if not devices:
        return None
    future = _future(sorted(devices, key=str))
    future.set_result(value)
    return future
