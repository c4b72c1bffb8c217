"""The course of the demo, and its figures, in the process that shows it: a member of the group like the others.

Training goes in rounds. Each is one call to each trainer, and is followed by a checkpoint on each server:

    rounds            besides
    in the middle     half-way through the round a server is killed by SIGKILL; the group tells this process of the
                      death (`farcall.on_member`), and it starts the server again
    the last          all workers are recorded, for the trace

Any other death ends the demo with an error. Shows nothing itself: a `Stage` does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import monotonic, sleep
from typing import Any, Protocol

import torch

import farcall
from farcall.cli.demo import training
from farcall.cli.demo.training import LIMIT_S, OPERATIONS, RANKS, SERVERS, TRAINERS, Outage, Report, Step
from farcall.cli.team import NEWS_S, Team, TeamError

ROUNDS = 20
KILL_IN_ROUND = 8
RECORDED_STEPS = 10
"""The steps of each trainer in the trace: enough to see the parts of a step, and quick to load."""
GRID = 72
VICTIM = SERVERS[1]
PRELOADED = ("farcall.cli.demo.training", "torch._dynamo")
"""Modules that workers need at once. torch's optimizers import the second, which takes a second or two."""
_LOOK_S = 0.005


@dataclass(slots=True)
class Death:
    """The death of the server that is killed; each moment is zero until it has come."""

    worker: str
    after_steps: int = 0
    saved_steps: int = 0
    """The steps that its checkpoint knew of."""
    killed_s: float = 0.0
    noticed_s: float = 0.0
    back_s: float = 0.0


@dataclass(slots=True)
class Figures:
    """The figures of a whole run; kept as JSON."""

    begun_s: float
    death: Death
    steps: list[Step] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    accuracy: float = 0.0
    """The share of points held out that are put on the right spiral."""
    grid: list[list[float]] = field(default_factory=list)
    """The model's view of the square, row by row from the top: the probability of the second spiral."""
    missing_in_trace: dict[str, str] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        self.steps += report.steps
        self.outages += report.outages

    def loss_at_first(self) -> float:
        """The mean loss of the first tenth of the steps."""
        return fmean(self._losses()[: max(1, len(self.steps) // 10)])

    def loss_at_last(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return fmean(self._losses()[-max(1, len(self.steps) // 10) :])

    def _losses(self) -> list[float]:
        return [step.loss for step in sorted(self.steps, key=lambda step: step.begun_s)]

    def as_json(self) -> str:
        return json.dumps({"operations": OPERATIONS, **asdict(self)}, indent=1) + "\n"


def latency_s(steps: list[Step], operation: int) -> tuple[float, float]:
    """Median and 99th percentile of one of `OPERATIONS`."""
    ordered = sorted(step.took_s[operation] for step in steps)
    return median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


class DemoFailed(Exception):
    """The reason, for people."""


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Around writing a file: an error of the system fails the demo, and names the file."""
    try:
        yield path
    except OSError as error:
        raise DemoFailed(f"cannot write {path}: {error.strerror or error}") from error


class Stage(Protocol):
    """The spectator of a demo."""

    def on_event(self, text: str) -> None: ...

    def on_steps(self, done: int, loss: float) -> None: ...


class Play:
    """One run of the demo."""

    def __init__(self, stage: Stage, steps: int, trace: Path) -> None:
        self._stage = stage
        self._steps = steps  # of both trainers together
        self._trace = trace
        self._begun_s = monotonic()
        self._back = threading.Event()
        self._failure: str | None = None
        self.figures: Figures = Figures(0.0, Death(VICTIM))

    def run(self) -> Figures:
        """Everything, from the first process to the last."""
        self._stage.on_event(f"starting {len(SERVERS)} parameter servers and {len(TRAINERS)} trainers")
        names = [*SERVERS, *TRAINERS]
        try:
            self._team = Team(training.member, len(names), names=names, preload=PRELOADED)
        except (TeamError, OSError) as error:
            raise DemoFailed(f"cannot start the workers: {error}") from error
        try:
            try:
                self._play()
                self._team.stop()
            except BaseException as error:
                if self._failure is None and isinstance(error, farcall.errors.NetworkError):
                    self._failure = self._who_died(str(error))
                self._team.kill()
                raise
        except TeamError as error:
            raise DemoFailed(str(error)) from error
        except (farcall.errors.RpcError, OSError) as error:
            raise DemoFailed(self._failure or f"{type(error).__name__}: {error}") from error
        return self.figures

    def _play(self) -> None:
        training.join("demo", self._team.directory)
        try:
            farcall.on_member(self._on_member)
            self._wait_for_workers()
            self._train()
            self._evaluate()
        finally:
            farcall.shutdown(graceful=False)

    def _wait_for_workers(self) -> None:
        """Return when all workers are members: news of one may be late on a busy machine, and one may have died."""
        names = [*SERVERS, *TRAINERS]
        while missing := sorted(set(names) - {worker.name for worker in farcall.members()}):
            if self._failure is not None:
                raise DemoFailed(self._failure)
            for name in missing:
                if self._team.has_ended(names.index(name)):
                    raise DemoFailed(self._how_it_died(name, "before training began"))
            self._back.wait(min(_LOOK_S, self._left_s()))

    def _left_s(self) -> float:
        left_s = self._begun_s + LIMIT_S - monotonic()
        if left_s <= 0:
            raise DemoFailed(
                f"only {len(self.figures.steps)} of {self._steps} steps were done in {LIMIT_S:.0f} s: the machine is "
                "too busy. Try it with fewer: --steps 200"
            )
        return left_s

    def _train(self) -> None:
        preparing = [farcall.rpc_async(name, training.prepare, timeout=self._left_s()) for name in TRAINERS]
        for future in preparing:
            future.wait()
        self._stage.on_event(f"training {self._steps} steps; {VICTIM} will be killed on the way")
        self.figures.begun_s = monotonic()
        per_trainer = self._steps // len(TRAINERS)
        for number in range(ROUNDS):
            # As even as possible, and never none.
            steps = per_trainer * (number + 1) // ROUNDS - per_trainer * number // ROUNDS
            if number == KILL_IN_ROUND:
                self._train_and_kill(steps)
            elif number == ROUNDS - 1:
                self._train_and_record(steps)
            else:
                self._finish(self._begin(steps))

    def _begin(self, steps: int) -> dict[str, Any]:
        left_s = self._left_s()
        return {name: farcall.rpc_async(name, training.train, args=(steps,), timeout=left_s) for name in TRAINERS}

    def _finish(self, running: dict[str, Any]) -> None:
        for future in running.values():
            self.figures.add(future.wait())
        if self._failure is not None:
            raise DemoFailed(self._failure)
        done = len(self.figures.steps)
        saving = [farcall.rpc_async(name, training.save, args=(done,), timeout=self._left_s()) for name in SERVERS]
        for future in saving:
            future.wait()
        self._stage.on_steps(done, self.figures.loss_at_last())

    def _train_and_kill(self, steps: int) -> None:
        death = self.figures.death
        running = self._begin(steps)
        before = death.saved_steps = len(self.figures.steps)
        half_way = before + len(TRAINERS) * steps // 2
        done = before
        while done < half_way:
            self._back.wait(min(_LOOK_S, self._left_s()))
            done = sum(farcall.rpc_sync(name, training.steps_done, timeout=self._left_s()) for name in TRAINERS)
        death.after_steps = done
        death.killed_s = monotonic()
        self._team.kill_member(SERVERS.index(VICTIM))
        self._stage.on_event(f"killed {VICTIM} (SIGKILL) after {done} steps, in the middle of training")
        if not self._back.wait(self._left_s()):
            self._left_s()  # which says so
        self._finish(running)
        restored = farcall.rpc_sync(VICTIM, training.restored_steps)
        if restored != death.saved_steps:
            raise DemoFailed(f"{VICTIM} came back with the checkpoint of step {restored}, not {death.saved_steps}")

    def _train_and_record(self, steps: int) -> None:
        recorded = min(steps, RECORDED_STEPS)
        if steps > recorded:
            self._finish(self._begin(steps - recorded))
        with farcall.profile() as profile:
            self._finish(self._begin(recorded))
        self.figures.missing_in_trace = profile.missing
        with writing(self._trace) as path:
            profile.export_chrome_trace(path)

    def _on_member(self, event: farcall.MemberEvent) -> None:
        """On a thread of its own; a failure here must reach the thread that waits."""
        death = self.figures.death
        name = event.worker.name
        if event.kind == "dead" and name == VICTIM and death.killed_s and not death.noticed_s:
            death.noticed_s = monotonic()
            self._stage.on_event(
                f"the group says that {VICTIM} is dead, {(death.noticed_s - death.killed_s) * 1e3:.0f} ms later; "
                "starting it again"
            )
            try:
                self._team.restart(SERVERS.index(VICTIM), LIMIT_S)
            except (TeamError, OSError) as error:
                self._give_up(f"cannot restart {VICTIM}: {error}")
        elif event.kind == "joined" and name == VICTIM:
            death.back_s = monotonic()
            self._stage.on_event(
                f"{VICTIM} is back with its checkpoint, {death.back_s - death.killed_s:.2f} s after it was killed; the "
                "trainers go on"
            )
            self._back.set()
        elif event.kind == "dead" and self._failure is None:
            self._give_up(self._how_it_died(name, event.why))

    def _who_died(self, why: str) -> str | None:
        """The death that a call failed of: the error may come first, from a worker that heard earlier of the death."""
        names = [name for name in (*SERVERS, *TRAINERS) if name != VICTIM or not self.figures.death.killed_s]
        give_up_at = monotonic() + NEWS_S
        while self._failure is None and monotonic() < give_up_at:
            for name in names:
                if self._team.has_ended(RANKS[name] - 1):
                    return self._how_it_died(name, why)
            sleep(_LOOK_S)
        return self._failure

    def _how_it_died(self, name: str, why: str) -> str:
        how = self._team.how_it_ended(RANKS[name] - 1, NEWS_S)
        return f"{name} died, and the demo did not kill it: it {how} ({why}). If memory is short, that may be why"

    def _give_up(self, why: str) -> None:
        """End the trainers, so that every wait for one ends at once."""
        self._failure = why
        self._back.set()
        for rank in range(len(SERVERS), len(SERVERS) + len(TRAINERS)):
            self._team.kill_member(rank)

    def _evaluate(self) -> None:
        points, labels = training.held_out()
        self.figures.accuracy = float(((training.evaluate(points) > 0.5) == (labels > 0.5)).float().mean())
        steps = (torch.arange(GRID) + 0.5) / GRID * 2 - 1
        rows, columns = torch.meshgrid(-steps, steps, indexing="ij")
        said = training.evaluate(torch.stack([columns.flatten(), rows.flatten()], dim=1))
        self.figures.grid = [[round(value, 3) for value in row] for row in said.reshape(GRID, GRID).tolist()]
