"""One Chrome trace of all workers: a process row for each, one clock, and arrows from call to run to answer.

Owns the form of the file, which Perfetto, ``chrome://tracing`` and TensorBoard read: spans in, events out.

    what                     row of                        drawn as
    a worker                 itself                        a process, by its name
    an operator, a run       the thread it ran on          a slice; operators lie inside their run
    a call that waits        the caller's thread           a slice; the run on the other worker lies inside its time
    a call that does not     a lane of the caller's own    a slice; calls of one lane do not overlap
    request                  from call to run              an arrow
    answer                   from run to call              an arrow, between slices at the ends of the two

Times are microseconds from ``baseTimeNanoseconds``, as torch writes them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from farcall.observe.events import offsets_of
from farcall.observe.spans import CALL, OPERATOR, RUN, Harvest, Span

__all__ = ["add_to_trace", "chrome_trace", "write_json"]

_FIRST_PROCESS: Final = 10_000_000
"""Workers' rows are numbered from here: above the process ids of a system, since workers on two hosts may share one.
Perfetto shows the number beside the name, so it is one that can be read."""
_FIRST_LANE: Final = 100_000_000
_FIRST_ARROW: Final = 1 << 52
"""Perfetto takes numbers only, and JSON no larger ones than twice this; torch's own are small."""
MOMENT_NS: Final = 100
_CATEGORIES = {OPERATOR: "cpu_op", CALL: "farcall", RUN: "farcall"}
Event = dict[str, Any]


def chrome_trace(harvest: Harvest, origin: int) -> Event:
    """A whole trace, by the clock of worker ``origin``."""
    base_ns = min((span.start_ns for span in harvest.spans), default=0) // 1_000_000_000 * 1_000_000_000
    trace: Event = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": []}
    add_to_trace(trace, harvest, origin)
    return trace


def write_json(trace: Event, path: str | Path) -> None:
    """Write a trace; compressed, if ``path`` ends with ``.gz``."""
    text = json.dumps(trace)
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        Path(path).write_text(text)


def add_to_trace(trace: Event, harvest: Harvest, origin: int, process: int | None = None) -> None:
    """Add a harvest to a trace that torch wrote; ``process`` is the row there of worker ``origin``."""
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
    for worker, thread, name in sorted(_thread_names(harvest.spans)):
        added.name_thread(worker, thread, name)
    for worker, lane in sorted({(span.worker, lane) for span, lane in lanes}):
        added.name_thread(worker, _FIRST_LANE + lane, f"calls {lane}")
    threads = {span.call: span.thread for span in waiting} | {span.call: _FIRST_LANE + lane for span, lane in lanes}
    added.arrows(calls, threads, [span for span in harvest.spans if span.kind == RUN])
    # What torch said of the same rows goes: of two names Perfetto takes the first.
    said = {_about_row(event) for event in added.events if event["ph"] == "M"}
    kept = [event for event in trace["traceEvents"] if event["ph"] != "M" or _about_row(event) not in said]
    trace["traceEvents"] = kept + added.events
    if harvest.dropped:
        trace["farcallDroppedOperators"] = harvest.dropped


def _about_row(event: Event) -> tuple[Any, ...]:
    """Which thing a metadata event says, of which row."""
    name = event["name"]
    return (name, event["pid"]) if name.startswith("process_") else (name, event["pid"], event.get("tid"))


def _thread_names(spans: Iterable[Span]) -> set[tuple[int, int, str]]:
    """Of each worker's threads, where a span knows its thread's name."""
    names = {(span.worker, span.thread): span.details["thread"] for span in spans if "thread" in span.details}
    return {(*thread, name) for thread, name in names.items()}


def _lanes(calls: Iterable[Span], offsets: dict[int, int]) -> list[tuple[Span, int]]:
    """For each call the first lane of its worker that is free while it lasts."""
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


class _Drawing:
    """Events of a trace that are being made."""

    def __init__(self, rows: dict[int, int], offsets: dict[int, int], base_ns: int) -> None:
        self._rows = rows
        self._offsets = offsets
        self._base_ns = base_ns
        self.events: list[Event] = []

    def _us(self, worker: int, when_ns: int) -> float:
        return (when_ns - self._offsets.get(worker, 0) - self._base_ns) / 1000

    def name_process(self, worker: int, name: str) -> None:
        row = self._rows[worker]
        self.events += [
            {"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "process_labels", "pid": row, "tid": 0, "args": {"labels": f"worker {worker}"}},
            {"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": worker}},
        ]

    def name_thread(self, worker: int, thread: int, name: str) -> None:
        self.events.append(
            {"ph": "M", "name": "thread_name", "pid": self._rows[worker], "tid": thread, "args": {"name": name}}
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
                "pid": self._rows[span.worker],
                "tid": thread,
                "ts": self._us(span.worker, span.start_ns),
                "dur": max(span.end_ns - span.start_ns, 2) / 1000,
                "args": arguments,
            }
        )

    def arrows(self, calls: list[Span], threads: dict[int, int], runs: list[Span]) -> None:
        """From each call to its run, and from there back to the call's end."""
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
        """A slice of its own at the end of ``span``, for an arrow.

        Perfetto ties an arrow to the slice that began last before it, and lets it point to the later one of two.
        """
        start_ns = span.end_ns - min(MOMENT_NS, (span.end_ns - span.start_ns) // 4)
        self.slice(Span(RUN, span.worker, thread, "answer", start_ns, span.end_ns, span.call), thread)
        return span, thread, start_ns

    def _arrow(self, name: str, number: int, start: tuple[Span, int, int], end: tuple[Span, int, int]) -> None:
        for phase, (span, thread, when_ns) in (("s", start), ("f", end)):
            event: Event = {
                "ph": phase,
                "cat": "farcall",
                "name": name,
                "id": number,
                "pid": self._rows[span.worker],
                "tid": thread,
                "ts": self._us(span.worker, when_ns),
            }
            if phase == "f":
                event["bp"] = "e"
            self.events.append(event)
