"""A team: the processes of one cluster on this machine, each driven over a pipe by whoever started them.

Owns the processes from start to end: they are forked from a server that has torch loaded already, they die
with their driver whatever happens to it, they can be frozen while it is not their turn, and started again when they
ended. Knows nothing of what the members do: a body is a context manager that yields a function from request to answer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1
_PRELOADED = ["torch", "torch.distributed.rpc", "farcall"]

Answer = Callable[[Any], Any]


class Body(Protocol):
    """What a member runs. Must be a module-level function: it is pickled by name."""

    def __call__(self, rank: int, size: int, directory: str, *arguments: Any) -> AbstractContextManager[Answer]: ...


class TeamError(Exception):
    """A member could not do what it was asked; ask it something else."""


class MemberLost(TeamError):
    """A member ended or took too long: what it says from now on answers nothing; kill the team."""


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    failure: str | None = None


class Team:
    """Processes ``0 .. size-1``, running once the constructor returns."""

    def __init__(
        self, body: Body, size: int, *arguments: Any, names: Sequence[str] = (), preload: Sequence[str] = ()
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, *preload])  # for the first team of a process
        self._directory = tempfile.TemporaryDirectory(prefix="farcall-team-")
        self._body = body
        self._arguments = arguments
        self._names = names or [f"member {rank}" for rank in range(size)]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        begun = time.monotonic()
        for rank in range(size):
            process, pipe = self._start(rank)
            self._processes.append(process)
            self._pipes.append(pipe)
        try:
            for rank in range(size):
                self._receive(rank, begun + START_TIMEOUT_S - time.monotonic())
        except BaseException:
            self.kill()
            raise
        self.start_s: float = time.monotonic() - begun

    @property
    def directory(self) -> str:
        """A folder for the members to share, which ends with the team."""
        return self._directory.name

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_member,
            args=(self._body, rank, len(self._names), self.directory, theirs, self._arguments),
            name=self._names[rank],
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, ours

    def process_id(self, rank: int) -> int:
        """Of a member's process as it is now."""
        number = self._processes[rank].pid
        assert number is not None, "it was started"
        return number

    def how_it_ended(self, rank: int) -> str:
        """For people: how a member ended, or that it runs."""
        code = self._processes[rank].exitcode
        if code is None:
            return "is running"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def restart(self, rank: int, timeout_s: float) -> None:
        """Start a member that has ended again; returns once it runs."""
        self._processes[rank].join(timeout_s)
        if self._processes[rank].exitcode is None:
            raise MemberLost(f"{self._names[rank]} has not ended: it cannot be started again")
        self._processes[rank].close()
        self._pipes[rank].close()
        self._processes[rank], self._pipes[rank] = self._start(rank)
        self._receive(rank, timeout_s)

    def ask(self, rank: int, request: Any, timeout_s: float) -> Any:
        """Send ``request`` to a member and return its answer."""
        try:
            self._pipes[rank].send(request)
        except OSError as error:
            raise MemberLost(f"{self._names[rank]} is gone: it {self.how_it_ended(rank)}") from error
        return self._receive(rank, timeout_s)

    def freeze(self) -> None:
        """Take the CPU from all members, until ``thaw``."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all members in good order; kill those that do not end, and say so."""
        self.thaw()
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # it ended already, and the join below reports it
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, give_up_at - time.monotonic()))
        faulty = [process.name for process in self._processes if process.exitcode != 0]
        self.kill()
        if faulty:
            raise TeamError(f"did not end in good order: {', '.join(faulty)}")

    def kill(self) -> None:
        """End all members now."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
        self._directory.cleanup()

    def _receive(self, rank: int, timeout_s: float) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, timeout_s)):
            raise MemberLost(f"{self._names[rank]} did not answer in {timeout_s:.0f} s")
        try:
            reply: _Reply = pipe.recv()
        except (EOFError, OSError) as error:
            self._processes[rank].join(1.0)  # its pipe ends before it does
            raise MemberLost(f"{self._names[rank]} {self.how_it_ended(rank)}, unexpectedly") from error
        if reply.failure is not None:
            raise TeamError(reply.failure)
        return reply.value

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    pass  # reaped between the look and the signal: whoever asks it next learns that it is gone


def _member(body: Body, rank: int, size: int, directory: str, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    # The fork server ends with the driver. A frozen member could not see that, so the kernel is asked to see
    # to it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole foreground group; the driver alone decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = body(rank, size, directory, *arguments)
        answer = context.__enter__()
    except Exception as error:
        pipe.send(_Reply(failure=_describe(error)))
        return
    pipe.send(_Reply())
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        if request is None:
            break
        try:
            reply = _Reply(value=answer(request))
        except Exception as error:
            reply = _Reply(failure=_describe(error))
        pipe.send(reply)
    context.__exit__(None, None, None)


def _describe(error: Exception) -> str:
    """The last frame and the message: enough to find the place, short enough for a table's footnote."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
