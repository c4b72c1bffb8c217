"""The reader of traces that other tests rely on: Perfetto's trace processor does complain about what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.processes.trace_reader import Trace


def process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def a_slice(name: str, pid: int, start_us: float, us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": start_us, "dur": us, "args": args}


def arrow_end(phase: str, number: Any, pid: int, us: float) -> dict[str, Any]:
    return {"ph": phase, "cat": "c", "name": "arrow", "id": number, "pid": pid, "tid": 1, "ts": us, "bp": "e"}


GOOD = [
    process(5, "w0"),
    process(6, "w1"),
    a_slice("call", 5, 10.0, 20.0, bytes=7, shapes=[[2, 3]]),
    a_slice("inner", 5, 12.0, 1.5),
    a_slice("run", 6, 15.0, 5.0),
    arrow_end("s", 1, 5, 11.0),
    arrow_end("f", 1, 6, 16.0),
]


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_what_a_good_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    trace = Trace(path)
    assert trace.processes == {5: "w0", 6: "w1"}
    call = trace.only("call", "w0")
    assert (call.start_us, call.end_us, call.args["bytes"], call.args["shapes[0][1]"]) == (10.0, 30.0, 7, 3)
    assert trace.only("inner").parent == call
    assert trace.only("run").process == "w1"
    assert [(arrow.name, arrow.start, arrow.end) for arrow in trace.arrows] == [("arrow", call, trace.only("run"))]
    compressed = tmp_path / "trace.json.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert Trace(compressed).slices == trace.slices


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([*GOOD, a_slice("across", 5, 25.0, 10.0)], id="slices overlap in part"),
        pytest.param([*GOOD, process(5, "another")], id="a second name"),
        pytest.param([*GOOD, process(7, "w1")], id="two rows of one name"),
        pytest.param([*GOOD, arrow_end("s", 2, 5, 11.0)], id="an arrow without an end"),
        pytest.param([*GOOD, arrow_end("f", 2, 6, 16.0)], id="an arrow without a start"),
        pytest.param([*GOOD, arrow_end("s", 2, 5, 50.0), arrow_end("f", 2, 6, 51.0)], id="an arrow from nowhere"),
        pytest.param([*GOOD, arrow_end("s", "x", 5, 11.0), arrow_end("f", "x", 6, 16.0)], id="an arrow by a text"),
        pytest.param([*GOOD, a_slice("empty", 5, 40.0, 0.0)], id="a slice without a length"),
    ],
)
def test_what_is_wrong_is_an_error(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError):
        Trace(write(tmp_path, events))


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": ')
    with pytest.raises((AssertionError, ValueError)):
        Trace(path)
