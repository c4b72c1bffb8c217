"""Profiles of work on several workers: what comes home, under which names, at which time, and in one trace."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.waiting import wait_until
from tests.processes.trace_reader import Slice, Trace

import farcall
import farcall.autograd as autograd
from farcall.observe.profile import THREAD
from farcall.runtime.node import current_runtime
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.testing.cluster import finish, run_cluster, start_processes, temporary_file_url

SECOND_NS = 1_000_000_000

# ---------------------------------------------------------------------- what the callees run


class Held:
    weight = torch.full((3, 3), 0.5, requires_grad=True)


def onward(route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Through this worker's weight, then on to the next of the route."""
    y = x @ Held.weight
    return farcall.rpc_sync(route[0], onward, (route[1:], y)) if route else y


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def fails(x: torch.Tensor) -> None:
    x.sin()
    raise ValueError("on purpose")


async def in_steps(to: str, x: torch.Tensor) -> torch.Tensor:
    y = await farcall.rpc_async(to, twice, (x,))
    await asyncio.sleep(0)
    return y.cos()


@farcall.functions.async_execution
def later(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return farcall.rpc_async(to, twice, (x,))


@farcall.functions.async_execution
def with_callback(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return farcall.rpc_async(to, twice, (x,)).then(lambda future: future.value().exp())


class Keeper:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def doubled(self) -> torch.Tensor:
        return self.value * 2


def profiles_itself() -> list[str]:
    with torch.profiler.profile() as prof:
        torch.ones(2).exp()
    torch.ones(2).sin()
    return [event.name for event in prof.events()]


def set_clock_ahead(seconds: float) -> None:
    PROFILING.clock_ns = lambda: time.time_ns() + int(seconds * SECOND_NS)


def is_quiet() -> bool:
    return not is_profiled() and THREAD.collector is None and PROFILING.everywhere == 0


def forward_and_backward(names: list[str]) -> None:
    with autograd.context() as context_id:
        x = torch.ones(3, 3, requires_grad=True)
        loss = farcall.rpc_sync(names[0], onward, (names[1:], x)).sum()
        autograd.backward(context_id, [loss])
        assert x in autograd.get_gradients(context_id)


def outermost(found: Slice) -> Slice:
    return found if found.parent is None else outermost(found.parent)


def check_job(trace: Trace, home: str) -> None:
    """Calls, runs and operators of `forward_and_backward` from ``home`` over w1 and w2 are where they belong."""
    assert {home, "w1", "w2"} <= set(trace.processes.values())
    first = trace.only(f"rpc_sync#onward({home} -> w1)", home)
    second = trace.only("rpc_sync#onward(w1 -> w2)", "w1")
    runs = {process: trace.only("onward", process) for process in ("w1", "w2")}
    assert first.thread_name == "MainThread"
    assert {process: run.thread_name for process, run in runs.items()} == {
        "w1": "farcall-worker-w1",
        "w2": "farcall-worker-w2",
    }
    assert first.contains(runs["w1"])
    assert second.contains(runs["w2"])
    assert second.parent == runs["w1"]
    for process, run in runs.items():
        matmul = trace.only("aten::matmul", process)
        assert matmul.parent == run
        assert run.contains(matmul)
    for call, process in ((first, "w1"), (second, "w2")):
        assert call.args["request_bytes"] > 0
        assert call.args["response_bytes"] > 0
        assert "unix" in call.args["transport"]
        assert call.args["call"] == runs[process].args["call"]
    # Backward: each worker's part lies inside the call for it, and its operators inside the part.
    told = [each for each in trace.slices if each.name.startswith("backward(")]
    assert {each.name.split("-> ")[1] for each in told} >= {"w1)", "w2)"}
    for process in ("w1", "w2"):
        parts = trace.named("backward", process)
        assert parts
        call = next(each for each in told if each.args["call"] == parts[0].args["call"])
        assert all(call.contains(part) for part in parts)
        assert any(outermost(each) in parts for each in trace.named("MmBackward0", process))
    for call, run in ((first, runs["w1"]), (second, runs["w2"])):
        assert any((arrow.name, arrow.start, arrow.end) == ("request", call, run) for arrow in trace.arrows)
        assert any(
            (arrow.name, arrow.start.parent, arrow.end.parent) == ("answer", run, call) for arrow in trace.arrows
        )
    assert any(arrow.name == "request" and arrow.end.name == "backward" for arrow in trace.arrows)
    farcalls = [arrow.name for arrow in trace.arrows if arrow.name in ("request", "answer")]
    calls = [each for each in trace.slices if "to" in each.args]
    assert len(farcalls) == 2 * len(calls) > 0


# ---------------------------------------------------------------------- one trace


def cluster_trace(rank: int, folder: str) -> None:
    set_clock_ahead((0.0, 500.0, -300.0)[rank])
    farcall.barrier(["w0", "w1", "w2"])
    if rank == 0:
        with farcall.profile() as prof:
            forward_and_backward(["w1", "w2"])
            torch.ones(3).tanh()
        assert prof.missing == {}
        prof.export_chrome_trace(Path(folder) / "trace.json")
        prof.export_chrome_trace(Path(folder) / "trace.json.gz")
        names = {event.name for event in prof.events()}
        assert "rpc_sync#onward(w0 -> w1)#remote_op: rpc_sync#onward(w1 -> w2)#remote_op: aten::matmul" in names
        assert any(average.key == "aten::tanh" for average in prof.key_averages())
        for name in ("w1", "w2"):
            assert farcall.rpc_sync(name, is_quiet)
        assert is_quiet()


def test_a_job_of_three_workers_is_one_trace(tmp_path: Path) -> None:
    run_cluster(3, cluster_trace, str(tmp_path))
    trace = Trace(tmp_path / "trace.json")
    check_job(trace, "w0")
    assert sorted(trace.processes.values()) == ["w0", "w1", "w2"]
    assert trace.only("aten::tanh", "w0")
    assert len(Trace(tmp_path / "trace.json.gz").slices) == len(trace.slices)
    # Clocks that are minutes apart: everything lies in the time that the job took.
    assert max(each.end_us for each in trace.slices) - min(each.start_us for each in trace.slices) < 100e6


def trace_without_a_fixed_size(rank: int, url: str, folder: str) -> None:
    farcall.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=farcall.RpcBackendOptions(init_method=url))
    wait_until(lambda: len(farcall.members()) == 3, "all are there")
    farcall.barrier(["w0", "w1", "w2"])
    if rank == 0:
        with farcall.profile() as prof:
            forward_and_backward(["w1", "w2"])
        prof.export_chrome_trace(Path(folder) / "trace.json")
    # Not by a call, which would be in the profile without its answer.
    wait_until((Path(folder) / "trace.json").exists, "the profile is over")
    farcall.barrier(["w0", "w1", "w2"])
    farcall.shutdown()


def test_backward_passes_are_recorded_in_a_group_without_a_fixed_size(tmp_path: Path) -> None:
    finish(start_processes(3, trace_without_a_fixed_size, temporary_file_url(), str(tmp_path)))
    check_job(Trace(tmp_path / "trace.json"), "w0")


def kineto_trace(rank: int, folder: str) -> None:
    set_clock_ahead((0.0, 500.0, -300.0)[rank])
    farcall.barrier(["w0", "w1", "w2"])
    if rank == 0:
        with torch.profiler.profile() as prof:
            forward_and_backward(["w1", "w2"])
            torch.ones(3).tanh()
        prof.export_chrome_trace(str(Path(folder) / "trace.json"))
        assert not any("rpc_" in event.name for event in prof.events())  # that list is torch's own
        for name in ("w1", "w2"):
            assert farcall.rpc_sync(name, is_quiet)
        assert is_quiet()


def test_the_trace_of_torch_profiler_has_the_other_workers(tmp_path: Path) -> None:
    run_cluster(3, kineto_trace, str(tmp_path))
    trace = Trace(tmp_path / "trace.json")
    check_job(trace, "w0")
    # On the row that torch itself draws, the call lies among the operators of its thread.
    call, tanh = trace.only("rpc_sync#onward(w0 -> w1)", "w0"), trace.only("aten::tanh", "w0")
    assert call.thread == tanh.thread


def other_ways_to_write(rank: int, folder: str) -> None:
    if rank != 0:
        return
    x = torch.ones(3)
    scheduled = Path(folder) / "scheduled.json.gz"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(scheduled)),
    ) as prof:
        for _ in range(6):
            farcall.rpc_sync("w1", twice, (x,))
            prof.step()
    handler = torch.profiler.tensorboard_trace_handler(str(Path(folder) / "tensorboard"))
    with torch.profiler.profile(on_trace_ready=handler):
        farcall.rpc_sync("w1", twice, (x,))
    with torch.autograd.profiler.profile() as older:
        farcall.rpc_sync("w1", twice, (x,))
    older.export_chrome_trace(str(Path(folder) / "older.json"))


def test_whatever_way_torch_writes_a_trace_it_has_the_other_workers(tmp_path: Path) -> None:
    run_cluster(2, other_ways_to_write, str(tmp_path))
    (tensorboard,) = (tmp_path / "tensorboard").iterdir()
    for path, calls in ((tmp_path / "scheduled.json.gz", 2), (tensorboard, 1), (tmp_path / "older.json", 1)):
        trace = Trace(path)
        made, runs = trace.named("rpc_sync#twice(w0 -> w1)", "w0"), trace.named("twice", "w1")
        assert len(made) == len(runs) == calls, path
        assert all(call.contains(run) for call, run in zip(made, runs, strict=True))


# ---------------------------------------------------------------------- ways to call


def call_what_fails(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        farcall.rpc_sync("w1", fails, (x,))


def ways(rank: int) -> dict[str, list[Any]] | None:
    if rank != 0:
        return None
    x = torch.ones(3)
    found: dict[str, list[Any]] = {}

    def note(name: str, call: Any) -> None:
        with torch.autograd.profiler_legacy.profile(record_shapes=True) as prof:
            call()
        found[name] = [(event.name, event.node_id, event.is_remote) for event in prof.function_events]

    note("steps", lambda: farcall.rpc_sync("w1", in_steps, ("w2", x)))
    note("later", lambda: farcall.rpc_async("w1", later, ("w2", x)).wait())
    note("callback there", lambda: farcall.rpc_sync("w1", with_callback, ("w2", x)))
    note("callback here", lambda: farcall.rpc_async("w1", twice, (x,)).then(lambda future: future.value().exp()).wait())
    note("self", lambda: farcall.rpc_sync("w0", twice, (x,)))
    keeper = farcall.remote("w1", Keeper, (x,))
    note("method", lambda: keeper.rpc_sync().doubled())
    note("to_here", lambda: keeper.rpc_sync().doubled() + farcall.remote("w1", twice, (x,)).to_here())
    note("failure", lambda: call_what_fails(x))
    note("inside", lambda: found.setdefault("theirs", farcall.rpc_sync("w1", profiles_itself)))
    assert is_quiet()
    assert all(farcall.rpc_sync(name, is_quiet) for name in ("w1", "w2"))
    return found


def test_every_way_to_call_brings_its_events_home() -> None:
    found = run_cluster(3, ways)[0]
    steps = "rpc_sync#in_steps(w0 -> w1)"
    assert (f"{steps}#remote_op: aten::cos", 1, True) in found["steps"]
    assert (f"{steps}#remote_op: rpc_async#twice(w1 -> w2)", 1, True) in found["steps"]
    assert (f"{steps}#remote_op: rpc_async#twice(w1 -> w2)#remote_op: aten::add", 2, True) in found["steps"]
    assert (
        "rpc_async#later(w0 -> w1)#remote_op: rpc_async#twice(w1 -> w2)#remote_op: aten::add",
        2,
        True,
    ) in found["later"]
    assert ("rpc_async#later(w0 -> w1)", 0, False) in found["later"]
    assert ("rpc_sync#with_callback(w0 -> w1)#remote_op: aten::exp", 1, True) in found["callback there"]
    assert any(name == "aten::exp" and not is_remote for name, _, is_remote in found["callback here"])
    assert ("rpc_sync#twice(w0 -> w0)#remote_op: aten::add", 0, True) in found["self"]
    assert ("rpc_sync#doubled(w0 -> w1)#remote_op: aten::mul", 1, True) in found["method"]
    assert any(name == "to_here#(w0)->(w1)" for name, _, _ in found["to_here"])
    assert ("rpc_sync#fails(w0 -> w1)#remote_op: aten::sin", 1, True) in found["failure"]
    # A function that profiles itself does so undisturbed; the rest of it is still recorded for its caller.
    assert "aten::exp" in found["theirs"]
    inside = {name for name, _, _ in found["inside"]}
    assert "rpc_sync#profiles_itself(w0 -> w1)#remote_op: aten::sin" in inside
    assert "rpc_sync#profiles_itself(w0 -> w1)#remote_op: aten::exp" not in inside


# ---------------------------------------------------------------------- many at once, and none


def many_at_once(rank: int) -> int | None:
    if rank != 0:
        return None
    with torch.autograd.profiler_legacy.profile() as prof:
        futures = [farcall.rpc_async("w1", twice, (torch.ones(2),)) for _ in range(200)]
        torch.futures.wait_all(futures)
    return sum(event.name.endswith("#remote_op: aten::add") for event in prof.function_events)


def test_requests_are_profiled_at_the_same_time_each_for_itself() -> None:
    assert run_cluster(2, many_at_once)[0] == 200


def abandoned_member(rank: int, url: str) -> None:
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=url),
    )
    if rank == 0:
        farcall.profile().__enter__()
        wait_until(lambda: farcall.rpc_sync("w1", has_seen_it), "w1 records, and has seen that it does")
        farcall.shutdown(graceful=False)
        return
    wait_until(lambda: recordings() == 1, "w0 has this worker record")
    Seen.event.set()
    wait_until(lambda: recordings() == 0, "this worker stops when w0 is gone")
    farcall.shutdown(graceful=False)


class Seen:
    event = threading.Event()


def has_seen_it() -> bool:
    return Seen.event.is_set()


def recordings() -> int:
    return PROFILING.everywhere


def test_a_recording_ends_with_whoever_asked_for_it() -> None:
    finish(start_processes(2, abandoned_member, temporary_file_url()))


def worker_gone(rank: int, url: str) -> tuple[list[str], list[str]] | None:
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=3,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=url),
    )
    if rank == 2:
        wait_until(lambda: recordings() == 1, "w0 has this worker record")
        farcall.shutdown(graceful=False)
        return None
    found = None
    if rank == 0:
        with farcall.profile() as prof:
            farcall.rpc_sync("w1", twice, (torch.ones(2),))
            wait_until(lambda: current_runtime().peer("w2").broken, "w2 has left")
        found = ([event.name for event in prof.events()], list(prof.missing))
    else:
        wait_until(lambda: current_runtime().peer("w0").broken, "w0 is done")
    farcall.shutdown(graceful=False)
    return found


def test_a_worker_that_is_gone_is_missing_and_the_others_are_not() -> None:
    names, missing = finish(start_processes(3, worker_gone, temporary_file_url()))[0]
    assert missing == ["w2"]
    assert "rpc_sync#twice(w0 -> w1)#remote_op: aten::add" in names


def nothing_left(rank: int) -> int:
    """Sessions are not kept by what was called inside them."""
    if rank:
        return 0
    for _ in range(3):
        with torch.profiler.profile():
            farcall.rpc_sync("w1", twice, (torch.ones(2),))
    gc.collect()
    from farcall.observe.profile import ProfilerSession

    return sum(isinstance(found, ProfilerSession) for found in gc.get_objects())


def test_a_session_dies_with_its_profiler() -> None:
    assert run_cluster(2, nothing_left)[0] == 0
