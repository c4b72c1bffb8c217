"""torch's own profilers as homes of remote records: `torch.profiler`, autograd's profiler and the legacy one.

Each of them, when it starts on a thread, gets a collector for that thread's calls; when its results are read, the
harvest is part of them:

    profiler                     operators of other workers, and calls, are in
    torch.profiler, autograd's   the file that ``export_chrome_trace`` writes
    profiler_legacy              the same, and ``function_events`` with all that is made of them

``torch.profiler``'s own list of events stays as torch makes it: PyTorch's suite wants no RPC in it, and
`farcall.profile` has a list. torch offers no hook for this, so a few methods of its classes are wrapped, once, when
this module is loaded; a profiler that was started before has only what happens on its own worker. The first profiler
that starts loads what records (`profile.py`): most programs never do.

Invariant: torch's own work is done, unchanged and first.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from farcall.imports import when_imported
from farcall.protocol.notes import ProfileWanted
from farcall.runtime.observing.profiling import PROFILING, RunProfile

if TYPE_CHECKING:
    from farcall.observe.profile import ProfilerSession

_ATTRIBUTE = "_farcall_session"
_WRAPPED = "_farcall_wraps"


class _Closing(threading.local):
    """The session whose profiler is about to read what was recorded on the calling thread."""

    session: ProfilerSession | None = None


_CLOSING = _Closing()


class _LateProfiler:
    """In the place of this process's profiler, until a profiler of torch's starts here, or at a caller.

    Nobody collects until then, so there is nothing to do for calls that are made.
    """

    def begin_call(self, node: Any, peer: Any, kind: str, what: Any, run: Any) -> None:
        return None

    def begin_run(self, worker: Any, wanted: ProfileWanted | None) -> RunProfile | None:
        if wanted is None or not wanted.home:
            return None  # nobody would hear of it
        from farcall.observe.profile import PROFILER  # which takes this one's place

        return PROFILER.begin_run(worker, wanted)

    def carry(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return callback


def _start(original: Callable[[Any], None], self: Any) -> None:
    from farcall.observe.profile import ProfilerSession

    session = ProfilerSession(self)  # first: it makes room for another profiler on this thread
    try:
        original(self)
    except BaseException:
        session.leave()
        raise
    setattr(self, _ATTRIBUTE, session)
    session.enter()


def _exit(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    session: ProfilerSession | None = getattr(self, _ATTRIBUTE, None)
    _CLOSING.session = session  # for `_parse`
    try:
        return original(self, *args)
    finally:
        _CLOSING.session = None
        if session is not None:
            session.leave()


def _export(original: Callable[..., Any], self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, path, *args, **kwargs)
    session: ProfilerSession | None = getattr(self, _ATTRIBUTE, None)
    if session is not None and session.worker is not None:
        from farcall.observe.trace import add_to_trace

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
    session = _CLOSING.session
    if session is not None and session.worker is not None:
        from farcall.observe import capture
        from farcall.observe.trace import function_events

        began = capture.start_record(records)
        base_ns = capture.start_ns(began)
        events += function_events(session.everything(), session.worker.id, base_ns, began.thread_id())
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return events


def install() -> None:
    """Wrap torch's methods; once is enough."""
    PROFILING.use(_LateProfiler())
    _wrap(profiler.profile, "_start_trace", _start)
    _wrap(profiler.profile, "__exit__", _exit)
    _wrap(profiler.profile, "export_chrome_trace", _export)
    when_imported("torch.autograd.profiler_legacy", _wrap_legacy)  # it is deprecated: one day there is none


def _wrap_legacy(legacy: Any) -> None:
    _wrap(legacy.profile, "_start_trace", _start)
    _wrap(legacy.profile, "__exit__", _exit)
    _wrap(legacy, "_parse_legacy_records", _parse)


install()
