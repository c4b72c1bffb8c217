"""How spans are drawn: lanes for calls that overlap, arrows, and what is not drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.processes.trace_reader import Trace

from farcall.observe.spans import CALL, OPERATOR, RUN, Harvest, Span
from farcall.observe.trace import add_to_trace, chrome_trace

US = 1_000
ASYNC: dict[str, Any] = {"kind": "async"}


def read(trace: dict[str, Any], folder: Path) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return Trace(path)


def test_calls_that_overlap_have_lanes_of_their_own(tmp_path: Path) -> None:
    calls = [
        Span(CALL, 0, 9, "a", 10 * US, 50 * US, 1, 0, ASYNC),
        Span(CALL, 0, 9, "b", 20 * US, 60 * US, 2, 0, ASYNC),
        Span(CALL, 0, 9, "c", 50 * US, 70 * US, 3, 0, ASYNC),
        Span(CALL, 1, 9, "d", 15 * US, 70 * US, 4, 0, ASYNC),
    ]
    trace = read(chrome_trace(Harvest(calls, [], {0: "w0", 1: "w1"}), 0), tmp_path)
    lanes = {name: trace.only(name).thread for name in "abcd"}
    assert lanes["a"] == lanes["c"] != lanes["b"]
    assert trace.only("d").process == "w1"


def test_arrows_go_from_the_call_to_the_first_part_and_back_from_the_last(tmp_path: Path) -> None:
    spans = [
        Span(CALL, 0, 1, "call", 0, 100 * US, 1, 0, {"kind": "sync"}),
        Span(RUN, 1, 2, "first", 20 * US, 30 * US, 1),
        Span(RUN, 1, 3, "last", 40 * US, 60 * US, 1),
        Span(OPERATOR, 1, 3, "aten::add", 41 * US, 59 * US, 1),
    ]
    trace = read(chrome_trace(Harvest(spans, [], {0: "w0", 1: "w1"}), 0), tmp_path)
    request, answer = trace.arrows
    assert (request.start.name, request.end.name) == ("call", "first")
    assert answer.start.parent == trace.only("last")
    assert answer.end.parent == trace.only("call")


def test_what_has_no_time_is_not_drawn_and_what_is_missing_is_said(tmp_path: Path) -> None:
    spans = [
        Span(OPERATOR, 0, 1, "[memory]", 5, 5, 0, 0, {"timeless": True, "cpu_bytes": 4}),
        Span(CALL, 0, 1, "unheard", 5, 900, 1, 0, {"kind": "sync", "unanswered": True}),
        Span(RUN, 1, 1, "its run", 50, 100, 1),
    ]
    document = chrome_trace(Harvest(spans, [], {0: "w0", 1: "w1"}, 17), 0)
    trace = read(document, tmp_path)
    assert document["farcallDroppedOperators"] == 17
    assert sorted(found.name for found in trace.slices) == ["its run", "unheard"]
    assert [arrow.name for arrow in trace.arrows] == ["request"]


def test_nothing_is_a_trace_too(tmp_path: Path) -> None:
    assert read(chrome_trace(Harvest([], [], {0: "w0"}), 0), tmp_path).slices == []


def test_rows_are_added_beside_those_of_torch(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "baseTimeNanoseconds": 1_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 42, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_sort_index", "pid": 42, "tid": 0, "args": {"sort_index": 42}},
            {"ph": "M", "name": "thread_name", "pid": 42, "tid": 7, "args": {"name": "thread 7 (python)"}},
            {"ph": "M", "name": "thread_name", "pid": 42, "tid": 8, "args": {"name": "thread 8 (python)"}},
            {"ph": "X", "name": "aten::mul", "pid": 42, "tid": 7, "ts": 2.0, "dur": 1.0},
            {"ph": "X", "name": "aten::add", "pid": 42, "tid": 8, "ts": 2.0, "dur": 1.0},
        ],
    }
    spans = [
        Span(CALL, 3, 7, "call", 4_000, 9_000, 1, 0, {"kind": "sync", "thread": "MainThread"}),
        Span(RUN, 0, 7, "run", 5_000, 6_000, 1, 0, {"thread": "server"}),
    ]
    add_to_trace(document, Harvest(spans, [], {0: "w0", 3: "w3"}), 3, process=42)
    trace = read(document, tmp_path)
    assert trace.only("aten::mul").process == trace.only("call").process == "w3"
    assert trace.only("call").start_us == 3.0
    assert trace.only("run").process == "w0"
    # Threads have the names that they have in Python, others those that torch has written; rows are in order of rank.
    assert [trace.only(name).thread_name for name in ("call", "run", "aten::mul", "aten::add")] == [
        "MainThread",
        "server",
        "MainThread",
        "thread 8 (python)",
    ]
    places = [event for event in document["traceEvents"] if event["name"] == "process_sort_index"]
    assert [(trace.processes[event["pid"]], event["args"]["sort_index"]) for event in places] == [("w0", 0), ("w3", 3)]
