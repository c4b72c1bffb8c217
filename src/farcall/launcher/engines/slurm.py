"""Workers by Slurm: each one a job step, ``srun`` of one task, in an allocation.

    inside an allocation    (``SLURM_JOB_ID``: a script of ``sbatch``, a shell of ``salloc``) the steps use its nodes
    outside                 `Allocation` asks for one by ``salloc``, and gives it back at the end

    the secret              standard input of the task, through ``srun`` and Slurm's own connections
    output, exit code       those of ``srun``
    the driver dies         its end of the standard input of ``srun`` closes, ``srun`` closes the task's: its lifeline;
                            an allocation of our own is given back, and Slurm kills what is left in it
    a step waits            for CPUs or GPUs of other steps (with ``worker_args``): ``srun`` says so in its output

One ``srun`` for each worker, and not one for all: then a worker's output, its end and its replacement are its own. Some
hundreds are no trouble; for thousands of ranks, ``srun farcall run`` starts all in one step.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.engines.spread import Spread
from farcall.options import ENV_ADVERTISE

REASON_EVERY_S = 3.0
ANSWER_S = 30.0
"""How long Slurm's controller may take to answer a question."""
CLOSE_S = 20.0
"""How long ``salloc`` may take to give the nodes back."""
_NOT_FOR_STEPS = (
    # Of the job: srun would use these, and they do not fit a step of one task.
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPUS_PER_TASK"),
    ENV_ADVERTISE,  # this process' own
)
_BY_SIGNAL = 128
_AROUND = """
exec 3<&0
salloc "$@" 2>&1 <&3 & held=$!
exec > /dev/null 2>&1
cat
[ -e "$GRANTED/now" ] || kill $held
wait $held
rm -r "$GRANTED"
"""
_INSIDE = ': > "$GRANTED/now"; exec cat'
_JOB = re.compile(r"salloc: (?:Pending|Granted) job allocation (\d+)")


class SlurmEngine(CommandEngine):
    """One ``srun`` for each worker, in the allocation of this process or in one that it asks for.

    Args:
        nodes: how many nodes to ask for; inside an allocation: how many of its nodes to use.
        args: further options of ``salloc``: ``["--gres=gpu:8", "--time=4:00:00", "--partition=long"]``.
        worker_args: options of ``srun`` for each worker, such as ``["--gpus=1", "--cpus-per-task=8"]``: it then has
            these alone. By default all workers of a node share what the job has there; ``LOCAL_RANK`` numbers them.
        python: the interpreter at the nodes; None: the path that it has here.
    """

    end_signal = signal.SIGTERM  # srun ends the task first, and then itself

    def __init__(
        self,
        *,
        nodes: int | None = None,
        args: Sequence[str] = (),
        worker_args: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        if shutil.which("srun") is None:
            raise EngineError(
                'on="slurm" needs srun, which is not installed here: run this on a node of the Slurm cluster'
            )
        super().__init__()
        self._node_count = nodes
        self._arguments = tuple(args)
        self._worker_arguments = tuple(worker_args)
        self._python = python
        # Workers wait until their nodes are known. The lock guards all of this, and that no worker is started once this
        # engine was closed.
        self._gate = threading.Lock()
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._spread: Spread | None = None
        self._allocation: Allocation | None = None
        self._waiting: dict[WorkerSpec, Watcher] = {}

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        with self._gate:
            if self._closed.is_set():
                raise EngineError("this engine was closed; make a new one")
            if self._spread is None and self._job:
                self._use(self._job, nodes_of(self._job))
            if self._spread is not None:
                self._start_now(specs, watcher)
                return
            self._waiting.update(dict.fromkeys(specs, watcher))
            if self._allocation is None:
                nodes = () if self._node_count is None else (f"--nodes={self._node_count}",)
                asked = (f"--ntasks={len(specs)}", *nodes, *self._arguments)
                self._allocation = Allocation(asked, self)
            for spec in specs:  # before the allocation's thread has more to tell of them
                watcher.on_state(spec, ProcessState("queued", "asking Slurm for nodes"))

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        with self._gate:
            waiting = [(spec, self._waiting.pop(spec)) for spec in specs if spec in self._waiting]
            super().end(specs)
        for spec, watcher in waiting:
            watcher.on_state(spec, ProcessState("ended", "before it was started"))

    def close(self) -> None:
        with self._gate:
            self._closed.set()
            waiting = list(self._waiting)
            allocation, self._allocation = self._allocation, None
        self.end(waiting)
        try:
            super().close()
        finally:
            if allocation is not None:
                allocation.close()

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        assert self._spread is not None
        own = ("--exact", *self._worker_arguments) if self._worker_arguments else ("--overlap", "--cpu-bind=none")
        command = (self._python or spec.command[0], *spec.command[1:])
        return (
            "srun",
            f"--jobid={self._job}",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self._spread.host(spec.rank)}",
            f"--job-name={spec.name}",
            "--export=ALL",
            "--mpi=none",
            "--unbuffered",
            "--quiet",
            *own,
            *command,
        )

    def environment(self, spec: WorkerSpec) -> Mapping[str, str]:
        assert self._spread is not None
        kept = {name: text for name, text in os.environ.items() if name not in _NOT_FOR_STEPS}
        return {**kept, "LOCAL_RANK": str(self._spread.local_rank(spec.rank))}

    def running_detail(self, spec: WorkerSpec) -> str:
        assert self._spread is not None
        return f"srun on {self._spread.host(spec.rank)}, job {self._job}"

    def ended(self, spec: WorkerSpec, exit_code: int) -> ProcessState:
        # As a shell does: 137 for SIGKILL.
        return super().ended(spec, _BY_SIGNAL - exit_code if exit_code > _BY_SIGNAL else exit_code)

    def _use(self, job: str, nodes: Sequence[str]) -> None:
        self._job = job
        self._spread = Spread(nodes[: self._node_count])

    def _start_now(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        assert self._spread is not None
        self._spread.place([spec.rank for spec in specs])
        super().start(specs, watcher)

    # The allocation's news, on its thread.

    def on_pending(self, why: str) -> None:
        with self._gate:
            waiting = list(self._waiting.items())
        for spec, watcher in waiting:
            watcher.on_state(spec, ProcessState("queued", why))

    def on_granted(self, job: str, nodes: Sequence[str]) -> None:
        with self._gate:
            if self._allocation is None:
                return  # closed meanwhile
            self._use(job, nodes)
            waiting, self._waiting = self._waiting, {}
            for spec, watcher in waiting.items():
                self._start_now([spec], watcher)

    def on_gone(self, why: str) -> None:
        """The allocation was refused, or has ended; Slurm ends the steps in it. The next worker asks for another."""
        with self._gate:
            self._allocation = None
            waiting, self._waiting = self._waiting, {}
        for spec, watcher in waiting.items():
            watcher.on_state(spec, ProcessState("ended", why, 1))


class Allocation:
    """An allocation of Slurm's that this process asks for: pending, granted, gone.

    ``salloc`` asks and holds it; when ``salloc`` ends, Slurm takes the nodes back and kills what still runs there. It
    ends when its standard input is closed, by `close` or because this process dies: once the nodes are granted it runs
    ``cat``, which ends then; before that a small shell around it waits for the same, and signals it. (Signalled while
    its command ends, ``salloc`` 22.05 waits in a loop for a child that it reaped: so a file says which it is.)

    One thread reads the output of ``salloc``, and tells the engine. While the job is pending it asks ``squeue`` for the
    reason.
    """

    def __init__(self, options: Sequence[str], engine: SlurmEngine) -> None:
        """Ask for nodes with these ``options`` of ``salloc``."""
        self._engine = engine
        # A session of its own: Ctrl-C in the terminal is the driver's.
        self._process = subprocess.Popen(
            ["sh", "-c", _AROUND, "salloc", "--job-name=farcall", *options, "sh", "-c", _INSIDE],
            env={**os.environ, "GRANTED": tempfile.mkdtemp(prefix="farcall-slurm-")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._job = ""
        self._last = ""
        self._reason = ""
        self._error = ""  # why the nodes cannot be used
        self._granted = False
        self._thread = threading.Thread(target=self._watch, name="farcall-slurm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the nodes back, or no longer ask for them."""
        self._give_back()
        try:
            self._process.wait(CLOSE_S)
            self._thread.join(CLOSE_S)
        except subprocess.TimeoutExpired:
            left = f"scancel {self._job}" if self._job else "squeue --me"
            raise EngineError(f"salloc did not end within {CLOSE_S:.0f} s; end it yourself: {left}") from None

    def _watch(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout
        unfinished = b""
        with selectors.DefaultSelector() as selector, output:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if not selector.select(None if self._granted else REASON_EVERY_S):
                    self._ask_reason()
                    continue
                data = output.read(4096)
                if not data:
                    break
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    self._hear(line.decode(errors="replace"))
        self._give_back()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)  # the shell around it, which has nothing left to wait for
        self._engine.on_gone(self._error or self._last or "salloc ended")

    def _give_back(self) -> None:
        """Close the standard input of ``salloc``: it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _hear(self, line: str) -> None:
        self._last = line
        found = _JOB.search(line)
        if found is not None:
            self._job = found[1]
        if found is not None and "Granted" in line:
            self._granted = True
            try:
                self._engine.on_granted(self._job, nodes_of(self._job))
            except EngineError as error:
                self._error = str(error)
                self._give_back()
        elif not self._granted:
            self._tell(line.removeprefix("salloc: "))

    def _ask_reason(self) -> None:
        if self._job:
            try:
                reason = _ask(["squeue", "--noheader", f"--jobs={self._job}", "--format=%r, expected start %S"])
            except EngineError as error:
                reason = str(error)
            self._tell(f"Slurm's job {self._job} is pending: {reason.removesuffix(', expected start N/A')}")

    def _tell(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._engine.on_pending(reason)


def nodes_of(job: str) -> list[str]:
    """The names of an allocation's nodes."""
    compact = _ask(["squeue", "--noheader", f"--jobs={job}", "--format=%N"])
    nodes = _ask(["scontrol", "show", "hostnames", compact]).split() if compact else []
    if not nodes:
        raise EngineError(f"Slurm's job {job} has no nodes: check with `squeue --jobs={job}` whether it has ended")
    return nodes


def _ask(command: Sequence[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"Slurm does not answer {command[0]}: {error}") from error
    if answer.returncode:
        raise EngineError(f"{command[0]}: {answer.stderr.strip()}")
    return answer.stdout.strip()
