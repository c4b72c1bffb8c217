"""A team: the processes of one cluster on this machine, each driven over a pipe.

Owns the processes from start to end: they are forked from a server with torch loaded, die with their driver even if it
is killed, can be frozen out of their turn, and started again after their end. Knows nothing of the members' work: a
body is a context manager that yields a function from request to answer.

One thread drives a team; another may meanwhile start a member again, kill one, or ask how it ended. So an ended team
keeps its members, and starts none any more.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from farcall.launcher.engine import how_it_ended

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0
"""How long the kernel may take to end killed members."""
NEWS_S = 5.0
"""How long the news of an end may take: the connections of a process end before it does, and its parent tells us."""
_PR_SET_PDEATHSIG = 1
_PRELOADED = ["torch", "torch.distributed.rpc", "farcall"]

Answer = Callable[[Any], Any]


class Body(Protocol):
    """The work of a member. Must be a module-level function: it is pickled by name."""

    def __call__(self, rank: int, size: int, directory: str, *arguments: Any) -> AbstractContextManager[Answer]: ...


class TeamError(Exception):
    """A member failed at a request; it takes others."""


class MemberLost(TeamError):
    """A member ended or took too long: nothing from it is an answer any more; kill the team."""


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Member:
    """One life of a member. Its descriptors close with the last use of this object."""

    process: BaseProcess
    pipe: Connection


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: a frozen process, or a killed parent, cannot."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
        self._members: list[_Member] = []
        self._starting = threading.Lock()  # held while a member is replaced: none may come after the end
        self._ended = False
        self._looking = threading.Lock()  # held for a look at an exit code
        begun = time.monotonic()
        try:
            for rank in range(size):
                self._members.append(self._start(rank))
            for member in self._members:
                self._receive(member, begun + START_TIMEOUT_S - time.monotonic())
        except BaseException:
            self.kill()
            raise
        self.start_s: float = time.monotonic() - begun

    @property
    def directory(self) -> str:
        """A folder for the members to share, which ends with the team."""
        return self._directory.name

    def _start(self, rank: int) -> _Member:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_member,
            args=(self._body, rank, len(self._names), self.directory, theirs, self._arguments),
            name=self._names[rank],
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Member(process, ours)

    def has_ended(self, rank: int) -> bool:
        return self._exit_code(self._members[rank].process) is not None

    def how_it_ended(self, rank: int, patience_s: float = 0.0) -> str:
        """For people: how a member ended, or that it runs, even after ``patience_s``."""
        return self._how_it_ended(self._members[rank].process, patience_s)

    def restart(self, rank: int, timeout_s: float) -> None:
        """Start a member that has ended again; returns once it runs."""
        before = self._members[rank].process
        if self._exit_code(before, timeout_s) is None:
            raise MemberLost(f"cannot restart {before.name}: it has not ended")
        with self._starting:
            if self._ended:
                raise MemberLost(f"cannot restart {before.name}: the team has ended")
            member = self._members[rank] = self._start(rank)
        self._receive(member, timeout_s)

    def ask(self, rank: int, request: Any, timeout_s: float) -> Any:
        """Send ``request`` to a member and return its answer."""
        member = self._members[rank]
        try:
            member.pipe.send(request)
        except OSError as error:
            raise MemberLost(
                f"{member.process.name} is gone: it {self._how_it_ended(member.process, NEWS_S)}"
            ) from error
        return self._receive(member, timeout_s)

    def freeze(self) -> None:
        """Take the CPU from all members, until ``thaw``."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all members in good order; kill those that do not end, and say so."""
        self.thaw()
        for member in self._members:
            try:
                member.pipe.send(None)
            except OSError:
                pass  # it ended already; the join below reports it
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for member in self._members:
            self._exit_code(member.process, give_up_at - time.monotonic())
        faulty = [member.process.name for member in self._members if self._exit_code(member.process) != 0]
        self.kill()
        if faulty:
            raise TeamError(f"did not end in good order: {', '.join(faulty)}")

    def kill_member(self, rank: int) -> None:
        """End a member now, if it has not ended."""
        self._members[rank].process.kill()

    def kill(self) -> None:
        """End all members now."""
        with self._starting:
            self._ended = True
        for member in self._members:
            member.process.kill()
        give_up_at = time.monotonic() + KILL_TIMEOUT_S
        for member in self._members:
            self._exit_code(member.process, give_up_at - time.monotonic())
        self._directory.cleanup()
        left = [member.process.name for member in self._members if self._exit_code(member.process) is None]
        if left:
            raise MemberLost(f"still running {KILL_TIMEOUT_S:.0f} s after SIGKILL: {', '.join(left)}")

    def _receive(self, member: _Member, timeout_s: float) -> Any:
        if not member.pipe.poll(max(0.0, timeout_s)):
            raise MemberLost(f"{member.process.name} did not answer in {timeout_s:.0f} s")
        try:
            reply: _Reply = member.pipe.recv()
        except (EOFError, OSError) as error:
            how = self._how_it_ended(member.process, NEWS_S)
            raise MemberLost(f"{member.process.name} {how}, unexpectedly") from error
        if reply.failure is not None:
            raise TeamError(reply.failure)
        return reply.value

    def _exit_code(self, process: BaseProcess, timeout_s: float = 0.0) -> int | None:
        """The exit code of a process; None: it still runs after ``timeout_s``."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            # Of two threads that look at the same time, multiprocessing tells the second one 255, and later ones, too.
            with self._looking:
                process.join(0.0)  # which, unlike a look at its code, has multiprocessing forget one that has ended
                code = process.exitcode
            left_s = give_up_at - time.monotonic()
            if code is not None or left_s <= 0:
                return code
            wait([process.sentinel], left_s)

    def _how_it_ended(self, process: BaseProcess, patience_s: float) -> str:
        code = self._exit_code(process, patience_s)
        return "is running" if code is None else how_it_ended(code)

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            process = member.process
            if process.pid is not None and self._exit_code(process) is None:
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    pass  # reaped between the look and the signal: the next question to it finds it gone


def _member(body: Body, rank: int, size: int, directory: str, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    die_with_parent()  # of the fork server, which ends with the driver
    # Ctrl-C reaches the whole foreground group; the driver alone decides what to do about it.
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
