"""A team: the processes of one cluster on this machine, each driven over a pipe by whoever started them.

Owns the processes from start to end: they are forked from a server that has torch loaded already, they die
with their driver whatever happens to it, and they can be frozen while it is not their turn. Knows nothing of
what the members do: a body is a context manager that yields a function from request to answer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
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

    def __init__(self, body: Body, size: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._directory = tempfile.TemporaryDirectory(prefix="farcall-team-")
        self._processes = []
        self._pipes: list[Connection] = []
        begun = time.monotonic()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_member,
                args=(body, rank, size, self._directory.name, theirs, arguments),
                name=f"member {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            for rank in range(size):
                self._receive(rank, begun + START_TIMEOUT_S - time.monotonic())
        except BaseException:
            self.kill()
            raise
        self.start_s: float = time.monotonic() - begun

    def ask(self, rank: int, request: Any, timeout_s: float) -> Any:
        """Send ``request`` to a member and return its answer."""
        try:
            self._pipes[rank].send(request)
        except OSError as error:
            raise MemberLost(f"member {rank} is gone") from error
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
            raise MemberLost(f"member {rank} did not answer in {timeout_s:.0f} s")
        try:
            reply: _Reply = pipe.recv()
        except (EOFError, OSError) as error:
            raise MemberLost(f"member {rank} ended unexpectedly") from error
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
