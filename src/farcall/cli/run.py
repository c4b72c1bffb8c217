"""``farcall run``: a program on several workers, each a process of its own, started by an engine.

Each worker finds its rank in the environment, as with ``torchrun``. An engine (`farcall.launcher`) starts and ends the
processes, and passes their output on. Ctrl-C is passed on once; workers that do not end then are killed.

    a worker ends                         then
    with exit code 0                      nothing: the others go on
    otherwise, restarts are left to it    it is started again, with the same rank and ``FARCALL_RESTARTS`` one higher
    otherwise                             the others are ended, and one line says whose fault it was; with
                                          ``keeps_going`` one line says how it ended, and the others go on
    by the error that another is gone     as before, but the other has `CAUSE_S` to end, too: if it fails of something
                                          else, the line names it

A restarted worker must be let in again: with restarts the workers get no ``WORLD_SIZE``, so that they make a group
without a fixed size, and this process has the store, which therefore outlives rank 0. It has the store as well where
workers are on other machines: only the address of this one is known before they run.

The thread that runs the command handles the engine's reports, in their order.

Invariant: no worker outlives this process, however that ends; and a worker's own children end with the worker.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import Engine, EngineError, ProcessState, WorkerSpec
from farcall.launcher.output import LastLines, Output
from farcall.options import ENV_OBSERVERS_SECRET, ENV_SECRET, ENV_SECRET_FILE

LAST_LINES = 20
"""Enough for the end of a traceback, and the log lines below it."""
ENDING_S = 10.0
"""How long workers have to end by themselves after a failure or Ctrl-C."""
CAUSE_S = 2.0
"""How long a failure that another worker may have caused is kept, for that one to end."""
LOOK_S = 0.1
LOOPBACK = "127.0.0.1"
_SECRETS = (ENV_SECRET, ENV_SECRET_FILE, ENV_OBSERVERS_SECRET)
_ANOTHER_IS_GONE = re.compile(r"farcall\.errors\.(PeerDead|ReferenceLost)\b")
"""The error of a worker that failed because another one is gone."""


class _RunWorker:
    """One process of the cluster, and its last lines."""

    def __init__(self, spec: WorkerSpec, output: Output) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.source = output.source(str(spec.rank), spec.rank)
        self.last_lines = LastLines(LAST_LINES)
        self.end: ProcessState | None = None

    def write(self, data: bytes) -> None:
        """Pass its output on."""
        self.last_lines.write(data)
        self.source.write(data)

    @property
    def has_failed(self) -> bool:
        return self.end is not None and self.end.exit_code != 0

    def lost_another(self) -> str | None:
        """The name of its error, if another worker's end brings that error about."""
        # The line below the last frame of the last traceback: log lines may come after it.
        below_frame = [line for before, line in pairwise(self.last_lines.texts()) if before[:1] == " " != line[:1]]
        found = _ANOTHER_IS_GONE.match(below_frame[-1]) if below_frame else None
        return found[1] if found else None


class _Programs(CommandEngine):
    """Programs on this machine, each an interpreter of its own: nothing is loaded before the program says so."""

    driver_host: str | None = LOOPBACK

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        return [*spec.command, *spec.program]  # the arguments are for people who look at the list of processes


def run_cluster(
    console: Console,
    workers: int,
    program: Sequence[str],
    restarts: int = 0,
    *,
    on: str = "local",
    options: Sequence[str] = (),
    keeps_going: bool = False,
) -> int:
    """Run ``program`` in ``workers`` processes; the exit code: 0, that of the first failure, or 130 after Ctrl-C.

    Each worker that fails is started again, up to ``restarts`` times. ``on`` names the engine, ``options``, each
    ``NAME=VALUE``, are its own. ``keeps_going``: a failure does not end the other workers.
    """
    engine = _find_engine(on, options)
    cluster = _Cluster(console, workers, program, restarts=restarts, engine=engine, keeps_going=keeps_going)
    try:
        return cluster.run()
    finally:
        cluster.close()


def _find_engine(on: str, options: Sequence[str]) -> Engine:
    if on == "local":
        if options:
            raise EngineError(f"--on local has no options: leave out {', '.join(options)}")
        return _Programs()
    from farcall.launcher.launch import engine_class

    kind = engine_class(on)
    made: Engine = kind(**_read_options(options, inspect.signature(kind).parameters))
    return made


def _read_options(options: Sequence[str], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """``NAME=VALUE`` as arguments: VALUE is JSON, or text, or, where the engine takes several, texts between commas."""
    read: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in parameters:
            raise EngineError(f"--option {option!r}: use NAME=VALUE, with one of {', '.join(parameters)} for NAME")
        try:
            read[name] = json.loads(text)
        except ValueError:
            is_list = str(parameters[name].annotation).startswith(("Sequence", "list", "tuple"))
            read[name] = text.split(",") if is_list else text
    return read


class _Cluster:
    """The workers of one ``farcall run``, and whose failure is the cause of its end."""

    def __init__(
        self,
        console: Console,
        size: int,
        program: Sequence[str],
        *,
        restarts: int,
        engine: Engine,
        keeps_going: bool,
    ) -> None:
        self._console = console
        self._program = tuple(program)
        self._restarts = restarts
        self._engine = engine
        self._keeps_going = keeps_going
        self._output = Output(console.file, is_terminal=console.is_terminal, width=len(str(size - 1)))
        self._heard: SimpleQueue[tuple[WorkerSpec, bytes | ProcessState]] = SimpleQueue()
        self._failed: list[_RunWorker] = []  # by themselves, in the order in which they ended
        self._judge_at: float = 0.0
        self._is_ending = False
        self._give_up_at: float | None = None
        self._interrupted = False
        self._store: Any = None
        self._port: socket.socket | None = None
        self._environment = {
            "WORLD_SIZE": str(size),
            "PYTHONUNBUFFERED": "1",
            **{name: text for name, text in os.environ.items() if name in _SECRETS},
        }
        if not os.environ.get(ENV_SECRET) and not os.environ.get(ENV_SECRET_FILE):
            # Of this run alone, so that two runs of one user cannot be mistaken for each other.
            self._environment[ENV_SECRET] = secrets.token_hex(32)
            self._environment.setdefault(ENV_OBSERVERS_SECRET, secrets.token_hex(32))  # for groups with a table
        is_here = isinstance(engine, _Programs)
        if is_here:
            self._environment["LOCAL_WORLD_SIZE"] = str(size)
        if restarts or not is_here:
            self._serve_store(is_here)
        else:
            # Bound until all have ended: the system may give a port that was only looked up to others, while rank 0
            # loads torch. Nothing listens on it, so rank 0's store, which sets the same option, can bind it, too.
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind((LOOPBACK, 0))
            self._environment.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(self._port.getsockname()[1]))
        if restarts:
            del self._environment["WORLD_SIZE"]
        self._workers: dict[int, _RunWorker] = {}
        self._replaced: list[_RunWorker] = []
        self._start(range(size), 0)

    def _serve_store(self, is_here: bool) -> None:
        import torch.distributed as dist  # takes a second, and only this needs it

        from farcall.runtime.rendezvous.addresses import choose_host
        from farcall.runtime.rendezvous.store import loopback_listener

        if is_here:
            host, listening = LOOPBACK, loopback_listener(LOOPBACK, 0)
        else:
            host = self._engine.driver_host or choose_host(None, None).host
            listening = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        # As torchrun says where it has the store: rank 0 must not open one.
        self._environment.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )

    def _start(self, ranks: Sequence[int], life: int) -> None:
        is_here = "LOCAL_WORLD_SIZE" in self._environment
        for rank in ranks:
            spec = WorkerSpec(
                name=f"worker{rank}",
                rank=rank,
                life=life,
                secret="",
                meet="",
                environment={**self._environment, **({"LOCAL_RANK": str(rank)} if is_here else {})},
                directory=os.getcwd(),
                program=self._program,
            )
            self._workers[rank] = _RunWorker(spec, self._output)
        self._engine.start([self._workers[rank].spec for rank in ranks], self)

    # Reports of the engine, from its thread.

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        self._heard.put((spec, data))

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        self._heard.put((spec, state))

    # The thread of the command.

    def run(self) -> int:
        while any(worker.end is None for worker in self._everybody()):
            try:
                self._step()
            except KeyboardInterrupt:
                # After a second Ctrl-C there is no patience left.
                self._end(signal.SIGKILL if self._interrupted else signal.SIGINT)
                self._interrupted = True
        return self._report()

    def _everybody(self) -> list[_RunWorker]:
        return [*self._workers.values(), *self._replaced]

    def _step(self) -> None:
        try:
            spec, news = self._heard.get(timeout=LOOK_S)
        except Empty:
            pass
        else:
            worker = next(one for one in self._everybody() if one.spec is spec)
            if isinstance(news, bytes):
                worker.write(news)
            elif news.phase == "ended":
                worker.end = news
                worker.source.end()
                self._on_end(worker)
        self._output.show_unfinished()
        if self._failed and not self._keeps_going and not self._is_ending and not self._interrupted:
            self._judge()
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            self._give_up_at = None
            self._end(signal.SIGKILL)

    def _on_end(self, worker: _RunWorker) -> None:
        if not worker.has_failed or self._is_ending or self._interrupted:
            return
        if worker.spec.life < self._restarts and (self._keeps_going or not self._failed):
            count = worker.spec.life + 1
            text = f"worker {worker.rank} {worker.end}; starting it again ({count} of {self._restarts})"
            self._say(text, "bold yellow")
            self._replaced.append(worker)
            self._start([worker.rank], count)
        else:
            self._judge_at = self._judge_at or time.monotonic() + CAUSE_S
            self._failed.append(worker)
            if self._keeps_going:
                others = "; the others go on" if self._any_left() else ""
                self._say(f"worker {worker.rank} {worker.end}{others}", "bold red")

    def _judge(self) -> None:
        """End the others as soon as the cause is known, or the time for it is over."""
        cause = self._cause()
        if cause.lost_another() is None or time.monotonic() > self._judge_at:
            self._is_ending = True
            self._name_cause(cause)
            self._end(signal.SIGTERM)

    def _cause(self) -> _RunWorker:
        """The first that failed not because another one was gone; or else the first that failed."""
        return next((worker for worker in self._failed if worker.lost_another() is None), self._failed[0])

    def _name_cause(self, cause: _RunWorker) -> None:
        """One line: its error is above, among its own lines."""
        first = self._failed[0]
        victim = f"; worker {first.rank} failed of it: {first.lost_another()}" if cause is not first else ""
        others = "; ending the others" if self._any_left() else ""
        self._say(f"worker {cause.rank} {cause.end}{victim}{others}", "bold red")

    def _any_left(self) -> bool:
        return any(worker.end is None for worker in self._workers.values())

    def _say(self, text: str, style: str) -> None:
        self._output.begin_line()
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _end(self, number: signal.Signals) -> None:
        """Signal all workers that still run; after a while, kill them."""
        left = [worker.spec for worker in self._workers.values() if worker.end is None]
        if number != signal.SIGKILL and isinstance(self._engine, CommandEngine):
            self._engine.send(left, number)
            self._give_up_at = time.monotonic() + ENDING_S
        else:
            self._engine.end(left)

    def close(self) -> None:
        self._engine.close()
        self._store = None
        if self._port is not None:
            self._port.close()

    def _report(self) -> int:
        if self._interrupted:
            self._say("interrupted", "bold")
            return 130
        if not self._failed:
            return 0
        if not self._is_ending and not self._keeps_going:  # all had ended before the time for the cause was over
            self._name_cause(self._cause())
        end = self._cause().end
        code = 1 if end is None or end.exit_code is None else end.exit_code
        return code if code > 0 else 128 - code
