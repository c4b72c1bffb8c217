"""Workers by Slurm: each one a job step, ``srun`` of one task, in an allocation.

    inside an allocation    (``SLURM_JOB_ID``: a script of ``sbatch``, a shell of ``salloc``) its nodes are used
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
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.engines.allocation import Allocation, nodes_of
from farcall.launcher.engines.spread import Spread
from farcall.options import ENV_ADVERTISE

_OF_THE_JOB = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPUS_PER_TASK")
"""What ``srun`` would take over from the job, and what does not fit a step of one task."""
_OF_THE_DRIVER = (ENV_ADVERTISE,)
"""What ``srun`` would pass on, and what is this process' own."""
_BY_SIGNAL = 128


class SlurmEngine(CommandEngine):
    """One ``srun`` for each worker, in the allocation of this process or in one that it asks for.

    Args:
        nodes: how many nodes to ask for; inside an allocation: how many of its nodes to use.
        args: further options of ``salloc``: ``["--gres=gpu:8", "--time=4:00:00", "--partition=long"]``.
        worker_args: options of ``srun`` for each worker, such as ``["--gpus=1", "--cpus-per-task=8"]``: it then has
            these alone. By default all workers of a node share what the job has there; ``LOCAL_RANK`` numbers them.
        python: the interpreter at the nodes; None: the path that it has here.
    """

    # It ends the task first, and then itself.
    end_signal = signal.SIGTERM

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
        # Where the workers go, once that is known; until then those to be started wait. The lock guards all of it, and
        # that no worker is started once this engine was closed.
        self._gate = threading.Lock()
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._spread: Spread | None = None
        self._allocation: Allocation | None = None
        self._waiting: dict[WorkerSpec, Watcher] = {}

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        with self._gate:
            if self._spread is None and self._job:
                self._use(self._job, nodes_of(self._job))
            if self._spread is not None:
                self._start_now(specs, watcher)
                return
            self._waiting.update(dict.fromkeys(specs, watcher))
            if self._allocation is None:
                nodes = () if self._node_count is None else (f"--nodes={self._node_count}",)
                asked = (f"--ntasks={len(specs)}", *nodes, *self._arguments)
                self._allocation = Allocation(asked, self._on_pending, self._on_granted, self._on_gone)
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
        kept = {name: text for name, text in os.environ.items() if name not in (*_OF_THE_JOB, *_OF_THE_DRIVER)}
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

    # What the allocation tells, from its thread.

    def _on_pending(self, why: str) -> None:
        with self._gate:
            waiting = list(self._waiting.items())
        for spec, watcher in waiting:
            watcher.on_state(spec, ProcessState("queued", why))

    def _on_granted(self, job: str, nodes: Sequence[str]) -> None:
        with self._gate:
            if self._allocation is None:
                return  # closed meanwhile
            self._use(job, nodes)
            waiting, self._waiting = self._waiting, {}
            for spec, watcher in waiting.items():
                self._start_now([spec], watcher)

    def _on_gone(self, why: str) -> None:
        """It was refused, or has ended; steps that run in it end by Slurm."""
        with self._gate:
            waiting, self._waiting = self._waiting, {}
        for spec, watcher in waiting.items():
            watcher.on_state(spec, ProcessState("ended", why, 1))
