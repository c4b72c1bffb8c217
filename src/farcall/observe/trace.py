"""A harvest in the two forms that people read: a Chrome trace, and events of torch's legacy profiler.

The trace is for Perfetto, ``chrome://tracing`` and TensorBoard: a process row per worker, one clock, and arrows from
call to run to answer. Times are microseconds from ``baseTimeNanoseconds``, as torch writes them.

    thing                    row of                        drawn as
    a worker                 itself                        a process, by its name
    an operator, a run       the thread it ran on          a slice; operators lie inside their run
    a call that waits        the caller's thread           a slice; the run on the other worker lies inside its time
    a call that does not     a lane of the caller's own    a slice; calls of one lane do not overlap
    request                  from call to run              an arrow
    answer                   from run to call              an arrow, between slices at the ends of the two

Events have the names that `torch.distributed.rpc` gives them, and the ``node_id`` of their worker. Runs are not events,
as in torch: their operators would be counted twice.

    rpc_sync#function(caller -> callee)                             a call, on its caller
    ... #remote_op: aten::add                                       an operator of its run, ``is_remote``
    ... #remote_op: rpc_async#other(callee -> third)                a call made in its run
    ... #remote_op: rpc_async#other(callee -> third)#remote_op: ..  and so on
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.autograd.profiler_util import FunctionEvent

from farcall.observe.clocks import offsets_of
from farcall.observe.spans import CALL, OPERATOR, RUN, Harvest, Span

REMOTE_OPERATOR: Final = "#remote_op: "
_FIRST_EVENT: Final = 1 << 40

_FIRST_PROCESS: Final = 10_000_000
"""The row of worker 0: above all process ids, which workers on two hosts may share. Perfetto shows the number beside
the name, so it is a round one."""
_FIRST_LANE: Final = 100_000_000
_FIRST_ARROW: Final = 1 << 52
"""The id of the first arrow. Perfetto takes only numbers, and JSON none above twice this; torch's ids are small."""
MOMENT_NS: Final = 100
_CATEGORIES = {OPERATOR: "cpu_op", CALL: "farcall", RUN: "farcall"}
TraceEvent = dict[str, Any]


def chrome_trace(harvest: Harvest, origin: int) -> TraceEvent:
    """A whole trace, by the clock of worker ``origin``."""
    base_ns = min((span.start_ns for span in harvest.spans), default=0) // 1_000_000_000 * 1_000_000_000
    trace: TraceEvent = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": []}
    add_to_trace(trace, harvest, origin)
    return trace


def write_json(trace: TraceEvent, path: str | Path) -> None:
    """Write a trace; gzip it if ``path`` ends with ``.gz``."""
    text = json.dumps(trace)
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        Path(path).write_text(text)


def add_to_trace(trace: TraceEvent, harvest: Harvest, origin: int, process: int | None = None) -> None:
    """Add a harvest to a trace that torch wrote; ``process`` is the row of worker ``origin`` in that trace."""
    offsets = offsets_of(harvest, origin)
    rows = {worker: _FIRST_PROCESS + worker for worker in harvest.names}
    if process is not None:
        rows[origin] = process
    added = _Drawing(rows, offsets, int(trace.get("baseTimeNanoseconds", 0)))
    for worker, name in sorted(harvest.names.items()):
        added.name_process(worker, name)
    calls = [span for span in harvest.spans if span.kind == CALL]
    waiting = [span for span in calls if span.details.get("kind") == "sync"]
    lanes = _lanes([span for span in calls if span.details.get("kind") != "sync"], offsets)
    for span in harvest.spans:
        if span.kind != CALL and not span.details.get("timeless"):
            added.slice(span, span.thread)
    for span in waiting:
        added.slice(span, span.thread)
    for span, lane in lanes:
        added.slice(span, _FIRST_LANE + lane)
    named = {(span.worker, span.thread): span.details["thread"] for span in harvest.spans if "thread" in span.details}
    for (worker, thread), name in sorted(named.items()):
        added.name_thread(worker, thread, name)
    for worker, lane in sorted({(span.worker, lane) for span, lane in lanes}):
        added.name_thread(worker, _FIRST_LANE + lane, f"calls {lane}")
    threads = {span.call: span.thread for span in waiting} | {span.call: _FIRST_LANE + lane for span, lane in lanes}
    added.arrows(calls, threads, [span for span in harvest.spans if span.kind == RUN])
    # Remove torch's names of the same rows: of two names, Perfetto shows the first.
    said = {_about_row(event) for event in added.events if event["ph"] == "M"}
    kept = [event for event in trace["traceEvents"] if event["ph"] != "M" or _about_row(event) not in said]
    trace["traceEvents"] = kept + added.events
    if harvest.dropped:
        trace["farcallDroppedOperators"] = harvest.dropped


def _about_row(event: TraceEvent) -> tuple[Any, ...]:
    """The subject of a metadata event: its kind and its row."""
    name = event["name"]
    return (name, event["pid"]) if name.startswith("process_") else (name, event["pid"], event.get("tid"))


def _lanes(calls: Iterable[Span], offsets: dict[int, int]) -> list[tuple[Span, int]]:
    """Assign each call to the first lane of its worker that is free for the whole call."""
    ends: dict[int, list[int]] = {}
    placed = []
    for span in sorted(calls, key=lambda span: span.start_ns - offsets.get(span.worker, 0)):
        busy_until = ends.setdefault(span.worker, [])
        lane = next((lane for lane, end_ns in enumerate(busy_until) if end_ns <= span.start_ns), len(busy_until))
        if lane == len(busy_until):
            busy_until.append(0)
        busy_until[lane] = max(span.end_ns, span.start_ns + 2)
        placed.append((span, lane))
    return placed


@dataclass
class _Drawing:
    """The events of a trace being written. Mutable: ``events`` grows."""

    rows: dict[int, int]
    offsets: dict[int, int]
    base_ns: int
    events: list[TraceEvent] = field(default_factory=list)

    def _us(self, worker: int, when_ns: int) -> float:
        return (when_ns - self.offsets.get(worker, 0) - self.base_ns) / 1000

    def name_process(self, worker: int, name: str) -> None:
        row = self.rows[worker]
        self.events += [
            {"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "process_labels", "pid": row, "tid": 0, "args": {"labels": f"worker {worker}"}},
            {"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": worker}},
        ]

    def name_thread(self, worker: int, thread: int, name: str) -> None:
        self.events.append(
            {"ph": "M", "name": "thread_name", "pid": self.rows[worker], "tid": thread, "args": {"name": name}}
        )

    def slice(self, span: Span, thread: int) -> None:
        arguments = dict(span.details)
        if span.kind != OPERATOR and span.call:
            arguments["call"] = span.call
        self.events.append(
            {
                "ph": "X",
                "cat": _CATEGORIES[span.kind],
                "name": span.name or "?",
                "pid": self.rows[span.worker],
                "tid": thread,
                "ts": self._us(span.worker, span.start_ns),
                "dur": max(span.end_ns - span.start_ns, 2) / 1000,
                "args": arguments,
            }
        )

    def arrows(self, calls: list[Span], threads: dict[int, int], runs: list[Span]) -> None:
        """Draw arrows from each call to its run, and from the run back to the call's end."""
        parts: dict[int, list[Span]] = {}
        for run in runs:
            parts.setdefault(run.call, []).append(run)
        for call in calls:
            if call.call not in parts:
                continue
            served = sorted(parts[call.call], key=lambda part: part.start_ns)
            first, last = served[0], served[-1]
            mine = threads[call.call]
            start, end = (call, mine, call.start_ns), (first, first.thread, first.start_ns)
            self._arrow("request", _FIRST_ARROW + 2 * call.call, start, end)
            if "unanswered" not in call.details:
                start, end = self._last_moment(last, last.thread), self._last_moment(call, mine)
                self._arrow("answer", _FIRST_ARROW + 2 * call.call + 1, start, end)

    def _last_moment(self, span: Span, thread: int) -> tuple[Span, int, int]:
        """Draw a separate slice at the end of ``span``, for an arrow.

        Perfetto binds an arrow to the latest slice that began before it, and draws it towards its later end.
        """
        start_ns = span.end_ns - min(MOMENT_NS, (span.end_ns - span.start_ns) // 4)
        self.slice(Span(RUN, span.worker, thread, "answer", start_ns, span.end_ns, span.call), thread)
        return span, thread, start_ns

    def _arrow(self, name: str, number: int, start: tuple[Span, int, int], end: tuple[Span, int, int]) -> None:
        for phase, (span, thread, when_ns) in (("s", start), ("f", end)):
            event: TraceEvent = {
                "ph": phase,
                "cat": "farcall",
                "name": name,
                "id": number,
                "pid": self.rows[span.worker],
                "tid": thread,
                "ts": self._us(span.worker, when_ns),
            }
            if phase == "f":
                event["bp"] = "e"
            self.events.append(event)


def function_events(harvest: Harvest, origin: int, base_ns: int, thread: int) -> list[Any]:
    """Calls and operators as torch's events, by ``origin``'s clock from ``base_ns``; ``thread`` is the profiled one."""
    offsets = offsets_of(harvest, origin)
    key_of = _keys(harvest)
    events = []
    for number, span in enumerate(harvest.spans):
        if span.kind == RUN:
            continue
        details = span.details
        prefix = key_of(span.inside if span.kind == CALL else span.call)
        name = prefix + REMOTE_OPERATOR + span.name if prefix else span.name
        is_async = bool(details.get("async")) if span.kind == OPERATOR else details.get("kind") != "sync"
        mine = span.kind == CALL and span.worker == origin and not span.inside
        zero_ns = base_ns + offsets.get(span.worker, 0)
        event: Any = FunctionEvent(  # type: ignore[no-untyped-call]
            id=_FIRST_EVENT + number,
            node_id=span.worker,
            name=name,
            trace_name=None if details.get("timeless") else name,
            thread=thread if mine else span.thread,
            start_us=(span.start_ns - zero_ns) / 1000,
            end_us=(span.end_ns - zero_ns) / 1000,
            fwd_thread=details.get("forward_thread"),
            input_shapes=details.get("shapes", []),
            stack=details.get("stack", []),
            scope=details.get("scope", 0),
            use_device="cuda" if details.get("kernels") else None,
            cpu_memory_usage=details.get("cpu_bytes", 0),
            device_memory_usage=details.get("device_bytes", 0),
            is_async=is_async,
            is_remote=not mine and bool(prefix),
            sequence_nr=details.get("sequence", -1),
            is_legacy=True,
            flops=details.get("flops"),
        )
        for kernel, device, duration_us in details.get("kernels", ()):
            event.append_kernel(kernel, device, duration_us)
        events.append(event)
    return events


def _keys(harvest: Harvest) -> Callable[[int], str]:
    """From a call's number to its name, prefixed with the names of the calls in whose runs it was made."""
    calls = {span.call: span for span in harvest.spans if span.kind == CALL}
    keys = {0: ""}

    def key_of(number: int) -> str:
        if number not in keys:
            keys[number] = ""  # breaks the recursion: data from the network may contain a cycle
            call = calls.get(number)
            if call is not None:
                outer = key_of(call.inside)
                keys[number] = outer + REMOTE_OPERATOR + call.name if outer else call.name
        return keys[number]

    return key_of
