"""`farcall trace`: a running cluster recorded from outside of it, without a line in its program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.kit.observing import find_observer
from tests.processes.trace_reader import Trace

import farcall
from farcall.observe import cluster
from farcall.observe.spans import CALL, OPERATOR, Harvest
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.runtime.observing.profiling import PROFILING
from farcall.testing.cluster import finish, start_cluster

PATIENCE_S = 120.0
NAMES = ["w0", "w1", "w2"]


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def onward(to: str, x: torch.Tensor) -> torch.Tensor:
    return farcall.rpc_sync(to, product, args=(x + 1,))


def busy(rank: int, done: str) -> int:
    """Each member calls the next, which calls the one after that; how many recorders are left at the end."""
    following, last = NAMES[(rank + 1) % 3], NAMES[(rank + 2) % 3]
    while not Path(done).exists():
        farcall.rpc_sync(following, onward, args=(last, torch.ones(4, 4)))
    farcall.barrier(NAMES)
    return PROFILING.everywhere


def test_a_running_job_is_one_trace(tmp_path: Path) -> None:
    directory, done, output = tmp_path / "run", tmp_path / "done", tmp_path / "trace.json.gz"
    members = start_cluster(3, busy, str(done), observing=ObservingOptions(runtime_directory=str(directory)))
    try:
        wait_for(lambda: _sees(directory, 3))
        shown = subprocess.run(
            [sys.executable, "-m", "farcall", "trace", "--seconds", "3", "-o", str(output), "--shapes"],
            env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(directory)},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
    finally:
        done.touch()
        left = finish(members)
    assert shown.returncode == 0, shown.stderr
    assert "3 workers" in shown.stdout
    assert left == [0, 0, 0]  # nobody records any more
    trace = Trace(output)
    assert set(trace.processes.values()) == set(NAMES)
    for rank, name in enumerate(NAMES):
        caller, last = NAMES[(rank - 1) % 3], NAMES[(rank + 1) % 3]
        # Of one that was called before the recording began, nobody knows the call.
        runs = {run.args["call"]: run for run in trace.named("onward", name) if "call" in run.args}
        calls = {call.args["call"]: call for call in trace.named(f"rpc_sync#onward({caller} -> {name})", caller)}
        answered = {number: call for number, call in calls.items() if "unanswered" not in call.args}
        both = [(answered[number], run) for number, run in runs.items() if number in answered]
        assert both
        for call, run in both:
            assert call.contains(run)  # by one clock
        inner = trace.named(f"rpc_sync#product({name} -> {last})", name)
        assert any(call.parent is not None and call.parent.name == "onward" for call in inner)
        assert trace.named("aten::add", name)
        assert any("shapes[0][0]" in each.args for each in trace.named("aten::matmul", name))


def _sees(directory: Path, count: int) -> bool:
    try:
        with find_observer(directory) as observer:
            return sum(one.state == "running" for one in observer.metrics().answers) == count
    except farcall.errors.RpcError:
        return False


def test_a_recording_that_nobody_fetches_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "GRACE_S", 0.05)
    options = RpcBackendOptions(
        init_method=f"file://{tmp_path}/meet", observing=ObservingOptions(runtime_directory=str(tmp_path / "run"))
    )
    with farcall.Node("alone", 0, 1, options):
        with find_observer(tmp_path / "run") as observer:
            begin = msgspec.msgpack.encode(cluster.TraceWish("unfetched", 0, 0.05))
            begun = observer.ask(cluster.TRACE_BEGIN, tuple[str, int], PATIENCE_S, begin)
            assert begun.answers == [("alone", 0)]
        wait_for(lambda: PROFILING.everywhere == 0)
        with find_observer(tmp_path / "run") as observer:
            name = msgspec.msgpack.encode("unfetched")
            (harvest,) = observer.ask(cluster.TRACE_END, Harvest, PATIENCE_S, name).answers
            assert harvest.spans == []


def test_an_interrupted_trace_is_what_there_is_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RpcBackendOptions(
        init_method=f"file://{tmp_path}/meet", observing=ObservingOptions(runtime_directory=str(tmp_path / "run"))
    )
    with farcall.Node("alone", 0, 1, options) as node, find_observer(tmp_path / "run") as observer:

        def interrupted(seconds: float) -> None:
            thread = threading.Thread(target=node.rpc_sync, args=("alone", product, (torch.ones(2, 2),)))
            thread.start()
            thread.join()
            raise KeyboardInterrupt

        monkeypatch.setattr(cluster.time, "sleep", interrupted)
        found = cluster.record(observer, 60.0, 0)
        kinds = Counter(span.kind for span in found.harvest.spans)
        assert (kinds[CALL], found.missing, found.harvest.names) == (1, [], {0: "alone"})
        assert kinds[OPERATOR] > 0
