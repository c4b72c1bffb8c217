"""A strict reader of Chrome traces: what Perfetto's importer would put in the wrong place, or drop, is an error here.

The rules are those of its trace processor (v52), as seen at work on such files. It builds a stack of slices for each
thread, so slices of a thread must nest or be apart; it ties each end of an arrow to the slice that began last, and has
it point to the later one of the two; it knows arrows by numbers only; and a row has the first name that it is given.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROUNDING_US = 0.002  # times are written as doubles of microseconds: some nanoseconds are lost on the way


class Slice(NamedTuple):
    """One slice, with the slice that it lies in."""

    process: str
    thread: Any
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
        document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        assert isinstance(document["baseTimeNanoseconds"], int)
        events = document["traceEvents"]
        for event in events:
            assert event["ph"] in "MXsfi", event
            assert isinstance(event["name"], str), event
        self.processes = self._process_names(events)
        self.slices: list[Slice] = []
        self._by_thread: dict[tuple[Any, Any], list[Slice]] = {}
        threads: dict[tuple[Any, Any], list[Any]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append(event)
        for row, found in threads.items():
            self._by_thread[row] = self._nested(found)
            self.slices += self._by_thread[row]
        self.arrows = self._arrows(events)

    def named(self, name: str, process: str | None = None) -> list[Slice]:
        """The slices of that name."""
        return [found for found in self.slices if found.name == name and process in (None, found.process)]

    def only(self, name: str, process: str | None = None) -> Slice:
        """The one slice of that name."""
        found = self.named(name, process)
        assert len(found) == 1, (name, process, sorted({each.name for each in self.slices}))
        return found[0]

    @staticmethod
    def _process_names(events: list[Any]) -> dict[Any, str]:
        names: dict[Any, str] = {}
        for event in events:
            if event["ph"] == "M" and event["name"] == "process_name":
                assert event["pid"] not in names, f"a second name: {event}"  # the first would count
                names[event["pid"]] = event["args"]["name"]
        assert len(set(names.values())) == len(names), f"two rows have one name: {names}"
        return names

    def _nested(self, events: list[Any]) -> list[Slice]:
        found: list[Slice] = []
        stack: list[Slice] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            assert event["dur"] > 0, event
            assert event["ts"] >= 0, event
            start_us, end_us = event["ts"], event["ts"] + event["dur"]
            while stack and stack[-1].end_us <= start_us + ROUNDING_US:
                stack.pop()
            process = self.processes.get(event["pid"], str(event["pid"]))
            new = Slice(
                process,
                event["tid"],
                event["name"],
                start_us,
                end_us,
                event.get("args", {}),
                stack[-1] if stack else None,
            )
            assert not stack or stack[-1].contains(new), f"{new.name} and {stack[-1].name} overlap in part"
            stack.append(new)
            found.append(new)
        return found

    def _arrows(self, events: list[Any]) -> list[Arrow]:
        ends: dict[tuple[Any, Any], dict[str, Any]] = defaultdict(dict)
        for event in events:
            if event["ph"] in "sf":
                assert isinstance(event["id"], int), event  # others are dropped
                assert 0 <= event["id"] < 1 << 53, event
                key = (event["cat"], event["id"])
                assert event["ph"] not in ends[key], f"two ends of one kind: {event}"
                ends[key][event["ph"]] = event
        arrows = []
        for key, pair in ends.items():
            assert set(pair) == {"s", "f"}, f"an arrow without an end: {key}"
            assert pair["f"]["bp"] == "e" or key[0] != "farcall"
            assert pair["s"]["ts"] <= pair["f"]["ts"] + ROUNDING_US, f"an arrow into the past: {pair}"
            arrow = Arrow(pair["s"]["name"], self._around(pair["s"]), self._around(pair["f"]))
            assert arrow.start.start_us <= arrow.end.start_us + ROUNDING_US, f"it would point the other way: {arrow}"
            arrows.append(arrow)
        return arrows

    def _around(self, event: Any) -> Slice:
        """The slice that began last at the moment of an arrow's end; it must not be over."""
        begun = [
            each
            for each in self._by_thread.get((event["pid"], event["tid"]), ())
            if each.start_us <= event["ts"] + ROUNDING_US
        ]
        assert begun, f"no slice before {event}"
        assert event["ts"] < begun[-1].end_us + ROUNDING_US, f"{begun[-1].name} is over before {event}"
        return begun[-1]
