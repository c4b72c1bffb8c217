"""A Chrome trace as Perfetto's trace processor reads it; what it drops, or would put in the wrong place, is an error.

It builds a stack of slices for each thread, ties each end of an arrow to the slice that began last there, and counts
what it could not make sense of; all of that must come to what the file holds.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes.trace_processor import TraceProcessor

ROUNDING_US = 0.002  # times are written as doubles of microseconds: some nanoseconds are lost on the way


class Slice(NamedTuple):
    """One slice, with the slice that it lies in."""

    process: str
    thread: int
    thread_name: str | None
    name: str
    start_us: float
    end_us: float
    args: dict[str, Any]
    parent: Slice | None

    def contains(self, other: Slice) -> bool:
        return self.start_us - ROUNDING_US <= other.start_us and other.end_us <= self.end_us + ROUNDING_US


class Arrow(NamedTuple):
    """From one slice to another."""

    name: str
    start: Slice
    end: Slice


class Trace:
    """What a file says; reading one that is wrong raises AssertionError."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
        with TraceProcessor(content) as processor:
            wrong = processor.query(
                "select name, value from stats where value > 0 and (severity != 'info' or name like 'flow%')"
            )
            assert not wrong, wrong
            self.processes = _processes(processor)
            slices = _slices(processor)
            self.arrows = _arrows(processor, slices)
        self.slices = list(slices.values())
        # Each event has become something.
        names = list(self.processes.values())
        assert all(names.count(event["args"]["name"]) == 1 for event in events if event["name"] == "process_name"), (
            names
        )
        assert len(self.slices) == sum(event["ph"] == "X" for event in events)
        assert len(self.arrows) == sum(event["ph"] == "s" for event in events)
        self._check_ends_of_arrows(events)

    def named(self, name: str, process: str | None = None) -> list[Slice]:
        """The slices of that name."""
        return [found for found in self.slices if found.name == name and process in (None, found.process)]

    def only(self, name: str, process: str | None = None) -> Slice:
        """The one slice of that name."""
        found = self.named(name, process)
        assert len(found) == 1, (name, process, sorted({each.name for each in self.slices}))
        return found[0]

    def _check_ends_of_arrows(self, events: list[Any]) -> None:
        """Each is inside of some slice: Perfetto would take one that is over already."""
        outer: dict[tuple[str, int], list[Slice]] = defaultdict(list)
        for each in self.slices:
            if each.parent is None:
                outer[each.process, each.thread].append(each)
        for event in events:
            if event["ph"] in "sf":
                slices = outer[self.processes[event["pid"]], event["tid"]]
                last = bisect(slices, event["ts"] + ROUNDING_US, key=lambda each: each.start_us) - 1
                assert last >= 0, event
                assert event["ts"] <= slices[last].end_us + ROUNDING_US, event


def _processes(processor: TraceProcessor) -> dict[int, str]:
    found = processor.query("select pid, name from process where name is not null and name != ''")
    return {row["pid"]: row["name"] for row in found}


def _arguments(processor: TraceProcessor) -> dict[int, dict[str, Any]]:
    """By the number of each set; what is inside of lists has keys like ``shapes[0][1]``."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in processor.query(
        "select arg_set_id, key, coalesce(int_value, real_value, string_value) as value from args"
    ):
        found[row["arg_set_id"]][row["key"].removeprefix("args.")] = row["value"]
    return found


def _slices(processor: TraceProcessor) -> dict[int, Slice]:
    arguments = _arguments(processor)
    found: dict[int, Slice] = {}
    for row in processor.query(
        "select slice.*, pid, tid, thread.name as thread, process.name as process from slice"
        " join thread_track on slice.track_id = thread_track.id join thread using (utid)"
        " left join process using (upid) order by ts, depth"
    ):
        assert row["dur"] > 0, row
        parent = None if row["parent_id"] is None else found[row["parent_id"]]
        found[row["id"]] = new = Slice(
            row["process"] or str(row["pid"]),
            row["tid"],
            row["thread"],
            row["name"],
            row["ts"] / 1000,
            (row["ts"] + row["dur"]) / 1000,
            arguments[row["arg_set_id"]],
            parent,
        )
        assert parent is None or parent.contains(new), f"{new.name} and {parent.name} overlap in part"
    return found


def _arrows(processor: TraceProcessor, slices: dict[int, Slice]) -> list[Arrow]:
    return [
        Arrow(row["name"], slices[row["slice_out"]], slices[row["slice_in"]])
        for row in processor.query("select slice_out, slice_in, extract_arg(arg_set_id, 'name') as name from flow")
    ]
