"""Leaving a cluster: who waits for whom, for how long, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ports import held_port
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import NotInitialized, PeerDead, RpcError, RpcTimeout, ShutdownTimeout
from farcall.node import Node
from farcall.protocol.departure import machine as departure
from farcall.runtime.node import runtime_of
from farcall.runtime.node.current import slot
from farcall.testing.cluster import context, finish, run_cluster, start_cluster, start_processes


def never_look_around() -> None:
    """Let a waiting shutdown in this process learn of ends only by being told: it would ask by itself after seconds."""
    departure.STATUS_INTERVAL_S = 10 * LONG_S  # type: ignore[misc]


def options(port: int, **more: Any) -> farcall.RpcBackendOptions:
    return farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **more)


def is_leaving() -> bool:
    return api.current_runtime().state == "serving"


def wait_until_leaving() -> None:
    wait_until(is_leaving)


# --- graceful: until all work everywhere is done


def bounce(depth: int) -> int:
    """A chain of nested calls, back and forth between the two workers."""
    if depth == 0:
        wait_until_leaving()
        return 0
    other = 1 - farcall.get_worker_info().id
    return 1 + farcall.rpc_sync(other, bounce, (depth - 1,))


def chain_through_one_that_leaves(rank: int) -> list[int]:
    if rank == 0:
        return []  # calls shutdown at once
    wait_until(lambda: farcall.rpc_sync("w0", is_leaving))
    return [farcall.rpc_sync("w0", bounce, (depth,)) for depth in (0, 2, 6, 20)]


def test_one_that_leaves_still_serves_the_nested_work_of_others() -> None:
    assert run_cluster(2, chain_through_one_that_leaves) == [[], [0, 2, 6, 20]]


def start_another(left: int) -> int:
    """Work that nobody waits for, and that makes more of its kind."""
    counted.append(left)
    if left:
        to = (farcall.get_worker_info().id + 1) % 3
        farcall.rpc_async(to, start_another, (left - 1,))
    return left


counted: list[int] = []


def unwaited(rank: int, port: int) -> list[int]:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(port))
    if rank == 0:
        for _ in range(5):
            farcall.rpc_async("w1", start_another, (300,))
    farcall.shutdown()
    return counted


def test_work_that_makes_more_work_is_waited_for_although_nobody_waits_for_it() -> None:
    found = finish(start_processes(3, unwaited, held_port()))
    assert sorted(itertools.chain(*found)) == sorted(list(range(301)) * 5)


def slow_until_both_leave() -> None:
    wait_until_leaving()
    wait_until(lambda: not api.current_runtime().calls and api.current_runtime().leaving.entered)
    # Its report "busy" has gone out: what matters is what happens when this function ends.
    wait_until(lambda: api.current_runtime().leaving._machine._sequence > 0)


def leave_as_soon_as_served(rank: int, port: int) -> float:
    never_look_around()
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    if rank == 0:
        farcall.rpc_async("w1", slow_until_both_leave)
    started = time.monotonic()
    farcall.shutdown()
    return time.monotonic() - started


def test_end_of_the_last_served_call_is_noticed_at_once() -> None:
    for seconds in finish(start_processes(2, leave_as_soon_as_served, held_port())):
        assert seconds < AT_ONCE_S


def idle_shutdown(rank: int, port: int) -> float:
    never_look_around()
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    farcall.barrier(["w0", "w1"])
    started = time.monotonic()
    farcall.shutdown()
    return time.monotonic() - started


def test_idle_cluster_leaves_at_once() -> None:
    assert max(finish(start_processes(2, idle_shutdown, held_port()))) < AT_ONCE_S


def call_in_a_thread_that_times_out(rank: int, port: int) -> float:
    never_look_around()
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    outcome: list[str] = []

    def call() -> None:
        try:
            farcall.rpc_sync("w1", time.sleep, (3.0,), timeout=0.3)
        except TimeoutError:
            outcome.append("late")

    thread = threading.Thread(target=call)
    if rank == 0:
        thread.start()
        wait_until(lambda: outcome or len(api.current_runtime().calls) == 1)
    started = time.monotonic()
    farcall.shutdown()
    seconds = time.monotonic() - started
    if rank == 0:
        thread.join()
        assert outcome == ["late"]
    return seconds


def test_call_that_times_out_meanwhile_does_not_hold_up_the_shutdown() -> None:
    for seconds in finish(start_processes(2, call_in_a_thread_that_times_out, held_port())):
        assert seconds < AT_ONCE_S


# --- with a bound


def bounded(rank: int, port: int, stay: Event) -> tuple[str, tuple[str, ...], float]:
    never_look_around()
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(port))
    if rank == 2:
        assert stay.wait(4 * LONG_S)
        farcall.shutdown(graceful=False)
        return "", (), 0.0
    farcall.barrier(["w0", "w1"])
    started = time.monotonic()
    with pytest.raises(ShutdownTimeout) as caught:
        farcall.shutdown(timeout=8.0)
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()
    return str(caught.value), caught.value.late, time.monotonic() - started


def test_timeout_names_who_has_not_called_shutdown() -> None:
    stay = context().Event()
    members = start_processes(3, bounded, held_port(), stay)
    for member in members[:2]:
        member.collect(time.monotonic() + 2 * LONG_S)
    stay.set()
    finish(members[2:])
    for member in members[:2]:
        assert member.error is None
        text, late, seconds = member.result
        assert "w2 has not called shutdown" in text
        assert "w2" in late
        assert seconds < 8.0 + AT_ONCE_S


def block(until: str) -> None:
    wait_until(lambda: os.path.exists(until))


def busy_one(rank: int, port: int, path: str) -> str:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    if rank == 0:
        farcall.rpc_async("w1", block, (path,))
    farcall.barrier(["w0", "w1"])
    try:
        farcall.shutdown(timeout=8.0)
    except ShutdownTimeout as error:
        Path(path).touch()
        return str(error)
    return "in time"


def test_timeout_names_who_still_works(tmp_path: Path) -> None:
    texts = finish(start_processes(2, busy_one, held_port(), str(tmp_path / "go on")))
    late = re.compile(r"w1 still has 1 call or callback under way \(block\(\) for w0, for \d+ s\)")
    assert any(late.search(text) for text in texts), texts


# --- not graceful


def leave_alone(rank: int, port: int) -> list[str]:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(port))
    seen: list[str] = []
    if rank == 0:
        assert len({farcall.rpc_sync(other, os.getpid) for other in (1, 2)}) == 2
        farcall.shutdown(graceful=False)
        return seen
    wait_until(lambda: api.current_runtime().links.peers.remotes[0].link.broken is not None)
    with pytest.raises(PeerDead):
        farcall.rpc_sync("w0", os.getpid)
    seen.append(farcall.rpc_sync(3 - rank, farcall.get_worker_info).name)
    farcall.shutdown()
    return seen


def test_leaving_without_grace_is_local_and_the_others_go_on() -> None:
    assert finish(start_processes(3, leave_alone, held_port())) == [[], ["w2"], ["w1"]]


def stuck_callers(rank: int, port: int, path: str) -> list[str]:
    """Every way to wait for a call ends when the node does."""
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port, rpc_timeout=None))
    if rank == 1:
        block(path)
        farcall.shutdown(graceful=False)
        return []
    ends: list[str] = []

    def note(wait: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                wait()
            except Exception as error:
                ends.append(type(error).__name__)

        return run

    called_back: list[bool] = []
    plain = farcall.rpc_async("w1", block, (path,))
    chained = farcall.rpc_async("w1", block, (path,)).then(lambda done: done.value())
    watched = farcall.rpc_async("w1", block, (path,))
    watched.add_done_callback(lambda done: called_back.append(True))
    to_self = farcall.rpc_async("w0", block, (path + "-never",))
    waits = [
        plain.wait,
        chained.wait,
        watched.wait,
        to_self.wait,
        lambda: farcall.rpc_sync("w1", block, (path,)),
        lambda: farcall.rpc_sync("w0", block, (path + "-never",)),
    ]
    threads = [threading.Thread(target=note(wait), daemon=True) for wait in waits]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(api.current_runtime().calls) == len(waits))
    farcall.shutdown(graceful=False)
    for thread in threads:
        thread.join(LONG_S)
    Path(path).touch()
    Path(path + "-never").touch()
    wait_until(lambda: called_back == [True])
    return ends


def test_everyone_who_waits_for_a_call_is_told_when_the_node_ends(tmp_path: Path) -> None:
    ends = finish(start_processes(2, stuck_callers, held_port(), str(tmp_path / "go")))[0]
    assert len(ends) == 6
    assert set(ends) <= {"Cancelled", "RuntimeError"}  # torch wraps what a callback's future raised


def hammer_while_ending(rank: int, port: int, to: str) -> int:
    """Threads that call without a timeout while the node ends: each of them must come out."""
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port, rpc_timeout=None))
    farcall.barrier(["w0", "w1"])
    if rank == 1:
        wait_until(lambda: api.current_runtime().links.peers.remotes[0].link.broken is not None)
        farcall.shutdown(graceful=False)
        return 0
    calls = [0] * 4

    def hammer(index: int) -> None:
        try:
            while True:
                farcall.rpc_sync(to, os.getpid)
                calls[index] += 1
        except RpcError:
            pass

    threads = [threading.Thread(target=hammer, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(calls) > 20)
    farcall.shutdown(graceful=False)
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    return sum(calls)


@pytest.mark.parametrize("to", ["w0", "w1"])
def test_callers_in_other_threads_come_out_when_the_node_ends_under_them(to: str) -> None:
    for _ in range(3):
        assert finish(start_processes(2, hammer_while_ending, held_port(), to))[0] > 80


def shut_down_inside_a_function() -> None:
    farcall.shutdown(graceful=False)


def leave_from_within(rank: int, port: int) -> None:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    if rank == 0:
        with pytest.raises(PeerDead):
            farcall.rpc_sync("w1", shut_down_inside_a_function)
        farcall.shutdown(graceful=False)
    else:
        wait_until(lambda: slot.runtime is None)


def test_function_may_end_the_node_it_runs_on() -> None:
    finish(start_processes(2, leave_from_within, held_port()))


# --- again, and with nothing left behind


def again_with_another_rank(rank: int, port: int) -> list[tuple[str, int]]:
    seen = []
    for attempt in range(4):
        now = (rank + attempt) % 2
        farcall.init_rpc(f"n{now}-{attempt}", rank=now, world_size=2, rpc_backend_options=options(port))
        other = farcall.rpc_sync(1 - now, farcall.get_worker_info)
        seen.append((other.name, other.id))
        farcall.shutdown()
        with pytest.raises(NotInitialized, match="it was shut down"):
            farcall.rpc_sync(0, os.getpid)
    return seen


def test_init_again_on_the_same_port_with_another_rank() -> None:
    first, second = finish(start_processes(2, again_with_another_rank, held_port()))
    assert first == [("n1-0", 1), ("n0-1", 0), ("n1-2", 1), ("n0-3", 0)]
    assert second == [("n0-0", 0), ("n1-1", 1), ("n0-2", 0), ("n1-3", 1)]


def inventory() -> dict[str, int]:
    """What a node may leave behind, counted. Tasks, not threads: torch's store has threads of its own."""
    gc.collect()
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            pass  # the descriptor of this very listing
    unix = Path("/proc/net/unix").read_text()
    return {
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": len(descriptors),
        "memfds": sum("memfd:" in one for one in descriptors),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
        "unix sockets": unix.count(f"-{os.getpid()}-"),
    }


def two_nodes_in_one_process(port: int, graceful: bool) -> None:
    nodes = [Node(f"w{rank}", rank, 2, options(port)) for rank in range(2)]
    starting = [threading.Thread(target=node.start) for node in nodes]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    from farcall.rpc.call import call_sync

    value = torch.arange(1 << 18)
    for to in (0, 1):
        for _ in range(3):
            result = call_sync(runtime_of(nodes[1 - to]), to, torch.add, (value, 1), None, LONG_S)
    assert torch.equal(result, value + 1)
    ending = [threading.Thread(target=node.shutdown, args=(graceful,)) for node in nodes]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


def many_rounds(_: int) -> None:
    port = held_port()
    two_nodes_in_one_process(port, True)  # what is made once and kept: torch's thread pools, caches
    before = inventory()
    for attempt in range(20):
        two_nodes_in_one_process(port, attempt % 4 != 3)
        name = f"alone{attempt}"
        farcall.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options(port))
        assert farcall.rpc_sync(name, os.getpid) == os.getpid()
        farcall.shutdown()
    # A thread of the first round may have been on its last lines when it was counted.
    wait_until(lambda: all(count <= before[what] for what, count in inventory().items()), f"no more than {before}")


def test_twenty_rounds_in_one_process_leave_nothing() -> None:
    finish(start_processes(1, many_rounds))


def store_is_gone(rank: int, port: int) -> bool:
    import socket

    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(port))
    farcall.shutdown()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_store_has_gone_when_shutdown_returns_on_any_member() -> None:
    for _ in range(3):
        assert finish(start_processes(2, store_is_gone, held_port())) == [True, True]


def test_calls_after_shutdown_and_before_init_say_so() -> None:
    with pytest.raises(NotInitialized, match="init_rpc"):
        farcall.rpc_sync("w0", os.getpid)
    with pytest.raises(NotInitialized):
        farcall.rpc_async("w0", os.getpid)
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()


def test_a_shutdown_without_an_init_says_so() -> None:
    """In a process of its own: after a first shutdown another one does nothing."""
    done = subprocess.run([sys.executable, "-c", "import farcall; farcall.shutdown()"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "NotInitialized" in done.stderr


NODES_LEFT_OPEN = """
import sys, threading
import torch
import farcall

options = farcall.RpcBackendOptions(init_method=sys.argv[1])
one, other = (farcall.Node(name, rank, 2, options) for rank, name in enumerate(("one", "other")))
starting = threading.Thread(target=other.start)
starting.start()
one.start()
starting.join()
begun = threading.Event()

def compute():
    square = torch.eye(400)
    while True:
        square = square @ square
        begun.set()

computed = one.rpc_async("other", compute)
begun.wait()
"""


def test_a_program_that_leaves_nodes_open_ends_in_good_order(tmp_path: Path) -> None:
    """Before Python 3.14 a thread that comes back from torch to an interpreter that has ended aborts the process."""
    program = tmp_path / "program.py"
    program.write_text(NODES_LEFT_OPEN)
    url = f"tcp://127.0.0.1:{held_port()}"
    done = subprocess.run([sys.executable, str(program), url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("one", "other"):
        assert f"{name} ended without shutdown()" in done.stderr


def die_while_others_leave(rank: int) -> None:
    if rank == 2:
        wait_until(lambda: all(farcall.rpc_sync(other, is_leaving) for other in (0, 1)))
        os._exit(0)


def test_death_of_a_member_lets_the_leaving_ones_go() -> None:
    finish(start_cluster(3, die_while_others_leave), may_fail=[2])


@farcall.functions.async_execution
def never_answered() -> torch.futures.Future[None]:
    return torch.futures.Future()


def give_up(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", never_answered, timeout=0.2)


def test_a_call_that_nobody_waits_for_any_more_holds_up_no_shutdown() -> None:
    run_cluster(2, give_up)
