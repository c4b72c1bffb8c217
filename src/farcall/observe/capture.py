"""The operators that torch runs on one thread between two moments, as spans.

Uses torch's legacy profiler, which is per thread: any number of requests can be profiled at once, and the threads of a
backward pass are included. Kineto was rejected: it has one session per process, which may be the user's. The parser is
torch's own (`torch.autograd.profiler_legacy`); without it there are spans of calls and runs only.
"""

from __future__ import annotations

import time
from enum import IntFlag
from types import ModuleType
from typing import Any, Final

import torch

from farcall.observe.spans import OPERATOR, Span
from farcall.runtime.observing.profiling import PROFILING, is_profiled

legacy: ModuleType | None
try:
    from torch.autograd import profiler_legacy as legacy
except ImportError:  # it is deprecated
    legacy = None


class Detail(IntFlag):
    """The details of operators besides names and times; a caller's choice travels as the sum of its bits."""

    SHAPES = 1
    MEMORY = 2
    STACKS = 4
    FLOPS = 8
    MODULES = 16
    DEVICE = 32
    """Time on the device, if there is one."""


Records = list[list[Any]]
"""The records of torch's profiler, one list per thread."""

_autograd: Any = torch.autograd
_parse: Any = None if legacy is None else legacy._parse_legacy_records
_OTHER_THREADS: Final = 1 << 24
"""Threads with torch's own numbering get numbers from here on, above all thread ids of the system."""


def start(options: int) -> bool:
    """Begin on the calling thread; False: torch cannot, or another profiler runs on it."""
    if legacy is None or is_profiled():
        return False
    device = options & Detail.DEVICE and torch.cuda.is_available()
    _autograd._enable_profiler_legacy(
        _autograd.ProfilerConfig(
            _autograd.ProfilerState.CUDA if device else _autograd.ProfilerState.CPU,
            bool(options & (Detail.SHAPES | Detail.FLOPS)),
            bool(options & Detail.MEMORY),
            bool(options & Detail.STACKS),
            bool(options & Detail.FLOPS),
            bool(options & Detail.MODULES),
            torch._C._profiler._ExperimentalConfig(),
        )
    )
    return True


def stop() -> Records:
    """End on the calling thread."""
    records: Records = _autograd._disable_profiler_legacy()
    return records


def start_record(records: Records) -> Any:
    """The record of the start, from which times are counted."""
    return next(record for thread in records for record in thread if record.name() == "__start_profile")


def start_ns(record: Any) -> int:
    """The time of the start record, by the clock of spans."""
    ahead_ns = 0 if PROFILING.clock_ns is time.time_ns else PROFILING.clock_ns() - time.time_ns()
    return int(record.start_us() * 1000) + ahead_ns


def to_spans(records: Records, worker: int, thread: int, call: int) -> list[Span]:
    """The operators among ``records``; ``thread`` is the system's id of the thread that called `start`."""
    began = start_record(records)
    base_ns = start_ns(began)
    mine = began.thread_id()
    return [
        Span(
            OPERATOR,
            worker,
            thread if event.thread == mine else _OTHER_THREADS + event.thread,
            event.name,
            base_ns + int(event.time_range.start * 1000),
            base_ns + int(event.time_range.end * 1000),
            call,
            0,
            _details(event),
        )
        for event in _parse(records)
    ]


_DETAILS: Final = {
    "shapes": "input_shapes",
    "cpu_bytes": "cpu_memory_usage",
    "device_bytes": "device_memory_usage",
    "stack": "stack",
    "flops": "flops",
    "scope": "scope",
    "async": "is_async",
}
"""From the name of a span's detail to the attribute of torch's event that holds it."""


def _details(event: Any) -> dict[str, Any]:
    found = {ours: value for ours, theirs in _DETAILS.items() if (value := getattr(event, theirs))}
    if event.trace_name is None:
        found["timeless"] = True  # memory allocated or freed outside of any operator
    if event.kernels:
        found["kernels"] = [(kernel.name, kernel.device, kernel.duration) for kernel in event.kernels]
    if event.sequence_nr is not None and event.sequence_nr >= 0:
        found["sequence"] = event.sequence_nr
        found["forward_thread"] = event.fwd_thread
    return found
