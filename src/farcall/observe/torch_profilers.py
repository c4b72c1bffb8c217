"""Remote records in torch's own profilers: `torch.profiler`, autograd's profiler and the legacy one.

When one of them starts on a thread, it gets a collector for that thread's calls; when its results are read, the
harvest is part of them:

    profiler                     operators of other workers, and calls, are in
    torch.profiler, autograd's   the file that ``export_chrome_trace`` writes
    profiler_legacy              that file, and ``function_events``, on which its tables are built

``torch.profiler``'s own list of events stays as torch makes it: PyTorch's suite expects no RPC in it, and
`farcall.profile` has its own list. torch offers no hook for this, so the methods that start a profiler are wrapped
while this process has a node; one that starts meanwhile becomes an instance of a derived class, so that its end is
known also after the node's. A profiler that was started earlier has the records of its own worker only. The first
profiler that starts loads `profile.py`, the recorder: most programs never need it.

Invariant: torch's own method runs first and unchanged.
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
from farcall.runtime.node.current import while_there_are_nodes
from farcall.runtime.observing.profiling import PROFILING, Profiler

if TYPE_CHECKING:
    from farcall.observe.profile import ProfilerSession

_ATTRIBUTE = "_farcall_session"
_DERIVED: dict[type[Any], type[Any]] = {}
_WRAPPED: list[tuple[Any, str, Any, Callable[..., Any]]] = []
"""What is wrapped now: where, its name, torch's own, and what is around it."""


class _Closing(threading.local):
    """The session whose profiler is about to read the records of the calling thread."""

    session: ProfilerSession | None = None


_CLOSING = _Closing()


def _load() -> Profiler:
    from farcall.observe.profile import PROFILER  # sets itself as the process's profiler

    return PROFILER


def _start(original: Callable[[Any], None], self: Any) -> None:
    from farcall.observe.profile import ProfilerSession

    session = ProfilerSession(self)  # first: it suspends farcall's own profiler on this thread
    try:
        original(self)
    except BaseException:
        session.leave()
        raise
    setattr(self, _ATTRIBUTE, session)
    self.__class__ = _with_our_end(type(self))
    session.enter()


def _with_our_end(kind: type[Any]) -> type[Any]:
    """The class of a started profiler, which `torch.profiler` ends and exports by name, perhaps after the node's end.

    A ``with`` statement has looked up ``__exit__`` before the profiler started, so the class needs it as well.
    """
    if kind not in _DERIVED:
        own = {name: _around(original, around) for place, name, original, around in _WRAPPED if place is kind}
        _DERIVED[kind] = type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
    return _DERIVED[kind]


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


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper


def _wrap(place: Any, name: str, around: Callable[..., Any]) -> None:
    original = place.__dict__[name]
    _WRAPPED.append((place, name, original, around))
    setattr(place, name, _around(original, around))


def _parse(original: Callable[[Any], Any], records: Any) -> Any:
    """Add our events when the legacy profiler parses its records, at its end."""
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


def _begin() -> Callable[[], None]:
    PROFILING.load = _load
    _wrap(profiler.profile, "_start_trace", _start)
    _wrap(profiler.profile, "__exit__", _exit)
    _wrap(profiler.profile, "export_chrome_trace", _export)
    # Deprecated: a later torch may lack it.
    stop_waiting = when_imported("torch.autograd.profiler_legacy", _wrap_legacy)

    def end() -> None:
        stop_waiting()
        while _WRAPPED:
            place, name, original, _ = _WRAPPED.pop()
            setattr(place, name, original)

    return end


def _wrap_legacy(legacy: Any) -> None:
    _wrap(legacy.profile, "_start_trace", _start)
    _wrap(legacy.profile, "__exit__", _exit)
    _wrap(legacy, "_parse_legacy_records", _parse)


while_there_are_nodes(_begin)
