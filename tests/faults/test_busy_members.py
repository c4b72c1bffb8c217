"""Members that are busy and answer nobody: C code that keeps the interpreter, so that no thread of theirs can run.

All that detects failures is turned down, so that each of these members is silent for longer than any time of it; one
test takes the defaults, and twenty seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
from tests.kit.stopping import stop
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.options import MembershipOptions
from farcall.testing.cluster import start_processes, temporary_file_url
from farcall.transport import tcp

QUICK = MembershipOptions(probe_interval_s=0.2, probe_timeout_s=0.1, suspicion_s=0.5, reconnect_s=0.5)
HELD_S = 4
"""Longer than all of that together."""


def hold(seconds: int) -> str:
    """Keep the interpreter."""
    ctypes.PyDLL(None).sleep(seconds)
    return "held"


def hold_until_told(pipe: str) -> str:
    """Keep the interpreter until somebody opens the other end of a named pipe."""
    os.close(ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY))
    return "held"


def call(to: str, pipe: str) -> str:
    """On a worker, whose interpreter is kept while the call is under way."""
    future = farcall.rpc_async(to, int, ("7",), timeout=4 * LONG_S)
    hold_until_told(pipe)
    return f"got {future.wait()}"


def deaths_seen() -> list[str]:
    """On a worker: whom it holds for dead."""
    return [name for kind, name in seen if kind == "dead"]


seen: list[tuple[str, str]] = []


def _serve(process: int, url: str, ranks: list[list[int]], size: int | None, options: dict[str, Any], end: str) -> None:
    """Several nodes of one process, until the file at ``end`` is there."""
    nodes = [
        farcall.Node(f"w{rank}", rank, size, farcall.RpcBackendOptions(init_method=url, **options))
        for rank in ranks[process]
    ]
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(farcall.Node.start, nodes))
    for node in nodes:
        node.on_member(lambda event: seen.append((event.kind, event.worker.name)))
    while not os.path.exists(end):
        sleep(0.02)
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: node.shutdown(graceful=False), nodes))


class Group:
    def __init__(self, node: farcall.Node, url: str, options: dict[str, Any]) -> None:
        self.node, self.url, self.options = node, url, options
        self.events: list[tuple[str, str]] = []
        node.on_member(lambda event: self.events.append((event.kind, event.worker.name)))

    def newcomer(self, name: str, rank: int) -> farcall.Node:
        return farcall.Node(name, rank, options=farcall.RpcBackendOptions(init_method=self.url, **self.options))

    def tell_when_long_silent(self, name: str, pipe: str) -> None:
        """Let a member go that keeps its interpreter, when it has been silent for longer than all of QUICK together."""
        wait_until(lambda: ("unresponsive", name) in self.events)
        wait_until(
            lambda: any(
                member.name == name and (member.unresponsive_s or 0.0) > 4 * QUICK.suspicion_s
                for member in self.node.members()
            )
        )
        with open(pipe, "w"):
            pass

    def check_nobody_lost(self) -> None:
        """All answer, all are alive to each other, and nobody was ever held for dead, here or elsewhere."""
        names = [member.name for member in self.node.members()]
        wait_until(lambda: not any(member.unresponsive_s for member in self.node.members()))
        for name in names:
            assert self.node.rpc_sync(name, deaths_seen, timeout=LONG_S) == [], name
        assert not [event for event in self.events if event[0] == "dead"]


@contextmanager
def group(tmp_path: Any, size: int, *, is_static: bool, **options: Any) -> Iterator[Group]:
    """This process is w0; the others are in two processes, or in four where there are many."""
    seen.clear()
    url, end = temporary_file_url(), str(tmp_path / "end")
    processes = 2 if size < 10 else 4
    ranks = [list(range(1 + process, size, processes)) for process in range(processes)]
    fixed = size if is_static else None
    workers = start_processes(processes, _serve, url, ranks, fixed, options, end)
    node = farcall.Node("w0", 0, fixed, farcall.RpcBackendOptions(init_method=url, **options))
    try:
        node.start()
        wait_until(lambda: len(node.workers()) == size)
        found = Group(node, url, options)
        for rank in range(size):
            wait_until(lambda rank=rank: node.rpc_sync(f"w{rank}", len, ("abc",)) == 3)  # type: ignore[misc]
        yield found
    finally:
        (tmp_path / "end").touch()
        node.shutdown(graceful=False)
        for worker in workers:
            worker.end()


def named_pipe(folder: Any) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


sizes = pytest.mark.parametrize("size", [3, 20])


@sizes
def test_a_callee_that_keeps_the_interpreter_loses_nothing(size: int, tmp_path: Any) -> None:
    """In the larger group five members are silent at once: all of its process."""
    pipe = named_pipe(tmp_path)
    with group(tmp_path, size, is_static=True, membership=QUICK) as found:
        held = found.node.rpc_async("w1", hold_until_told, (pipe,), timeout=4 * LONG_S)
        waits = found.node.rpc_async("w1", int, ("7",), timeout=4 * LONG_S)
        wait_until(lambda: ("unresponsive", "w1") in found.events)
        assert found.node.rpc_sync("w2", int, ("8",)) == 8
        found.tell_when_long_silent("w1", pipe)
        assert (held.wait(), waits.wait()) == ("held", 7)
        wait_until(lambda: ("recovered", "w1") in found.events)
        found.check_nobody_lost()


@sizes
def test_a_caller_that_keeps_the_interpreter_loses_nothing(size: int, tmp_path: Any) -> None:
    pipe = named_pipe(tmp_path)
    with group(tmp_path, size, is_static=False, membership=QUICK) as found:
        asked = found.node.rpc_async("w1", call, ("w2", pipe), timeout=4 * LONG_S)
        found.tell_when_long_silent("w1", pipe)
        assert asked.wait() == "got 7"
        found.check_nobody_lost()


@sizes
def test_a_rank_0_that_keeps_the_interpreter_loses_nothing(size: int, tmp_path: Any) -> None:
    with group(tmp_path, size, is_static=True, membership=QUICK) as found:
        pending = found.node.rpc_async("w1", int, ("7",), timeout=LONG_S)
        hold(HELD_S)
        assert pending.wait() == 7
        found.check_nobody_lost()


@sizes
def test_a_newcomer_gets_in_while_the_member_that_gives_out_names_keeps_the_interpreter(
    size: int, tmp_path: Any
) -> None:
    """The arbiter is the member of the lowest rank; the next one takes its place."""
    with group(tmp_path, size, is_static=False, membership=QUICK) as found:
        ranks = found.node.rpc_async("w1", _join_beside, (found.url, QUICK), timeout=2 * LONG_S)
        hold(HELD_S)
        assert ranks.wait() == "late"
        wait_until(lambda: len(found.node.workers()) == size)  # it has left again
        found.check_nobody_lost()


def _join_beside(url: str, membership: MembershipOptions) -> str:
    """On a worker: another node of its process comes, calls rank 0, and goes."""
    options = farcall.RpcBackendOptions(init_method=url, membership=membership)
    with farcall.Node("late", 77, options=options) as late:
        assert late.rpc_sync("w0", int, ("7",), timeout=LONG_S) == 7
        return late.get_worker_info().name


def test_twenty_seconds_with_the_defaults(tmp_path: Any) -> None:
    with group(tmp_path, 3, is_static=True) as found:
        held = found.node.rpc_async("w1", hold, (20,), timeout=2 * LONG_S)
        waits = found.node.rpc_async("w1", int, ("7",), timeout=2 * LONG_S)
        assert (held.wait(), waits.wait()) == ("held", 7)
        found.check_nobody_lost()


def _serve_with_a_short_queue(process: int, url: str, options: dict[str, Any], end: str) -> None:
    tcp._BACKLOG = 2
    _serve(process, url, [[1]], 2, options, end)


def test_attempts_to_reach_a_stopped_member_do_not_fill_the_queue_of_its_kernel(tmp_path: Any) -> None:
    """A kernel whose queue is full drops what comes, as a host that is gone would: then it would be declared dead."""
    url, end = temporary_file_url(), str(tmp_path / "end")
    options = {"membership": QUICK, "transports": ["tcp"], "rpc_timeout": 4 * LONG_S}
    node = farcall.Node("w0", 0, 2, farcall.RpcBackendOptions(init_method=url, **options))
    (process,) = start_processes(1, _serve_with_a_short_queue, url, options, end)
    try:
        node.start()
        died: list[str] = []
        node.on_member(lambda event: died.append(event.worker.name) if event.kind == "dead" else None)
        stop(process.pid)
        node._runtime.others()[0].link.interrupt("cut")
        # Ten times as long as it takes to give up a host that does not answer.
        wait_until(lambda: died or (node.members()[1].unresponsive_s or 0.0) > 10 * QUICK.reconnect_s)
        process.kill(signal.SIGCONT)
        assert node.rpc_sync("w1", abs, (-1,)) == 1
        assert not died
    finally:
        process.kill(signal.SIGCONT)
        (tmp_path / "end").touch()
        process.collect(4 * LONG_S + monotonic())
        process.end()
        node.shutdown(graceful=False)
