"""Where profiling takes hold of calls, of the functions that serve them, and of backward passes.

Owns the question whether anybody profiles, which costs one C function when nobody does, and the slot by which
`farcall.observe`, a layer above, takes part. It does not know what is recorded or where it goes.

Invariant: without a profiler nothing of a call changes, neither its bytes nor the way it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from farcall.protocol.notes import ProfileWanted

__all__ = ["PROFILING", "CallProfile", "RunProfile", "is_profiled"]

_autograd: Any = torch.autograd
is_profiled: Final[Callable[[], bool]] = _autograd._profiler_enabled
"""Is the calling thread inside a profiler of torch's?"""


class CallProfile(Protocol):
    """One call, as its caller's profiler sees it."""

    def sends(self, payload: bytes | memoryview, buffers: Sequence[memoryview]) -> ProfileWanted:
        """The request is about to leave; what is to be noted in it."""

    def ended(self, profiled: bytes = b"", size_bytes: int = 0) -> None:
        """The answer came, with what the callee recorded; or none will come. Only the first time counts."""


class RunProfile(Protocol):
    """One request, or one worker's part in a backward pass, as it is profiled where it runs."""

    def run(self, func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a part of it, on the calling thread."""

    def steps(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """The same coroutine, each step of which is a part."""

    def pause(self) -> None:
        """Within a part: what follows does not belong to it."""

    def finish(self, name: str) -> bytes:
        """It is done: what was recorded, to be sent home."""


class _Profiling:
    """What `farcall.observe` has put in; nothing, where it is not loaded."""

    __slots__ = ("begin_call", "begin_run", "carry", "clock_ns", "everywhere")

    def __init__(self) -> None:
        self.clock_ns: Callable[[], int] = time.time_ns
        """The clock of all spans: that of the wall, since torch's profilers use it too."""
        self.everywhere: int = 0
        """How many wish to know of everything that this process does, on whatever thread."""
        # (node, peer, how: as in "rpc_sync" or "backward", what, the run that calls: by default this thread's)
        self.begin_call: Callable[[Any, Any, str, Any, Any], CallProfile | None] = lambda *_: None
        # (the worker that runs, what its caller wants)
        self.begin_run: Callable[[Any, ProfileWanted | None], RunProfile | None] = lambda *_: None
        # A callback of a future, which runs later and elsewhere, becomes one that is profiled as this thread is.
        self.carry: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda callback: callback


PROFILING: Final = _Profiling()
