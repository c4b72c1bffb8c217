"""Engines: they start worker processes somewhere, tell their states, and end them.

An engine knows processes, or their counterparts at its site (tasks, actors, pods). It knows nothing of members, calls,
restarts or names on a screen: `supervisor.py` decides which worker is started and when, and an engine does it.

    the driver                                     the engine
    ``start(specs, watcher)``                      starts a process for each, without waiting for it
                                                   ``watcher.on_state(spec, state)``, at each change
                                                   ``watcher.on_output(spec, data)``, as the worker writes
    ``end(specs)``                                 ends these; says so by ``on_state(..., "ended")``
    ``close()``                                    ends all, frees its resources; returns when nothing is left

Every process is one *life* of a worker, named by its `WorkerSpec`: a worker that is started again gets a new spec, with
``life`` one higher, and news of the old one still carry the old spec.

**How a worker gets its spec.** It runs ``python -m farcall.launcher.worker`` (`WorkerSpec.command`), which reads one
line, `WorkerSpec.encode()`, from its standard input; or, at a site without standard input, from the file that the
environment variable `ENV_SPEC_FILE` names. The line holds the cluster's secret: keep it out of argument lists and
environments, and of every place that others can read.

**How a worker's end is sure.** A standard input that the spec came from is the worker's lifeline: the kernel kills the
worker and its process group when the other end is closed, whatever the interpreter is doing. So an engine keeps it open
and does not write to it again. A worker with a spec from a file has no such line; it ends when the driver is
no longer a member, and its engine should have a second way to end it.

**How a worker finds the driver.** It dials ``spec.meet``, one address of the driver, and needs no more.

`farcall.launcher.commands.CommandEngine` does all of this for engines that can run a command per worker.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

ENV_SPEC_FILE = "FARCALL_WORKER_SPEC_FILE"
MAX_SPEC_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerSpec:
    """One life of one worker, as its process has to know it. Compared by identity."""

    name: str
    rank: int
    life: int = 0
    """0 for the first process of this name; one higher for each that takes its place."""
    secret: str = field(repr=False)
    meet: str
    """The driver's address: the ``init_method`` of the worker."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Set in the worker before any code of the user is imported; wins over the engine's environment."""
    directory: str | None = None
    """The working directory; None: the engine's choice."""
    path: tuple[str, ...] = ()
    """The driver's ``sys.path``: a worker adds the entries that exist on its host."""
    start_timeout_s: float = 60.0
    """How long it tries to join."""
    options: bytes = field(default=b"", repr=False)
    """The driver's `RpcBackendOptions`, pickled; empty: the defaults."""
    allowed: dict[str, str | list[str] | dict[str, list[str]]] | None = None
    """The functions and classes that others may use there, as `farcall.allow` takes them; None: all."""
    program: tuple[str, ...] = ()
    """A program to run instead of serving, as ``farcall run`` takes it."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a worker, where Python has the same path as here; contains no secret."""
        # -P: no imports from the first working directory (Slurm's may be /tmp), where others may have put a torch.py.
        # A program's own directory is on the path, as with `python`.
        own_path = () if self.program else ("-P",)
        return (sys.executable, *own_path, "-m", "farcall.launcher.worker")

    def encode(self) -> bytes:
        """One line for the worker's standard input, or for the file of `ENV_SPEC_FILE`; without a newline."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(line: bytes) -> WorkerSpec:
        return _DECODER.decode(line)

    def __str__(self) -> str:
        return self.name if self.life == 0 else f"{self.name} (restart {self.life})"


_DECODER: msgspec.json.Decoder[WorkerSpec] = msgspec.json.Decoder(WorkerSpec)


class ProcessState(NamedTuple):
    """The state of one process, as its engine knows it."""

    phase: Literal["queued", "starting", "running", "ended"]
    """Queued: it waits for its turn or its machine; starting: an image is pulled, a connection made; running: the
    command itself runs; ended: it is gone, and no other state follows."""
    detail: str = ""
    """For people, while they wait: "pending in Slurm: Priority", "pulling the image"."""
    exit_code: int | None = None
    """After the end, as in `subprocess`: negative for a signal. None where the engine cannot know."""

    def __str__(self) -> str:
        if self.phase == "ended":
            return how_it_ended(self.exit_code) + (f" ({self.detail})" if self.detail else "")
        return self.detail or self.phase


class EngineError(RuntimeError):
    """An engine cannot do its work; the text says what to do."""


class Watcher(Protocol):
    """The receiver of an engine's news. Called from any thread; neither method blocks or raises."""

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        """The process is in this state now; "ended" is the last one."""

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        """The process wrote ``data`` (stdout and stderr in one), in pieces of any size. Before its "ended"."""


class Engine(Protocol):
    """Starts and ends the processes of one cluster.

    One thread at a time calls it, but for `close`: if ``start`` takes long, another thread closes the engine meanwhile,
    and ``start`` must leave no process behind then.
    """

    driver_host: str | None
    """The driver's address for workers to dial; None: the local address of the route to them."""

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        """Begin to start these, without waiting; raises `EngineError` where that cannot work at all.

        The failure of a single one is its end, and ``watcher`` is told.
        """

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        """End these now, unless they have ended. Does not wait: the watcher is told."""

    def close(self) -> None:
        """End all processes and free all resources; returns when nothing is left, within seconds.

        May be called again after an interruption.
        """


def how_it_ended(exit_code: int | None) -> str:
    """The end of a process, in words."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}  # not every number has one
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
