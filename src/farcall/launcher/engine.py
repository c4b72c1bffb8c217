"""Engines: what starts worker processes somewhere, says how they are doing, and ends them.

An engine knows processes, or whatever its site has in their place (tasks, actors, pods). It knows nothing of members,
calls, restarts or names on a screen: `cluster.py` decides what is started and when, and an engine does it.

    the driver                                     the engine
    ``start(specs, watcher)``                      starts a process for each, without waiting for it
                                                   ``watcher.on_state(spec, state)``, whenever it knows better
                                                   ``watcher.on_output(spec, data)``, as the worker writes
    ``end(specs)``                                 ends those; says so by ``on_state(..., "ended")``
    ``close()``                                    ends all, gives back what it holds; returns when nothing is left

Every process is one *life* of a worker, named by its `WorkerSpec`: a worker that is started again gets a new spec, with
``life`` one higher, and news of the old one still carry the old spec.

**How a worker gets its spec.** It runs ``python -m farcall.launcher.worker`` (`WorkerSpec.command`), which reads one
line, `WorkerSpec.encode()`, from its standard input, or from the environment variable `ENV_SPEC` where an engine has no
standard input to give. The line holds the cluster's secret: it never goes into an argument list, nor where others can
read it.

**How a worker's end is sure.** With a spec from standard input, that input is the worker's lifeline: the kernel kills
the worker and its process group when the other end is closed, whatever the interpreter is doing. So an engine keeps it
open and must not write to it again. A worker with a spec from the environment has no such line; it ends when the driver
is no longer a member, and its engine should have a way of its own besides.

**How a worker finds the driver.** It dials ``spec.meet``, one address of the driver; that is all it needs.

`farcall.launcher.commands.CommandEngine` does all of this for engines that can run a command per worker.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

ENV_SPEC = "FARCALL_WORKER_SPEC"
MAX_SPEC_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerSpec:
    """One life of one worker: all that its process has to be told. Two are equal only if they are one."""

    name: str
    rank: int
    life: int = 0
    """0 for the first process of this name; one higher for each that takes its place."""
    secret: str = field(repr=False)
    meet: str
    """Where the driver is: the ``init_method`` of the worker."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Set in the worker before anything of the user's is imported, over what its engine gives it."""
    directory: str | None = None
    """The working directory; None: wherever its engine puts it."""
    path: tuple[str, ...] = ()
    """The driver's ``sys.path``: entries that exist at the worker, too, are taken over."""
    start_timeout_s: float = 60.0
    """How long it tries to join."""
    options: bytes = field(default=b"", repr=False)
    """The driver's `RpcBackendOptions`, pickled; empty: the defaults."""
    allowed: dict[str, str | list[str]] | None = None
    """What others may call there, as `farcall.allow` takes it; None: everything."""
    program: tuple[str, ...] = ()
    """A program to run in the place of serving, as ``farcall run`` takes it."""

    @property
    def command(self) -> tuple[str, ...]:
        """What to run, where Python is where it is here; no secret is in it."""
        # Not from the directory it happens to begin in (Slurm's may be /tmp): others may have put a torch.py there. A
        # program's own directory is taken, as `python` would.
        own_path = () if self.program else ("-P",)
        return (sys.executable, *own_path, "-m", "farcall.launcher.worker")

    def encode(self) -> bytes:
        """One line for the worker's standard input, or for `ENV_SPEC`; without the line's end."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, line: bytes) -> WorkerSpec:
        return msgspec.json.decode(line, type=cls)

    def __str__(self) -> str:
        return self.name if self.life == 0 else f"{self.name} (restart {self.life})"


class ProcessState(NamedTuple):
    """What an engine says of one process."""

    phase: Literal["queued", "starting", "running", "ended"]
    """Queued: it waits for its turn or its machine; starting: an image is pulled, a connection made; running: the
    command itself runs; ended: it is gone, and nothing comes after that."""
    detail: str = ""
    """For people, while they wait: "pending in Slurm: Priority", "pulling the image"."""
    exit_code: int | None = None
    """Of one that ended, as `subprocess` tells it: negative for a signal. None where the engine cannot know."""

    def __str__(self) -> str:
        if self.phase == "ended":
            return how_it_ended(self.exit_code) + (f" ({self.detail})" if self.detail else "")
        return self.detail or self.phase


class EngineError(RuntimeError):
    """An engine cannot do what it was asked for; its text says what to do."""


class Watcher(Protocol):
    """Whom an engine tells. From any thread; neither method blocks or raises."""

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        """The engine knows better how this process is doing. After "ended" there is no more of it."""

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        """The process wrote ``data`` (stdout and stderr in one), in pieces of any size. Before its "ended"."""


class Engine(Protocol):
    """What starts and ends the processes of one cluster.

    Called by one thread at a time, but for `close`: if ``start`` takes long, another thread closes the engine
    meanwhile, and ``start`` must leave no process behind then.
    """

    driver_host: str | None
    """The driver's address as workers can dial it; None: the one that routes lead from."""

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        """Begin to start these, without waiting; raises `EngineError` where that cannot work at all.

        The failure of a single one is told to ``watcher``, as its end.
        """

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        """End these now, if they have not ended. Does not wait: the watcher is told."""

    def close(self) -> None:
        """End all processes and give back what this engine holds; returns when nothing is left, within seconds.

        It is called again where it was interrupted.
        """


def how_it_ended(exit_code: int | None) -> str:
    """For people: the end of a process."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}  # not every number has one
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
