"""`farcall.profile`: one trace of everything that all workers do for a while.

The worker that enters the block tells the others, by ordinary calls, to record; each does, whatever thread a call is
made on, and whoever a request comes from. At the end it fetches what they have and joins it by one clock.

A worker records until it is told to stop, or until whoever told it to start is gone. A worker that cannot be reached at
the end is named in ``missing``: the trace of the others is worth having.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from threading import get_native_id
from types import TracebackType
from typing import Any

from farcall.errors import RpcError
from farcall.ids import WorkerInfo
from farcall.observe import capture
from farcall.observe.clocks import Clocks
from farcall.observe.events import function_events
from farcall.observe.profile import THREAD, Collector, add_recorder, remove_recorder
from farcall.observe.spans import Harvest, decode_harvest, encode_harvest
from farcall.observe.trace import chrome_trace, write_json
from farcall.rpc.call import UNSET_TIMEOUT, call_async
from farcall.runtime.node import HasRuntime, Runtime, current_runtime, runtime_of
from farcall.runtime.observing.profiling import is_profiled
from farcall.runtime.peers.peer import Peer

__all__ = ["profile"]

logger: logging.Logger = logging.getLogger("farcall")

MOST_SPANS = 1_000_000
"""That one worker keeps; what comes after that is counted only."""


class Recording:
    """What one worker does for a while; a `Recorder`."""

    def __init__(self, worker: WorkerInfo, options: int) -> None:
        self.options = options
        self._worker = worker
        self.collector: Collector = Collector(options, home=False)
        self.collector.worker = worker
        self.collector.harvest.names[worker.id] = worker.name
        add_recorder(self)

    def take_harvest(self, worker: WorkerInfo, harvest: Harvest) -> None:
        if worker.id != self._worker.id:
            return  # of another node in this process
        kept = self.collector.harvest
        if len(kept.spans) < MOST_SPANS:
            kept.add(harvest)
        else:
            kept.dropped += len(harvest.spans)

    def take_records(self, records: capture.Records) -> None:
        """Nothing to do: the run's harvest has them."""

    def collector_of(self, worker: WorkerInfo) -> Collector | None:
        return self.collector if worker.id == self._worker.id else None

    def stop(self) -> Harvest:
        """No more; what there is."""
        remove_recorder(self)
        return self.collector.everything()


class Recordings:
    """The recordings that others have asked this node for; ``node.part(Recordings)``."""

    def __init__(self, node: Runtime) -> None:
        self._runtime = node
        self._running: dict[str, tuple[int, Recording]] = {}
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(lambda: self._stop_all(list(self._running)))

    def start(self, name: str, origin: int, options: int) -> None:
        self._running[name] = (origin, Recording(self._runtime.info, options))

    def stop(self, name: str) -> Harvest:
        running = self._running.pop(name, None)
        if running is None:
            return Harvest([], [], {self._runtime.info.id: self._runtime.info.name})
        harvest = running[1].stop()
        harvest.bounds += self._runtime.part(Clocks).bounds()
        return harvest

    def _on_peer_gone(self, peer: Peer) -> None:
        self._stop_all([name for name, (origin, _) in list(self._running.items()) if origin == peer.info.id])

    def _stop_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.stop(name)


def start_recording(name: str, origin: int, options: int) -> None:
    """On each worker: record from now on."""
    current_runtime().part(Recordings).start(name, origin, options)


def stop_recording(name: str) -> bytes:
    """On each worker: stop, and give what was recorded."""
    return encode_harvest(current_runtime().part(Recordings).stop(name), most_bytes=None)


class profile:
    """``with farcall.profile() as prof:`` records what all workers do inside the block.

    Calls, the functions that serve them, and backward passes are recorded on every worker, with torch's operators; so
    are the operators of the thread that entered the block. Other threads of a worker show their calls only.
    ``prof.export_chrome_trace("trace.json")`` writes one trace for Perfetto; ``prof.events()`` and
    ``prof.key_averages()`` are those of torch's profiler.

    Args:
        record_shapes: the shapes of operators' arguments; as for ``torch.profiler.profile``, like the next three.
        profile_memory: what operators allocate and free.
        with_stack: where in the program operators were called.
        with_flops: an estimate of operators' work.
        use_device: time on the device, too, where there is one.
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
            capture.SHAPES * record_shapes
            | capture.MEMORY * profile_memory
            | capture.STACKS * with_stack
            | capture.FLOPS * with_flops
            | capture.DEVICE * use_device
        )
        self._runtime = None if node is None else runtime_of(node)
        self._harvest: Harvest | None = None
        self._name = ""
        self.missing: dict[str, str] = {}
        """Workers whose part is not in the trace, and why."""

    def __enter__(self) -> profile:
        if self._name:
            raise RuntimeError("a farcall.profile can be entered once: make a new one")
        if THREAD.collector is not None or is_profiled():
            raise RuntimeError("this thread is inside a profiler already: leave it first, or use one of the two")
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
        self._recording = Recording(node.info, self._options)
        THREAD.collector = self._recording.collector
        self._captures = capture.start(self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        node = self._runtime
        assert node is not None
        worker = node.info.id
        spans = capture.to_spans(capture.stop(), worker, get_native_id(), 0) if self._captures else []
        THREAD.collector = None
        harvest = self._recording.stop()
        harvest.spans += spans
        harvest.bounds += node.part(Clocks).bounds()
        for answer in self._ask_others(stop_recording, (self._name,)):
            harvest.add(decode_harvest(answer))
        self._harvest = harvest

    def _ask_others(self, what: Any, args: tuple[Any, ...]) -> list[Any]:
        """Call all others at once; who does not answer is missing."""
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
        logger.warning("farcall.profile: what %s does is not recorded: %s", name, error)

    def _finished(self) -> tuple[Harvest, int]:
        if self._harvest is None or self._runtime is None:
            raise RuntimeError("the block of this farcall.profile has not ended yet")
        return self._harvest, self._runtime.info.id

    def trace(self) -> dict[str, Any]:
        """The trace, as what becomes JSON."""
        return chrome_trace(*self._finished())

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the trace; compressed, if ``path`` ends with ``.gz``."""
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
        """The same, summed up by name."""
        return self.events().key_averages()
