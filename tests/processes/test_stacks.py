"""Who waits for whom, in a real cluster: a deadlock on purpose, full pools, and what a timeout says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.observing import find_observer
from tests.kit.stopping import stop
from tests.kit.times import LONG_S

import farcall
from farcall.errors import RpcTimeout
from farcall.observe import answering
from farcall.observe.observer import Observer
from farcall.observe.snapshot import WorkerSnapshot
from farcall.observe.troubles import find_troubles
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.runtime.calls import executor
from farcall.runtime.calls import pending as calls
from farcall.runtime.link import dialler, listener
from farcall.testing.cluster import finish, run_cluster, start_cluster, temporary_file_url

ANSWER_S = 200.0
SHORT_S = 2.5
LOCK = threading.Lock()
OPENED = threading.Event()


def take_lock() -> str:
    with LOCK:
        return "taken"


def hold_and_call(other: str, holds: threading.Event) -> None:
    with LOCK:
        holds.set()
        OPENED.wait(ANSWER_S)
        farcall.rpc_sync(other, take_lock, timeout=ANSWER_S)


def opened() -> None:
    OPENED.set()


def deadlocked(rank: int, done: str) -> str:
    """Both members hold their lock, then call a function of the other that needs its lock."""
    other = f"w{1 - rank}"
    holds = threading.Event()
    thread = threading.Thread(target=_expect_failure, args=(hold_and_call, other, holds))
    thread.start()
    assert holds.wait(ANSWER_S)
    farcall.barrier(["w0", "w1"])
    OPENED.set()
    _wait_for(Path(done).exists)
    # The way out of a deadlock: somebody dies. Nobody is asked to be graceful in here.
    os._exit(0)


def _expect_failure(function: Callable[..., None], *args: object) -> None:
    try:
        function(*args)
    except farcall.errors.RpcError:
        pass


def _wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def _snapshots_when(observer: Observer, condition: Callable[[list[WorkerSnapshot]], bool]) -> list[WorkerSnapshot]:
    found: list[WorkerSnapshot] = []

    def look() -> bool:
        found[:] = observer.snapshots(ANSWER_S).answers
        return condition(found)

    _wait_for(look)
    return found


def _command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from farcall.cli import main; main()", *arguments],
        env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(directory)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_who_starts_says_whom_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RpcBackendOptions(
        init_method=temporary_file_url(),
        start_timeout_s=8 * LONG_S,
        observing=ObservingOptions(runtime_directory=str(tmp_path / "run")),
    )
    nodes = [farcall.Node(f"w{rank}", rank=rank, world_size=2, options=options) for rank in range(2)]
    shown: list[str] = []
    prove = dialler.prove

    def look_first(*args: Any) -> Any:
        shown.append(_command(tmp_path / "run", "stacks").stdout)
        return prove(*args)

    monkeypatch.setattr(dialler, "prove", look_first)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 10 * LONG_S)  # a program starts in the middle of the handshake
    first = threading.Thread(target=nodes[0].start)
    first.start()
    try:
        nodes[1].start()
    finally:
        first.join()
        for node in nodes:
            node.shutdown(graceful=False)
    # Either may have been asked: neither is connected to the other.
    assert re.search(r"still starting: 1 of the workers; not connected yet: w[01] \(to 1 of them\)", shown[0]), shown


def test_a_deadlock_is_named(tmp_path: Path) -> None:
    directory, done = tmp_path / "run", tmp_path / "done"
    members = start_cluster(2, deadlocked, str(done), observing=ObservingOptions(runtime_directory=str(directory)))
    try:
        with find_observer(directory) as observer:

            def both_wait(found: list[WorkerSnapshot]) -> bool:
                return len(found) == 2 and all(
                    any(call.function == "take_lock" for call in one.calls)
                    and any(call.function == "take_lock" and call.thread_id for call in one.served)
                    for one in found
                )

            snapshots = _snapshots_when(observer, both_wait)
            (trouble,) = find_troubles(snapshots)
            assert (trouble.kind, sorted(trouble.workers)) == ("cycle", ["w0", "w1"])
        tries = (_command(directory, "stacks") for _ in range(20))  # on a busy machine a worker may answer too late
        shown = next((one for one in tries if "does not answer" not in one.stderr and "CYCLE" in one.stdout), None)
        assert shown is not None
        assert shown.returncode == 1, shown.stderr
        assert "CYCLE: w0 and w1 wait for each other" in shown.stdout
        assert "serves take_lock() for w1: running for" in shown.stdout
        assert "with LOCK:" in shown.stdout
        assert "in hold_and_call: farcall.rpc_sync(other, take_lock, timeout=ANSWER_S)" in shown.stdout
    finally:
        done.touch()
        finish(members, may_fail=[0, 1])
    # Killed members leave their files behind, and the next look removes them.
    assert "no running worker of yours" in _command(directory, "stacks").stderr
    assert list(directory.glob("*.node")) == []


def test_a_worker_with_every_thread_blocked_answers(tmp_path: Path) -> None:
    """Control messages need no worker thread, and neither does a snapshot."""
    directory, done = tmp_path / "run", tmp_path / "done"
    members = start_cluster(
        2, blocked, str(done), observing=ObservingOptions(runtime_directory=str(directory)), num_worker_threads=2
    )
    try:
        with find_observer(directory) as observer:
            found = _snapshots_when(observer, lambda found: any(map(_runs_two_of_six, found)))
            busy = next(one for one in found if one.worker == "w1")
            assert {call.function for call in busy.served} == {"wait_for_file"}
            waiting = next(one for one in found if one.worker == "w0")
            assert {(call.to, call.function) for call in waiting.calls} == {("w1", "wait_for_file")}
    finally:
        done.touch()
        finish(members)


def _runs_two_of_six(one: WorkerSnapshot) -> bool:
    stacks = [thread.stack for call in one.served if (thread := one.thread(call.thread_id)) is not None]
    inside = [stack for stack in stacks if any(frame.function == "wait_for_file" for frame in stack)]
    return len(one.served) == 6 and len(inside) >= 2


def wait_for_file(path: str) -> str:
    _wait_for(Path(path).exists)
    return "there"


def blocked(rank: int, done: str) -> None:
    if rank == 0:
        futures = [farcall.rpc_async("w1", wait_for_file, args=(done,), timeout=ANSWER_S) for _ in range(6)]
        assert [future.wait() for future in futures] == ["there"] * 6


def _be_patient() -> None:
    """A machine that is busy with other things must not make a test fail: wait for the callee's word."""
    calls.EXPLAIN_S = ANSWER_S
    answering.explaining_s = lambda timeout_s: ANSWER_S


def sleep_until_opened() -> None:
    OPENED.wait(ANSWER_S)


def call_on(to: str) -> None:
    farcall.rpc_sync(to, sleep_until_opened, timeout=ANSWER_S)


def timeouts_explained(rank: int) -> list[str]:
    _be_patient()
    texts = []
    if rank == 0:
        for make in (
            lambda: farcall.rpc_sync("w1", sleep_until_opened, timeout=SHORT_S),
            lambda: farcall.rpc_async("w1", sleep_until_opened, timeout=SHORT_S).wait(),
            lambda: farcall.rpc_sync("w1", call_on, args=("w2",), timeout=SHORT_S),
            lambda: farcall.rpc_sync("w0", sleep_until_opened, timeout=SHORT_S),
        ):
            with pytest.raises(RpcTimeout) as raised:
                make()
            texts.append(str(raised.value))
        for worker in ("w0", "w1", "w2"):
            farcall.rpc_sync(worker, opened)
    return texts


def test_a_timeout_says_what_the_callee_was_doing() -> None:
    texts = run_cluster(3, timeouts_explained)[0]
    for text, worker in zip(texts, ("w1", "w1", "w1", "w0"), strict=True):
        assert text.startswith(f"RPC ran for more than set timeout ({SHORT_S * 1000:.0f} ms): ")
        assert re.search(
            f"{worker} has been running it for [0-9.]+ s, on thread farcall-worker-{worker}, now at /", text
        )
        assert text.endswith("; options(timeout=...) gives a call more time)")
    assert re.search(r"where it has waited [0-9.]+ s for w2 to answer sleep_until_opened\(\)", texts[2])


def queued_explained(rank: int, done: str) -> str:
    _be_patient()
    executor.MOST_EXTRA_THREADS = 0  # the pool is not to grow
    farcall.barrier(["w0", "w1"])
    if rank == 0:
        first = farcall.rpc_async("w1", wait_for_file, args=(done,), timeout=ANSWER_S)
        with pytest.raises(RpcTimeout) as raised:
            farcall.rpc_sync("w1", take_lock, timeout=SHORT_S)
        Path(done).touch()
        first.wait()
        return str(raised.value)
    return ""


def test_a_timeout_says_that_the_pool_was_exhausted(tmp_path: Path) -> None:
    text = run_cluster(2, queued_explained, str(tmp_path / "done"), num_worker_threads=1)[0]
    assert "it has been waiting on w1 for a thread for " in text
    assert "Functions on the 1 threads there: 1; calls that wait: " in text


def stopped_callee(rank: int) -> tuple[str, float]:
    if rank == 0:
        process_id = farcall.rpc_sync("w1", os.getpid)
        stop(process_id)
        try:
            begun = time.monotonic()
            with pytest.raises(RpcTimeout) as raised:
                farcall.rpc_sync("w1", os.getpid, timeout=0.4)
            took_s = time.monotonic() - begun
        finally:
            os.kill(process_id, signal.SIGCONT)
        return str(raised.value), took_s
    return "", 0.0


def test_an_error_is_not_held_up_by_a_callee_that_does_not_answer() -> None:
    text, took_s = run_cluster(2, stopped_callee)[0]
    assert "w1 did not say within 0.1 s what it does with it: its process may be stopped" in text
    assert took_s >= 0.5  # its own timeout, and the bound for the question
