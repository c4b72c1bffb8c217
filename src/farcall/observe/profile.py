"""Profiled calls: the caller's request, the callee's record, and the record's way back to the caller.

A `Collector` gathers the spans of one profiled piece of work: a session (a block inside some profiler), or a run (a
request that a profiled caller sent). A thread's collector is thread-local, like torch's own profilers. A call made for
a collector asks, in its notes, to be profiled; its run collects its own spans and the harvests of further calls, and
sends all of it with the answer. So everything ends up in the first session, at any depth.

    object                   on which thread         made by                  gives its spans to
    `ProfilerSession`        the profiled one        `torch_profilers`        the profiler of torch's, at its end
    `Call`                   the caller's            every call made for it   its collector, when the answer is there
    `Run`                    any that serves it      every request that asks  the answer, and recorders of this process

A `ProcessRecorder` hears of all threads of a process.

Invariant: nothing here raises into a call; each span is handed over once.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from threading import current_thread, get_native_id
from typing import Any, Final, Protocol

import msgspec
import torch

from farcall.ids import WorkerInfo
from farcall.observe import capture
from farcall.observe import torch_profilers as torch_profilers  # wraps torch's profilers
from farcall.observe.capture import Detail
from farcall.observe.clocks import Clocks
from farcall.observe.spans import CALL, RUN, Harvest, Span, decode_harvest, encode_harvest
from farcall.protocol.notes import ProfileWanted
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING
from farcall.runtime.peers.peer import Peer, RemotePeer

logger: logging.Logger = logging.getLogger("farcall")

_next_number = itertools.count(1).__next__
_NUMBER_BITS = 32
_KNOWN_NAMES = {"RRef._get_type": "_rref_typeof_on_owner"}


class _Thread(threading.local):
    """The collector of the calling thread."""

    collector: Collector | None = None


THREAD = _Thread()


class ProcessRecorder(Protocol):
    """A recorder of everything that happens in this process."""

    options: int

    def take_harvest(self, worker: WorkerInfo, harvest: Harvest) -> None:
        """Take a call that ``worker`` made for a collector other than this recorder's, or a run on ``worker``."""

    def take_records(self, records: capture.Records) -> None:
        """Take the operators of one part of a run."""

    def collector_of(self, worker: WorkerInfo) -> Collector | None:
        """The collector for calls of ``worker`` that have no other."""


class Collector:
    """The spans of one profiled piece of work. Mutable: its harvest, and its calls in progress."""

    def __init__(self, options: int, inside: int = 0, home: bool = True) -> None:
        self.options = options
        self.inside = inside
        self.home = home  # do callees send their records back?
        self.worker: WorkerInfo | None = None  # the caller, known from the first call on
        self.harvest: Harvest = Harvest([], [], {})
        self.open: dict[int, Call] = {}  # by number

    def everything(self) -> Harvest:
        """The harvest, plus the calls still in progress as if they ended now."""
        found = Harvest([], [], {})
        for call in list(self.open.values()):
            span = call.span(PROFILING.clock_ns(), {"unanswered": True})
            if span.call in self.open:  # else it was answered meanwhile, and is in the harvest
                found.spans.append(span)
                found.names.update(call.names())
        found.add(self.harvest)
        return found


class Call:
    """One call made for a collector; a `CallProfile`."""

    __slots__ = ("_collector", "_details", "_node", "_number", "_peer", "_start_ns", "_thread", "name")

    def __init__(self, node: Runtime, peer: Peer, kind: str, what: Any, collector: Collector) -> None:
        self._start_ns = PROFILING.clock_ns()
        self._node = node
        self._peer = peer
        self._collector = collector
        self._thread = get_native_id()
        self._number = (node.info.id << _NUMBER_BITS) | _next_number()
        self._details: dict[str, Any] = {
            "kind": kind,
            "to": peer.info.name,
            "transport": peer.link.transport.describe() if isinstance(peer, RemotePeer) else "this process",
            "thread": current_thread().name,
        }
        self.name: str = call_name(kind, what, node.info.name, peer.info.name)
        node.part(Clocks).ask(peer)

    def sends(self, payload: bytes | memoryview, buffers: Sequence[memoryview]) -> ProfileWanted:
        self._details["request_bytes"] = len(payload) + sum(buffer.nbytes for buffer in buffers)
        collector = self._collector
        collector.worker = self._node.info
        collector.open[self._number] = self
        return ProfileWanted(self._number, collector.options, collector.home)

    def ended(self, profiled: bytes = b"", size_bytes: int = 0) -> None:
        end_ns = PROFILING.clock_ns()
        if self._collector.open.pop(self._number, None) is None:
            return
        span = self.span(end_ns, {"response_bytes": size_bytes})
        harvest = Harvest([span], self._node.part(Clocks).bounds(), self.names())
        for recorder in PROFILER.recorders:
            if recorder.collector_of(self._node.info) is not self._collector:
                recorder.take_harvest(self._node.info, harvest)
        if profiled:
            try:
                harvest.add(decode_harvest(profiled))
            except (msgspec.DecodeError, ValueError) as error:
                logger.warning("the record of %s from %s is unreadable: %s", self.name, self._peer.info.name, error)
        self._collector.harvest.add(harvest)

    def names(self) -> dict[int, str]:
        """The names of caller and callee, by id."""
        return {info.id: info.name for info in (self._node.info, self._peer.info)}

    def span(self, end_ns: int, details: dict[str, Any]) -> Span:
        """The span of this call, if it ends at ``end_ns``."""
        return Span(
            CALL,
            self._node.info.id,
            self._thread,
            self.name,
            self._start_ns,
            end_ns,
            self._number,
            self._collector.inside,
            {**self._details, **details},
        )


class _Here(threading.local):
    """The part of a run that the calling thread runs."""

    part: Span | None = None
    captures = False


class Run(Collector):
    """A request, or a part of a backward pass, that this node runs; a `RunProfile`. Mutable: its own spans."""

    def __init__(self, worker: WorkerInfo, wanted: ProfileWanted | None) -> None:
        number = 0 if wanted is None else wanted.number
        options = 0 if wanted is None else wanted.options
        for recorder in PROFILER.recorders:
            options |= recorder.options
        super().__init__(options, number, wanted is not None and wanted.home)
        self.worker: WorkerInfo = worker
        self._own: list[Span] = []
        self._here = _Here()
        self.harvest.names[worker.id] = worker.name

    def run(self, func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        outside, THREAD.collector = THREAD.collector, self
        details = {"thread": current_thread().name}
        self._here.part = Span(
            RUN, self.worker.id, get_native_id(), "", PROFILING.clock_ns(), 0, self.inside, 0, details
        )
        self.resume()
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.pause()
            THREAD.collector = outside

    def steps(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        return _RunCoroutine(self, coroutine)

    def pause(self) -> None:
        records = self._stop_capture()
        part, self._here.part = self._here.part, None
        if part is not None:
            part.end_ns = PROFILING.clock_ns()  # before `_take` parses the records, which may outlast the function
            self._own.append(part)
        self._take(records)

    def suspend(self) -> bool:
        """Stop recording operators on this thread for now; True if they were being recorded."""
        records = self._stop_capture()
        self._take(records)
        return records is not None

    def resume(self) -> None:
        """Record the operators of this thread."""
        self._here.captures = capture.start(self.options)

    def _stop_capture(self) -> capture.Records | None:
        captured, self._here.captures = self._here.captures, False
        return capture.stop() if captured else None

    def _take(self, records: capture.Records | None) -> None:
        if records is not None:
            self._own += capture.to_spans(records, self.worker.id, get_native_id(), self.inside)
            for recorder in PROFILER.recorders:
                recorder.take_records(records)

    def take_own(self, name: str) -> list[Span]:
        """The spans of this run itself, which gets ``name``."""
        own, self._own = self._own, []
        for span in own:
            if span.kind == RUN:
                span.name = name
        return own

    def finish(self, name: str) -> bytes:
        self.pause()  # a callback that completes a future may answer the request from inside the run
        own = self.take_own(name)
        for recorder in PROFILER.recorders:
            recorder.take_harvest(self.worker, Harvest(own, [], {self.worker.id: self.worker.name}))
        if not self.home:
            return b""
        self.harvest.spans += own
        return encode_harvest(self.everything())


class _RunCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are parts of a run: other coroutines use the same thread in between."""

    def __init__(self, run: Run, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._run = run
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._run.run(self._coroutine.send, (value,))

    def throw(self, *error: Any) -> Any:
        return self._run.run(self._coroutine.throw, error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("made to be run by an event loop")


class ProfilerSession(Collector):
    """The collector of a thread on which one of torch's profilers runs."""

    def __init__(self, owner: Any) -> None:
        super().__init__(_options_of(owner))
        self.outside = THREAD.collector
        self._suspended = isinstance(self.outside, Run) and self.outside.suspend()

    def enter(self) -> None:
        """Collect the calls of this thread from now on."""
        THREAD.collector = self

    def leave(self) -> None:
        """End with the profiler; answers that arrive later still count."""
        if THREAD.collector is self:
            THREAD.collector = self.outside
        if self._suspended and isinstance(self.outside, Run):
            self.outside.resume()
        self.outside = None


def _options_of(owner: Any) -> int:
    """The option bits for the details that this profiler records, to be requested from callees."""
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


def call_name(kind: str, what: Any, caller: str, callee: str) -> str:
    """The name of a call among a profiler's events: as in ``torch.distributed.rpc``."""
    if kind == "backward":
        return f"backward({caller} -> {callee})"
    name: str = getattr(what, "__qualname__", None) or type(what).__qualname__
    if name == "RRef.to_here":
        return f"to_here#({caller})->({callee})"
    builtin = torch.jit._builtins._find_builtin(what)  # type: ignore[no-untyped-call]
    if builtin is not None:
        name = builtin
    elif isinstance(what, torch.jit.ScriptFunction):
        name = torch._jit_internal._qualified_name(what)
    return f"rpc_{kind}#{_KNOWN_NAMES.get(name, name)}({caller} -> {callee})"


class _ProcessProfiler:
    """The `Profiler` of this process. Mutable: its recorders, replaced under the lock and read without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recorders: tuple[ProcessRecorder, ...] = ()

    def add(self, recorder: ProcessRecorder) -> None:
        """Report every run and call to ``recorder`` from now on."""
        with self._lock:
            self.recorders += (recorder,)
            PROFILING.everywhere += 1

    def remove(self, recorder: ProcessRecorder) -> None:
        """Report nothing more to ``recorder``."""
        with self._lock:
            self.recorders = tuple(other for other in self.recorders if other is not recorder)
            PROFILING.everywhere -= 1

    def close_after_fork(self) -> None:
        """In a forked child: forget the recorders, which belong to the parent."""
        self._lock = threading.Lock()
        self.recorders = ()
        PROFILING.everywhere = 0

    def begin_call(self, node: Runtime, peer: Peer, kind: str, what: Any, run: Any) -> Call | None:
        collectors = itertools.chain(
            (run, THREAD.collector), (recorder.collector_of(node.info) for recorder in self.recorders)
        )
        collector = next((found for found in collectors if found is not None), None)
        return None if collector is None else Call(node, peer, kind, what, collector)

    def begin_run(self, worker: WorkerInfo, wanted: ProfileWanted | None) -> Run | None:
        if not self.recorders and (wanted is None or not wanted.home):
            return None  # the caller wants no record back, and no recorder runs here
        return Run(worker, wanted)

    def carry(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        collector = THREAD.collector
        if collector is None:
            return callback

        def run(future: Any) -> Any:
            worker = collector.worker
            if THREAD.collector is collector or worker is None:
                return callback(future)
            if isinstance(collector, Run):
                return collector.run(callback, (future,))
            part = Run(worker, ProfileWanted(collector.inside, collector.options, collector.home))
            part.harvest, part.open = collector.harvest, collector.open  # its calls are the collector's
            try:
                return part.run(callback, (future,))
            finally:
                collector.harvest.spans += part.take_own(getattr(callback, "__qualname__", "callback"))

        return run


PROFILER: Final = _ProcessProfiler()
PROFILING.profiler = PROFILER
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROFILER.close_after_fork)
