"""One trace of all workers, for a while: `farcall.profile` from inside, ``farcall trace`` from outside.

`farcall.profile` starts recordings on the other workers by ordinary calls, and fetches their records at the end. An
observer asks two questions instead, which each worker answers on its I/O thread:

    worker is      question         then
    idle           TRACE_BEGIN      recording, for ``for_s`` and GRACE_S at most
    recording      TRACE_END        idle; a thread of its own writes the answer, since it may be long
    recording      its time is up   idle: the observer is gone, and the record is dropped
    idle           TRACE_END        an empty answer: it joined meanwhile

A worker also stops when the worker that started its recording is gone. The clock of the trace is that of the worker
with the block, or of the worker that the observer is connected to. A worker that cannot be reached at the end is named
in ``missing``: a trace of the other workers is still useful.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from time import monotonic
from typing import Any

import msgspec

from farcall.errors import RpcError
from farcall.ids import WorkerInfo
from farcall.observe import capture
from farcall.observe.answering import TRACE_BEGIN, TRACE_END
from farcall.observe.capture import Detail
from farcall.observe.clocks import Clocks
from farcall.observe.observer import Observer
from farcall.observe.profile import PROFILER, THREAD, Collector
from farcall.observe.spans import Harvest, decode_harvest, encode_harvest
from farcall.observe.trace import chrome_trace, function_events, write_json
from farcall.protocol.observing import WorkerState
from farcall.rpc.future import call_async
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import HasRuntime, Runtime, current_runtime, runtime_of
from farcall.runtime.observing.profiling import is_profiled
from farcall.runtime.peers.peer import Peer

logger: logging.Logger = logging.getLogger("farcall")

MOST_SPANS = 1_000_000
"""The spans that one worker keeps; later ones are counted only."""
MOST_S = 600.0
GRACE_S = 30.0
FETCH_S = 25.0
"""How long the answers may take; a member forgets a forwarded question after 30 s."""
MOST_BYTES = 48 << 20
"""The limit of one worker's answer to an observer; operators beyond it are counted only."""
_OBSERVER = -1
"""Stands for the id of the asking worker, if an observer asked."""


# ---------------------------------------------------------------------- at each worker


class WorkerRecording:
    """A recording of one worker's work, until `stop`; a `ProcessRecorder`."""

    def __init__(self, worker: WorkerInfo, options: int) -> None:
        self.options = options
        self._worker = worker
        self.collector: Collector = Collector(options, home=False)
        self.collector.worker = worker
        self.collector.harvest.names[worker.id] = worker.name
        PROFILER.add(self)

    def take_harvest(self, worker: WorkerInfo, harvest: Harvest) -> None:
        if worker.id != self._worker.id:
            return  # another node in this process
        kept = self.collector.harvest
        if len(kept.spans) < MOST_SPANS:
            kept.add(harvest)
        else:
            kept.dropped += len(harvest.spans)

    def take_records(self, records: capture.Records) -> None:
        """Do nothing: the run's harvest contains them."""

    def collector_of(self, worker: WorkerInfo) -> Collector | None:
        return self.collector if worker.id == self._worker.id else None

    def stop(self) -> Harvest:
        """End the recording and return it."""
        PROFILER.remove(self)
        return self.collector.everything()


class TraceWish(msgspec.Struct, frozen=True, array_like=True):
    """An observer's request for a trace."""

    name: str
    options: int
    for_s: float


_WISH: msgspec.msgpack.Decoder[TraceWish] = msgspec.msgpack.Decoder(TraceWish)


class Recordings:
    """The recordings that other workers and observers requested here, while they run; ``node.part(Recordings)``."""

    def __init__(self, node: Runtime) -> None:
        self._runtime = node
        self._running: dict[str, tuple[int, WorkerRecording]] = {}
        self._ends: dict[str, float] = {}  # only for observers, which may never come back
        self._timer = node.timer(self._drop_unfetched)
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(lambda: self._stop_all(list(self._running)))

    def start(self, name: str, origin: int, options: int) -> None:
        self._running[name] = (origin, WorkerRecording(self._runtime.info, options))

    def stop(self, name: str) -> Harvest:
        self._ends.pop(name, None)
        running = self._running.pop(name, None)
        if running is None:
            return Harvest([], [], {self._runtime.info.id: self._runtime.info.name})
        harvest = running[1].stop()
        harvest.bounds += self._runtime.part(Clocks).bounds()
        return harvest

    def _stop_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.stop(name)

    def _on_peer_gone(self, peer: Peer) -> None:
        self._stop_all([name for name, (origin, _) in self._running.copy().items() if origin == peer.info.id])

    def begin(self, peer: Peer | None, argument: bytes) -> bytes:
        """The answer to TRACE_BEGIN."""
        wanted = _WISH.decode(argument)
        node = self._runtime
        if peer is None:
            for other in node.others():
                node.part(Clocks).ask(other)
        self.start(wanted.name, _OBSERVER, wanted.options)
        self._ends[wanted.name] = monotonic() + min(wanted.for_s, MOST_S) + GRACE_S
        self._timer.at(self._ends[wanted.name])
        return msgspec.msgpack.encode((node.info.name, node.info.id))

    def end(self, peer: Peer | None, argument: bytes) -> Callable[[], bytes]:
        """The answer to TRACE_END."""
        harvest = self.stop(msgspec.msgpack.decode(argument, type=str))
        return lambda: encode_harvest(harvest, MOST_BYTES)

    def _drop_unfetched(self, now: float) -> float:
        """Drop recordings that nobody fetched in time."""
        self._stop_all([name for name, end in self._ends.copy().items() if end <= now])
        return min(self._ends.values(), default=NEVER)


def start_recording(name: str, origin: int, options: int) -> None:
    """On each worker: record from now on."""
    current_runtime().part(Recordings).start(name, origin, options)


def stop_recording(name: str) -> bytes:
    """On each worker: stop, and return the recording."""
    return encode_harvest(current_runtime().part(Recordings).stop(name), most_bytes=None)


# ---------------------------------------------------------------------- from outside


@dataclass(frozen=True)
class ObservedTrace:
    """The recordings of all workers, as an observer received them."""

    harvest: Harvest
    origin: int
    """The rank of the worker whose clock the trace uses."""
    missing: list[WorkerState]
    """Workers that did not send their recording."""


def record(observer: Observer, seconds: float, options: int) -> ObservedTrace:
    """Let all workers record for ``seconds``. Ctrl-C ends the trace early."""
    name = secrets.token_hex(8)
    wish = msgspec.msgpack.encode(TraceWish(name, options, seconds))
    ranks = dict(observer.ask(TRACE_BEGIN, tuple[str, int], argument=wish).answers)
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    heard = observer.ask(TRACE_END, Harvest, FETCH_S, msgspec.msgpack.encode(name))
    harvest = Harvest([], [], {})
    for one in heard.answers:
        harvest.add(one)
    missing = [worker for worker in heard.silent if not worker.gone or worker.name in ranks]
    return ObservedTrace(harvest, ranks.get(observer.member, 0), missing)


# ---------------------------------------------------------------------- from inside


class profile:
    """``with farcall.profile() as prof:`` records the work of all workers inside the block.

    Every worker records calls, the functions that serve them, and backward passes, with torch's operators; so does the
    thread that entered the block. Other threads of a worker record their calls only.
    ``prof.export_chrome_trace("trace.json")`` writes one trace for Perfetto; ``prof.events()`` and
    ``prof.key_averages()`` are those of torch's profiler.

    Args:
        record_shapes: record the shapes of operators' arguments; this and the next three are as in
            ``torch.profiler.profile``.
        profile_memory: record the memory that operators allocate and free.
        with_stack: record where in the program operators were called.
        with_flops: estimate the floating-point operations of operators.
        use_device: record the time on the device, too, if there is one.
        node: the node to begin at; by default the current one.
    """

    def __init__(
        self,
        *,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        use_device: bool = False,
        node: HasRuntime | None = None,
    ) -> None:
        self._options = (
            Detail.SHAPES * record_shapes
            | Detail.MEMORY * profile_memory
            | Detail.STACKS * with_stack
            | Detail.FLOPS * with_flops
            | Detail.DEVICE * use_device
        )
        self._runtime = None if node is None else runtime_of(node)
        self._harvest: Harvest | None = None
        self._name = ""
        self.missing: dict[str, str] = {}
        """Workers that are missing from the trace, and why."""

    def __enter__(self) -> profile:
        if self._name:
            raise RuntimeError("a farcall.profile can be entered once: make a new one")
        if THREAD.collector is not None or is_profiled():
            raise RuntimeError("this thread already runs a profiler: leave it first")
        node = self._runtime = self._runtime or current_runtime()
        self._name = secrets.token_hex(8)
        self._others = [worker for worker in node.workers() if worker.id != node.info.id]
        for worker in self._others:
            node.part(Clocks).ask(node.peer(worker.id))
        try:
            self._ask_others(start_recording, (self._name, node.info.id, self._options))
        except BaseException:  # Ctrl-C
            self._ask_others(stop_recording, (self._name,))
            raise
        self._recording = WorkerRecording(node.info, self._options)
        THREAD.collector = self._recording.collector
        self._captures = capture.start(self._options)
        return self

    def __exit__(self, *_: object) -> None:
        node = self._runtime
        assert node is not None
        spans = capture.to_spans(capture.stop(), node.info.id, get_native_id(), 0) if self._captures else []
        THREAD.collector = None
        harvest = self._recording.stop()
        harvest.spans += spans
        harvest.bounds += node.part(Clocks).bounds()
        for answer in self._ask_others(stop_recording, (self._name,)):
            harvest.add(decode_harvest(answer))
        self._harvest = harvest

    def _ask_others(self, what: Any, args: tuple[Any, ...]) -> list[Any]:
        """Call all other workers in parallel; workers that do not answer go to ``missing``."""
        assert self._runtime is not None
        futures = {}
        for worker in self._others:
            if worker.name not in self.missing:
                try:
                    futures[worker.name] = call_async(self._runtime, worker.id, what, args, None, UNSET_TIMEOUT)
                except RpcError as error:
                    self._miss(worker.name, error)
        answers = []
        for name, future in futures.items():
            try:
                answers.append(future.wait())
            except RpcError as error:
                self._miss(name, error)
        return answers

    def _miss(self, name: str, error: Exception) -> None:
        self.missing[name] = str(error)
        logger.warning("farcall.profile: %s is not recorded: %s", name, error)

    def _finished(self) -> tuple[Harvest, int]:
        if self._harvest is None or self._runtime is None:
            raise RuntimeError("the block of this farcall.profile has not ended yet")
        return self._harvest, self._runtime.info.id

    def trace(self) -> dict[str, Any]:
        """The trace, ready for a JSON encoder."""
        return chrome_trace(*self._finished())

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the trace; gzip it if ``path`` ends with ``.gz``."""
        write_json(self.trace(), path)

    def events(self) -> Any:
        """All calls and operators, as torch's ``EventList``."""
        from torch.autograd.profiler_util import EventList

        harvest, worker = self._finished()
        base_ns = min((span.start_ns for span in harvest.spans), default=0)
        events: Any = EventList(function_events(harvest, worker, base_ns, get_native_id()))  # type: ignore[no-untyped-call]
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        events._build_tree()
        return events

    def key_averages(self) -> Any:
        """The events, grouped and summed by name."""
        return self.events().key_averages()
