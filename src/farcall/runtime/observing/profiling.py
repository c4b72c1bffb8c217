"""The hooks of profiling: in calls, in the functions that serve them, and in backward passes.

Owns the question whether this thread is profiled, which costs one C function, and the place where `farcall.observe`, a
layer above, puts its `Profiler`. Knows neither the records nor their way.

Invariant: without a profiler a call has the same bytes, and takes the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from farcall.protocol.notes import ProfileWanted

_autograd: Any = torch.autograd
is_profiled: Final[Callable[[], bool]] = _autograd._profiler_enabled
"""Is the calling thread inside a profiler of torch's?"""


class CallProfile(Protocol):
    """A call, as its caller's profiler sees it."""

    def sends(self, payload: bytes | memoryview, buffers: Sequence[memoryview]) -> ProfileWanted:
        """Note the request's size just before it leaves; return the wish that travels in its notes."""

    def ended(self, profiled: bytes = b"", size_bytes: int = 0) -> None:
        """Take the callee's record with the answer, or give up on one. Only the first time counts."""


class RunProfile(Protocol):
    """A request, or one worker's part in a backward pass, profiled where it runs."""

    def run(self, func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a part of it on the calling thread."""

    def steps(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Wrap ``coroutine`` so that each of its steps is a part."""

    def pause(self) -> None:
        """End the current part early: the next steps of this thread do not belong to it."""

    def finish(self, name: str) -> bytes:
        """End the run; return its record, to be sent home."""


class Profiler(Protocol):
    """The recorder of calls and runs; `farcall.observe` has the only one."""

    def begin_call(self, node: Any, peer: Any, kind: str, what: Any, run: Any) -> CallProfile | None:
        """Begin a call; ``kind`` is "sync" or "backward", for example. ``run`` makes the call; None: this thread."""

    def begin_run(self, worker: Any, wanted: ProfileWanted | None) -> RunProfile | None:
        """Begin a run on ``worker`` whose caller has wished for ``wanted``."""

    def carry(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a future's callback, which runs later and elsewhere, to be profiled as this thread is."""


class _Profiling:
    """The process's profiler, once there is one, and whether it must hear of everything."""

    __slots__ = ("clock_ns", "everywhere", "load", "profiler")

    def __init__(self) -> None:
        self.profiler: Profiler | None = None
        self.load: Callable[[], Profiler] | None = None
        """Makes the profiler, and sets it; `farcall.observe` has it. Most programs never need one."""
        self.clock_ns: Callable[[], int] = time.time_ns
        """The clock of all spans: the wall's, since torch's profilers use it too."""
        self.everywhere: int = 0
        """The number of recordings of all threads of this process."""

    def begin_call(self, node: Any, peer: Any, kind: str, what: Any, run: Any) -> CallProfile | None:
        """See `Profiler`."""
        return None if self.profiler is None else self.profiler.begin_call(node, peer, kind, what, run)

    def begin_run(self, worker: Any, wanted: ProfileWanted | None) -> RunProfile | None:
        """See `Profiler`; loads it where a caller wants the record."""
        profiler = self.profiler
        if profiler is None:
            if self.load is None or wanted is None or not wanted.home:
                return None  # nobody would hear of it
            profiler = self.load()
        return profiler.begin_run(worker, wanted)

    def carry(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """See `Profiler`."""
        return callback if self.profiler is None else self.profiler.carry(callback)


PROFILING: Final = _Profiling()
