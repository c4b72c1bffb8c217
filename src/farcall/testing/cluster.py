"""Real processes for tests: one function, run by each member of a small cluster.

    results = run_cluster(3, work)          # work(rank) -> anything picklable, inside an initialised member

A fork server with torch and farcall preloaded makes the processes, so that a member starts in a fraction of a second.
Every exit code is checked: a member that raises, dies or hangs fails the test, with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall.testing.faults import Faults

_PRELOADED = ("torch", "farcall.api", "farcall.testing.cluster")


class MemberFailed(AssertionError):
    """A member raised, died or hung."""


def context() -> BaseContext:
    """The multiprocessing context whose fork server starts all test processes."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(_PRELOADED))
    return found


class Port:
    """A TCP port on loopback, reserved until ``close``.

    The kernel gives a bound port to no other process; as nothing listens on it, a server that sets SO_REUSEADDR, as
    torch's stores do, can still bind it. A port that was only looked up could go to any process.
    """

    def __init__(self) -> None:
        self._bound = socket.socket()
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.number: int = self._bound.getsockname()[1]

    def close(self) -> None:
        self._bound.close()


class WorkerProcess:
    """The process of one member of a cluster, or of any other function. Mutable: ``result`` and ``error``."""

    def __init__(self, rank: int, target: Callable[..., Any], args: Sequence[Any], port: Port | None = None) -> None:
        self.rank = rank
        self._port = port
        self.result: Any = None
        self.error: str | None = None
        found = context()
        self._receiving, sending = found.Pipe(duplex=False)
        self.process: BaseProcess = found.Process(  # type: ignore[attr-defined]
            target=_run, args=(sending, target, tuple(args)), daemon=False
        )
        self.process.start()
        self.pid: int = int(self.process.pid or 0)
        sending.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the process a signal, unless it has ended: the fork server may reap it at any moment."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def collect(self, deadline: float) -> None:
        """Wait until the process ends; afterwards ``result`` or ``error`` is set."""
        if self._receiving.poll(max(0.0, deadline - monotonic())):
            try:
                self.result, self.error = self._receiving.recv()
            except EOFError:
                self.error = "died without a word"
        else:
            self.error = "did not end in time"
        self.process.join(max(0.1, deadline - monotonic()))
        if self.process.is_alive():
            self.error = (self.error or "") + "\nits process did not end in time"
            self.process.kill()
            self.process.join()
        elif self.process.exitcode and self.error is None:
            self.error = f"ended with exit code {self.process.exitcode}"
        self._receiving.close()

    def end(self) -> None:
        """Kill the process if it still runs, and release its resources."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()  # frees its descriptor: the traceback of a failed test keeps this object alive
        self._receiving.close()
        if self._port is not None:
            self._port.close()


def _run(sending: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    outcome: tuple[Any, str | None]
    try:
        outcome = (target(*args), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    sending.send(outcome)
    sending.close()


def _member(
    rank: int,
    size: int,
    url: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    faults: Faults | None,
    options: dict[str, Any],
) -> Any:
    import farcall

    chosen = farcall.RpcBackendOptions(init_method=url, **options)
    with nullcontext() if faults is None else faults.installed():
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=chosen)
    try:
        result = work(rank, *args)
    except BaseException:
        farcall.shutdown(graceful=False)
        raise
    farcall.shutdown()
    return result


def start_cluster(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    url: str | None = None,
    faults: Faults | None = None,
    **options: Any,
) -> list[WorkerProcess]:
    """Start ``size`` members named w0, w1, ... that run ``work(rank, *args)``.

    Args:
        size: number of members.
        work: a module-level function.
        *args: arguments of ``work``. If ``faults`` is among them, ``work`` gets the very object that its node uses.
        url: the rendezvous of the members; by default a fresh port.
        faults: installed in every member.
        **options: options of the nodes.
    """
    port = None
    if url is None:
        port = Port()
        url = f"tcp://127.0.0.1:{port.number}"
    return [WorkerProcess(rank, _member, (rank, size, url, work, args, faults, options), port) for rank in range(size)]


def start_processes(size: int, target: Callable[..., Any], *args: Any) -> list[WorkerProcess]:
    """Start ``size`` processes that run ``target(rank, *args)`` without a node."""
    return [WorkerProcess(rank, target, (rank, *args)) for rank in range(size)]


def finish(members: Sequence[WorkerProcess], timeout_s: float = 120.0, may_fail: Sequence[int] = ()) -> list[Any]:
    """Wait for all members and return their results in order. Raises ``MemberFailed`` with every traceback."""
    deadline = monotonic() + timeout_s
    try:
        for member in members:
            member.collect(deadline)
    finally:
        for member in members:
            member.end()  # even after an exception, no process outlives this function
    failed = [member for member in members if member.error and member.rank not in may_fail]
    if failed:
        raise MemberFailed("\n".join(f"member {member.rank}: {member.error}" for member in failed))
    return [member.result for member in members]


def run_cluster(size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **options: Any) -> list[Any]:
    """Run ``work(rank, *args)`` on each of ``size`` members; return their results by rank."""
    return finish(start_cluster(size, work, *args, **options), timeout_s)


def temporary_file_url() -> str:
    """A ``file://`` url of a file that does not exist yet."""
    return f"file://{tempfile.mkdtemp(prefix='farcall-test-')}/store"


__all__ = [
    "MemberFailed",
    "Port",
    "WorkerProcess",
    "context",
    "finish",
    "run_cluster",
    "start_cluster",
    "start_processes",
    "temporary_file_url",
]
