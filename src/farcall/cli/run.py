"""``farcall run``: a program on a cluster of this machine, each worker a process of its own.

Owns the processes from start to end: the environment gives each its rank, as with ``torchrun``; `output` passes on what
they write. Ctrl-C is passed on once; workers that do not end then are killed.

    a worker ends                         then
    with exit code 0                      nothing: the others go on
    otherwise, restarts are left to it    it is started again, with the same rank and ``FARCALL_RESTARTS`` one higher
    otherwise                             the others are ended, and one line says whose fault it was
    by the error that another is gone     as before, but the other has `CAUSE_S` to end, too: if it fails of something
                                          else, it is the one that is named

A worker that is started again must be let in again: with restarts the workers get no ``WORLD_SIZE``, so that they make
a group without a fixed size, and this process has the store, which therefore outlives rank 0.

Invariant: no worker outlives this process, however that ends; and a worker's own children end with the worker, unless
this process was killed.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import IO, Any

from rich.console import Console

from farcall.cli.team import die_with_parent, how_it_ended
from farcall.launcher.output import Output, Source
from farcall.options import ENV_SECRET, ENV_SECRET_FILE

LAST_LINES = 20
"""Enough for the end of a traceback, and the log lines below it."""
ENDING_S = 10.0
"""How long workers have to end by themselves after a failure or Ctrl-C."""
CAUSE_S = 2.0
"""How long a failure that another worker may have caused is kept, for that one to end."""
LOOK_S = 0.1
_ANOTHER_IS_GONE = re.compile(r"farcall\.errors\.(PeerDead|ReferenceLost)\b")
"""The error of a worker that failed because another one is gone."""


class _RunWorker:
    """One process of the cluster, and its last lines."""

    def __init__(
        self, source: Source, rank: int, *, environment: dict[str, str], program: Sequence[str], restarts: int
    ) -> None:
        self.source = source
        self.rank = rank
        self.restarts = restarts
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._unfinished = b""
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "FARCALL_RESTARTS": str(restarts)}
        # A session of its own: Ctrl-C in the terminal reaches it through us, once, and not twice.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farcall", *program],
            env={**environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.ending = os.pidfd_open(self.process.pid)

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> bytes:
        """What came since the last time; nothing at the end."""
        data = os.read(self.output.fileno(), 1 << 16)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self.last_lines.extend(line.decode(errors="replace").rstrip("\r") for line in lines)
        return data

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        if self.process.returncode is None:
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PIDFD, self.ending, look) is not None:
                # Its own children may hold its output open: kill them now, while its number is still its own.
                self.send(signal.SIGKILL)
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the worker and its children."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it ended meanwhile

    def how_it_ended(self) -> str:
        return how_it_ended(self.process.returncode)

    def lost_another(self) -> str | None:
        """The name of its error, if another worker's end brings that error about."""
        # The line below the last frame of the last traceback: log lines may come after it.
        below_frame = [line for before, line in pairwise(self.last_lines) if before[:1] == " " != line[:1]]
        found = _ANOTHER_IS_GONE.match(below_frame[-1]) if below_frame else None
        return found[1] if found else None


def run_cluster(console: Console, workers: int, program: Sequence[str], restarts: int = 0) -> int:
    """Run ``program`` in ``workers`` processes; the exit code: 0, that of the first failure, or 130 after Ctrl-C.

    Each worker that fails is started again, up to ``restarts`` times.
    """
    cluster = _Cluster(console, workers, program, restarts)
    try:
        return cluster.run()
    finally:
        cluster.end(signal.SIGKILL)
        cluster.close()


class _Cluster:
    """The workers of one ``farcall run``, and whose failure is the cause of its end."""

    def __init__(self, console: Console, size: int, program: Sequence[str], restarts: int) -> None:
        self._console = console
        self._program = program
        self._restarts = restarts
        self._output = Output(console.file, is_terminal=console.is_terminal, width=len(str(size - 1)))
        self._failed: list[_RunWorker] = []  # by themselves, in the order in which they ended
        self._judge_at: float = 0.0
        self._is_ending = False
        self._give_up_at: float | None = None
        self._interrupted = False
        self._environment = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONUNBUFFERED": "1",
        }
        if not os.environ.get(ENV_SECRET) and not os.environ.get(ENV_SECRET_FILE):
            # Of this run alone, so that two runs of one user cannot be mistaken for each other.
            self._environment[ENV_SECRET] = secrets.token_hex(32)
        self._store: Any = None
        if restarts:
            import torch.distributed as dist  # takes a second, and only this needs it

            from farcall.runtime.rendezvous.store import loopback_listener

            listening = loopback_listener("127.0.0.1", 0)
            port = listening.getsockname()[1]
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            self._environment["MASTER_PORT"] = str(port)
            del self._environment["WORLD_SIZE"]
            # As torchrun says where it has the store: rank 0 must not open one.
            self._environment.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        else:
            with socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                self._environment["MASTER_PORT"] = str(listening.getsockname()[1])
        self._workers: list[_RunWorker] = []
        self._replaced: list[_RunWorker] = []
        for rank in range(size):
            self._workers.append(self._start(rank, 0))

    def _start(self, rank: int, restarts: int) -> _RunWorker:
        source = self._output.source(str(rank), rank)
        return _RunWorker(source, rank, environment=self._environment, program=self._program, restarts=restarts)

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                _watch(selector, worker)
            while selector.get_map() or any(worker.poll() is None for worker in self._workers):
                try:
                    self._step(selector)
                except KeyboardInterrupt:
                    # After a second Ctrl-C there is no patience left.
                    self.end(signal.SIGKILL if self._interrupted else signal.SIGINT)
                    self._interrupted = True
        return self._report()

    def _step(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(LOOK_S):
            if key.data is None:
                selector.unregister(key.fileobj)
                continue
            worker: _RunWorker = key.data
            data = worker.read()
            if data:
                worker.source.write(data)
            else:
                worker.source.end()
                selector.unregister(key.fileobj)
                worker.output.close()
        self._output.show_unfinished()
        for worker in list(self._workers):
            if not worker.poll() or worker in self._failed or self._is_ending or self._interrupted:
                continue
            if worker.restarts < self._restarts and not self._failed:
                self._restart(worker, selector)
            else:
                self._judge_at = self._judge_at or time.monotonic() + CAUSE_S
                self._failed.append(worker)
        if self._failed and not self._is_ending and not self._interrupted:
            self._judge()
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            self._give_up_at = None
            self.end(signal.SIGKILL)

    def _judge(self) -> None:
        """End the others as soon as the cause is known, or the time for it is over."""
        cause = self._cause()
        is_known = cause.lost_another() is None and all(worker.output.closed for worker in self._failed)
        if is_known or time.monotonic() > self._judge_at:
            self._is_ending = True
            self._name_cause(cause)
            self.end(signal.SIGTERM)

    def _cause(self) -> _RunWorker:
        """The first that failed not because another one was gone; or else the first that failed."""
        return next((worker for worker in self._failed if worker.lost_another() is None), self._failed[0])

    def _name_cause(self, cause: _RunWorker) -> None:
        """One line: its error is above, among its own lines."""
        first = self._failed[0]
        victim = f"; worker {first.rank} failed of it: {first.lost_another()}" if cause is not first else ""
        others = "; ending the others" if any(worker.poll() is None for worker in self._workers) else ""
        self._say(f"worker {cause.rank} {cause.how_it_ended()}{victim}{others}", "bold red")

    def _say(self, text: str, style: str) -> None:
        self._output.begin_line()
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _restart(self, worker: _RunWorker, selector: selectors.BaseSelector) -> None:
        count = worker.restarts + 1
        text = f"worker {worker.rank} {worker.how_it_ended()}; starting it again ({count} of {self._restarts})"
        self._say(text, "bold yellow")
        # Its last lines are still to be read: its output stays watched until its end.
        self._replaced.append(worker)
        again = self._workers[worker.rank] = self._start(worker.rank, count)
        _watch(selector, again)

    def end(self, number: signal.Signals) -> None:
        """Signal all workers that still run; after a while, kill them."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.send(number)
                if number == signal.SIGKILL:
                    worker.process.wait()
        if number != signal.SIGKILL:
            self._give_up_at = time.monotonic() + ENDING_S

    def close(self) -> None:
        for worker in (*self._workers, *self._replaced):
            os.close(worker.ending)
            worker.output.close()
        self._store = None

    def _report(self) -> int:
        if self._interrupted:
            self._say("interrupted", "bold")
            return 130
        if not self._failed:
            return 0
        if not self._is_ending:  # all had ended before the time for the cause was over
            self._name_cause(self._cause())
        code = self._cause().process.returncode
        return code if code > 0 else 128 - code


def _watch(selector: selectors.BaseSelector, worker: _RunWorker) -> None:
    selector.register(worker.output, selectors.EVENT_READ, worker)
    # The end itself is an event: looking from time to time could not tell which worker was first.
    selector.register(worker.ending, selectors.EVENT_READ, None)
