"""Processes that die, freeze or just end: whoever waits for them learns it at once, and nobody hangs or crashes."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tests.kit.ports import held_port
from tests.kit.stopping import stop
from tests.kit.times import AT_ONCE_S, LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import Delivery, MissingPeers, RpcTimeout
from farcall.runtime.membership import events
from farcall.runtime.node.ending import leave_at_exit
from farcall.testing.cluster import finish, start_cluster, start_processes, temporary_file_url


def touch_and_sleep(path: str) -> None:
    Path(path).touch()
    time.sleep(LONG_S * 10)


def options(port: int, **more: object) -> farcall.RpcBackendOptions:
    return farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **more)  # type: ignore[arg-type]


# --- SIGKILL


def outlive(rank: int, path: str) -> list[tuple[str, str, float]]:
    if rank == 1:
        time.sleep(LONG_S * 10)
    if rank == 2:
        return []
    future = farcall.rpc_async("w1", touch_and_sleep, (path,), timeout=None)
    chained = farcall.rpc_async("w1", time.sleep, (LONG_S * 10,), timeout=None).then(lambda done: done.value())
    victim = farcall.rpc_sync("w1", os.getpid)
    outcome: list[tuple[str, str, float]] = []
    killed_at = [0.0]

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            delivery = getattr(error, "delivery", "")
            outcome.append((type(error).__name__, str(delivery), time.monotonic() - killed_at[0]))

    waits = [future.wait, lambda: farcall.rpc_sync("w1", touch_and_sleep, (f"{path} too",), timeout=None)]
    threads = [threading.Thread(target=note, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    wait_until(lambda: os.path.exists(path) and os.path.exists(f"{path} too"))
    killed_at[0] = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError, match="gone"):
        chained.wait()
    note(lambda: farcall.rpc_sync("w1", os.getpid))
    note(lambda: farcall.rpc_async("w1", os.getpid).wait())
    assert farcall.rpc_sync("w2", os.getpid) > 0
    return outcome


@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_killed_peer_fails_its_calls_at_once(tmp_path: Path, transports: tuple[str, ...]) -> None:
    members = start_cluster(3, outlive, str(tmp_path / "runs"), transports=transports, membership=PATIENT)
    outcome = finish(members, may_fail=[1])[0]
    assert [name for name, _, _ in outcome] == ["PeerDead"] * 4
    assert [delivery for _, delivery, _ in outcome] == [Delivery.UNKNOWN] * 2 + [Delivery.NOT_SENT] * 2
    assert max(seconds for _, _, seconds in outcome) < AT_ONCE_S


def gather_without_one(rank: int) -> str:
    if rank == 2:
        wait_until(lambda: farcall.rpc_sync("w0", is_serving))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        farcall.barrier(["w0", "w1", "w2"])
    return str(caught.value)


def is_serving() -> bool:
    return len(api.current_runtime().server.active) > 1


def test_barrier_with_one_that_died_names_it() -> None:
    texts = finish(start_cluster(3, gather_without_one), may_fail=[2])
    assert all("w2" in text for text in texts[:2])


# --- SIGSTOP


def wait_for_a_frozen_one(rank: int, port: int, frozen: str, thaw: str) -> list[float]:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    took = []
    if rank == 0:
        victim = farcall.rpc_sync("w1", os.getpid)
        stop(victim)
        for call in (
            lambda: farcall.rpc_sync("w1", os.getpid, timeout=0.3),
            lambda: farcall.rpc_async("w1", os.getpid, timeout=0.3).wait(),
            lambda: farcall.rpc_sync("w1", torch.neg, (torch.ones(1 << 22),), timeout=0.3),
        ):
            started = time.monotonic()
            with pytest.raises((RpcTimeout, RuntimeError), match=r"timeout|in time"):
                call()
            took.append(time.monotonic() - started)
        os.kill(victim, signal.SIGCONT)
        assert farcall.rpc_sync("w1", os.getpid) == victim
        assert torch.equal(farcall.rpc_sync("w1", torch.neg, (torch.ones(1 << 20),)), -torch.ones(1 << 20))
    farcall.shutdown()
    return took


def test_calls_to_a_frozen_peer_time_out_and_work_again_when_it_is_thawed(tmp_path: Path) -> None:
    members = start_processes(2, wait_for_a_frozen_one, held_port(), str(tmp_path / "f"), str(tmp_path / "t"))
    took = finish(members)[0]
    assert len(took) == 3
    assert all(0.29 < seconds < 0.3 + AT_ONCE_S for seconds in took)


# --- an end without shutdown

PROGRAM = """
import os, sys, threading, time
import farcall, torch

def spin():
    open(sys.argv[3] + "-spins", "w").close()
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)

def doze():
    time.sleep(1000)

def touch(path):
    open(path, "w").close()

def wait(path):
    while not os.path.exists(path):
        time.sleep(0.001)

rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
farcall.init_rpc(f"w{rank}", rank=rank, world_size=2,
    rpc_backend_options=farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=None))
if rank == 0:
    asked = ASKED
    touch(path + "-asked")
    wait(path)
    try:
        asked.wait()
    except Exception as error:
        print(type(error).__name__, flush=True)
    farcall.shutdown(graceful=False)
else:
    wait(path + "-asked")
    PREPARE
    touch(path)
    END
"""


def end_without_shutdown(tmp_path: Path, end: str, asked: str, prepare: str = "pass") -> tuple[int, str, str]:
    """The exit code and the complaints of rank 1, and what rank 0 is told, which waits for it without a bound."""
    program = tmp_path / "program.py"
    text = PROGRAM.replace("ASKED", asked).replace("PREPARE", prepare)
    program.write_text(text.replace("    END", textwrap.indent(end, "    ")))
    args = [sys.executable, str(program)]
    port = str(held_port())
    processes = [
        subprocess.Popen(
            [*args, str(rank), port, str(tmp_path / "go")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, stderr = processes[1].communicate(timeout=4 * LONG_S)
        stdout, _ = processes[0].communicate(timeout=4 * LONG_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return processes[1].returncode, stderr, stdout


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('as it happens')", 1, "as it happens"),
        ("os._exit(4)", 4, ""),
        ("threading.Thread(target=lambda: time.sleep(0.2)).start()", 0, ""),
    ],
)
def test_process_that_ends_without_shutdown_is_noticed(tmp_path: Path, end: str, code: int, stderr: str) -> None:
    # The callee sleeps in a user function while its process ends.
    asked = 'farcall.rpc_async("w1", time.sleep, (1000,))'
    returncode, errors, peer_says = end_without_shutdown(tmp_path, end, asked)
    assert returncode == code
    assert stderr in errors
    if not stderr:
        told = ("ended without shutdown()", "functions still run", "Are all workers started?")
        assert [line for line in errors.splitlines() if not any(text in line for text in told)] == []
    assert peer_says in ("PeerDead\n", "RuntimeError\n")


def test_process_that_ends_while_it_computes_for_a_peer_does_not_crash(tmp_path: Path) -> None:
    asked = 'farcall.rpc_async("w1", spin)'
    prepare = 'wait(path + "-spins")'
    for end in ("pass", "sys.exit(0)"):
        returncode, errors, _ = end_without_shutdown(tmp_path, end, asked, prepare)
        assert returncode == 0, errors
        for path in tmp_path.glob("go*"):
            path.unlink()


def test_process_that_ends_with_a_call_of_its_own_under_way_does_not_hang(tmp_path: Path) -> None:
    asked = 'farcall.rpc_async("w1", os.getpid)'
    end = 'future = farcall.rpc_async("w0", doze)\nfuture.add_done_callback(lambda done: None)'
    returncode, errors, _ = end_without_shutdown(tmp_path, end, asked)
    assert returncode == 0, errors


def die_before_connecting(rank: int, port: int) -> tuple[str, float]:
    """Rank 1 agrees to the table and dies before it dials; rank 0's time is over soon after it has begun to connect."""
    from farcall.runtime.link import mesh

    due = [0.0]
    connect = mesh.Mesh.connect

    def connect_in_little_time(self: mesh.Mesh, listener: Any, _: float) -> None:
        due[0] = time.monotonic() + 0.5
        connect(self, listener, due[0])

    if rank == 1:
        mesh.Mesh._dial = lambda *args: os._exit(0)  # type: ignore[method-assign, assignment]
    else:
        mesh.Mesh.connect = connect_in_little_time  # type: ignore[method-assign]
    with pytest.raises(MissingPeers) as caught:
        farcall.init_rpc(
            f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port, start_timeout_s=4 * LONG_S)
        )
    assert caught.value.missing == ("w1",)
    return str(caught.value), time.monotonic() - due[0]


def test_peer_that_dies_between_meeting_and_connecting_is_named() -> None:
    members = start_processes(2, die_before_connecting, held_port())
    text, seconds = finish(members, may_fail=[1])[0]
    assert "w1" in text
    assert seconds < AT_ONCE_S


# --- the cause, and what follows from it


def raise_or_shut_down(rank: int, url: str) -> None:
    options = farcall.RpcBackendOptions(init_method=url)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    events.ENDS_S = 4 * LONG_S  # type: ignore[misc]  # a busy machine may take long to end a process
    if rank == 0:
        # Its process takes long to end after its node has ended.
        atexit.unregister(leave_at_exit)
        atexit.register(time.sleep, 1.0)
        atexit.register(leave_at_exit)
        farcall.barrier()
        raise ValueError("the cause")
    farcall.barrier()
    farcall.barrier()


def test_who_only_lost_another_ends_after_it() -> None:
    """Whoever started both reports the one that failed first, and must not be told the consequence."""
    with pytest.raises(mp.ProcessRaisedException, match="the cause"):
        mp.spawn(raise_or_shut_down, (temporary_file_url(),), nprocs=2)
