"""torch's own profilers as homes of remote records: `torch.profiler`, autograd's profiler and the legacy one.

Each of them, when it starts on a thread, gets a collector for that thread's calls; when its results are read, the
harvest is part of them:

    profiler                     operators of other workers, and calls, are in
    torch.profiler, autograd's   the file that ``export_chrome_trace`` writes
    profiler_legacy              the same, and ``function_events`` with all that is made of them

``torch.profiler``'s own list of events stays as torch makes it: PyTorch's suite wants no RPC in it, and
`farcall.profile` has a list. torch offers no hook for this, so a few methods of its classes are wrapped, once, when
this module is loaded; a profiler that was started before has only what happens on its own worker.

Invariant: torch's own work is done, unchanged and first.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.autograd import profiler

from farcall.observe import capture
from farcall.observe.capture import Detail, legacy
from farcall.observe.profile import THREAD, Collector, Run
from farcall.observe.trace import add_to_trace, function_events

__all__ = ["ProfilerSession", "install"]

_ATTRIBUTE = "_farcall_session"
_WRAPPED = "_farcall_wraps"


class ProfilerSession(Collector):
    """The collector of a thread on which a profiler of torch's is at work."""

    def __init__(self, owner: Any) -> None:
        super().__init__(_options_of(owner))
        self.outside = THREAD.collector
        self._suspended = isinstance(self.outside, Run) and self.outside.suspend()

    def leave(self) -> None:
        """End with the profiler; answers that come later still count."""
        if THREAD.collector is self:
            THREAD.collector = self.outside
        if self._suspended and isinstance(self.outside, Run):
            self.outside.resume()
        self.outside = None


def _options_of(owner: Any) -> int:
    """The bits that ask callees for the details that this profiler records here."""
    wanted = {
        Detail.SHAPES: "record_shapes",
        Detail.MEMORY: "profile_memory",
        Detail.STACKS: "with_stack",
        Detail.FLOPS: "with_flops",
        Detail.MODULES: "with_modules",
        Detail.DEVICE: "use_cuda",
    }
    options = sum(bit for bit, name in wanted.items() if getattr(owner, name, False))
    return int(options | (Detail.DEVICE if getattr(owner, "use_device", None) else 0))


def _start(original: Callable[[Any], None], self: Any) -> None:
    session = ProfilerSession(self)  # first: it makes room for another profiler on this thread
    try:
        original(self)
    except BaseException:
        session.leave()
        raise
    setattr(self, _ATTRIBUTE, session)
    THREAD.collector = session


def _exit(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    session: ProfilerSession | None = getattr(self, _ATTRIBUTE, None)
    THREAD.closing = session  # for `_parse`
    try:
        return original(self, *args)
    finally:
        THREAD.closing = None
        if session is not None:
            session.leave()


def _export(original: Callable[..., Any], self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, path, *args, **kwargs)
    session: ProfilerSession | None = getattr(self, _ATTRIBUTE, None)
    if session is not None and session.worker is not None:
        file = Path(path)
        trace = json.loads(file.read_text())
        if isinstance(trace, dict):  # and not the bare list of a torch without Kineto
            add_to_trace(trace, session.everything(), session.worker.id, os.getpid())
            file.write_text(json.dumps(trace))
    return result


def _wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:
    original = kind.__dict__[name]
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _WRAPPED, original)
    setattr(kind, name, wrapper)


def _parse(original: Callable[[Any], Any], records: Any) -> Any:
    """Add our events where the legacy profiler parses its records, which it does when it ends."""
    events = original(records)
    session = THREAD.closing
    if isinstance(session, ProfilerSession) and session.worker is not None:
        began = capture.start_record(records)
        base_ns = capture.start_ns(began)
        events += function_events(session.everything(), session.worker.id, base_ns, began.thread_id())
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return events


def install() -> None:
    """Wrap torch's methods; once is enough."""
    _wrap(profiler.profile, "_start_trace", _start)
    _wrap(profiler.profile, "__exit__", _exit)
    _wrap(profiler.profile, "export_chrome_trace", _export)
    if legacy is not None:
        _wrap(legacy.profile, "_start_trace", _start)
        _wrap(legacy.profile, "__exit__", _exit)
        _wrap(legacy, "_parse_legacy_records", _parse)


install()
