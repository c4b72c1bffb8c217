"""The training of the demo: the task, the model, its parameter servers and trainers. Remote calls reach all of it.

The task: which of two spirals does a point lie on? The model is one network cut in two, a part for each parameter
server. Each worker is one process with one of the two roles, made before it joins, so that a caller finds it ready. A
trainer goes on after the death of a server: its step fails, it finds the server's successor by name, and does the step
again.

All times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import torch
from torch import nn

import farcall
from farcall.cli.team import Answer

WIDTH = 48
TURNS = 2.0
NOISE = 0.03
HELD_OUT_POINTS = 2000
_HELD_OUT_SEED = 1_000_000
BATCH = 64
LEARNING_RATE = 5e-3
LIMIT_S = 110.0
"""How long the whole demo, and so any wait in it, may take."""
COMES_BACK = farcall.Retry(attempts=10_000, backoff_s=0.02, longest_backoff_s=0.1)
"""For a worker that may have to be started again first, within the timeout of the call."""
OPERATIONS = ("forward on server0", "forward on server1", "backward through both", "optimizer step on both")
"""The remote parts of a training step, in their order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one trainer."""

    trainer: str
    begun_s: float
    loss: float
    took_s: tuple[float, ...]
    """How long each of `OPERATIONS` took."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A failed step of a trainer, until it had found the server anew."""

    trainer: str
    begun_s: float
    ended_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Report:
    """A trainer's round."""

    steps: list[Step]
    outages: list[Outage]


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the square from -1 to 1, and 0 or 1 for the spiral that each lies on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator).float()
    radius = 0.1 + 0.85 * torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * TURNS * radius + math.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + NOISE * torch.randn(count, 2, generator=generator), labels


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Points that no trainer sees."""
    return spirals(HELD_OUT_POINTS, _HELD_OUT_SEED)


PARTS = {
    "server0": lambda: nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "server1": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Flatten(0)),
}
"""The half of each server, in the order in which points pass through them."""
SERVERS = tuple(PARTS)
TRAINERS = ("trainer0", "trainer1")
RANKS = {name: rank for rank, name in enumerate(("demo", *SERVERS, *TRAINERS))}


def join(name: str, directory: str) -> None:
    """Become a member; the group has no fixed size, since one of its members dies and comes back."""
    torch.set_num_threads(1)  # the workers are more than most machines have cores
    logging.getLogger("farcall").setLevel(logging.ERROR)  # a death is expected, and told in other words
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/meeting", rpc_timeout=LIMIT_S)
    farcall.init_rpc(name, rank=RANKS[name], rpc_backend_options=options)


@contextmanager
def member(rank: int, size: int, directory: str) -> Iterator[Answer]:
    """The body of a process of the team; its requests come as calls."""
    name = [*SERVERS, *TRAINERS][rank]
    if name in SERVERS:
        ParameterServer.here = ParameterServer(name, Path(directory))
    else:
        Trainer.here = Trainer(name)
    join(name, directory)
    yield lambda request: None
    farcall.shutdown()


class ParameterServer:
    """A part of the model, and its checkpoint."""

    here: ClassVar[ParameterServer]

    def __init__(self, name: str, directory: Path) -> None:
        self._path = directory / f"{name}.pt"
        torch.manual_seed(SERVERS.index(name))
        # Another trainer's optimizer may step between a forward pass and its backward pass.
        self.part: nn.Module = farcall.nn.Shared(PARTS[name]())
        self.restored_steps: int | None = None
        if self._path.exists():
            checkpoint = torch.load(self._path)
            self.part.load_state_dict(checkpoint["part"])
            self.restored_steps = checkpoint["steps"]

    def save(self, steps: int) -> None:
        new = self._path.with_suffix(".new")
        torch.save({"part": self.part.state_dict(), "steps": steps}, new)
        os.replace(new, self._path)  # a kill leaves the old one or the new one, nothing between


def part_of_server() -> farcall.RRef[nn.Module]:
    """On a server: a reference to its part of the model."""
    return farcall.RRef(ParameterServer.here.part)


def save(steps: int) -> None:
    """On a server: write the checkpoint after ``steps`` steps."""
    ParameterServer.here.save(steps)


def restored_steps() -> int | None:
    """On a server: the steps of the checkpoint that it began with; None: there was none."""
    return ParameterServer.here.restored_steps


class Model:
    """The whole model, seen from a worker that has none of it."""

    def __init__(self) -> None:
        self._parts = {}
        for name in SERVERS:
            reference = farcall.rpc_sync(name, part_of_server, retry=COMES_BACK)
            self._parts[name] = farcall.nn.RemoteModule.init_from_module_rref(name, reference)

    def part(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._parts[name](inputs)
        return outputs

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        for name in SERVERS:
            points = self.part(name, points)
        return points

    def parameters(self) -> list[farcall.RRef[Any]]:
        return [reference for part in self._parts.values() for reference in part.remote_parameters()]


class Trainer:
    """A worker that takes steps: loss and data are here, all parameters on the servers."""

    here: ClassVar[Trainer]

    def __init__(self, name: str) -> None:
        self._name = name
        self.done: int = 0

    def train(self, steps: int) -> Report:
        report = Report([], [])
        while len(report.steps) < steps:
            begun_s = monotonic()
            try:
                report.steps.append(self._step())
                self.done += 1
            except farcall.errors.NetworkError as error:
                self.find_servers()
                report.outages.append(Outage(self._name, begun_s, monotonic(), f"{type(error).__name__}: {error}"))
        return report

    def find_servers(self) -> None:
        self._model = Model()
        self._optimizer = farcall.optim.DistributedOptimizer(
            torch.optim.Adam, self._model.parameters(), lr=LEARNING_RATE
        )

    def _step(self) -> Step:
        points, labels = spirals(BATCH, seed=self.done * len(TRAINERS) + TRAINERS.index(self._name))
        moments_s = [monotonic()]
        values = points
        with farcall.autograd.context() as context_id:
            for name in SERVERS:
                values = self._model.part(name, values)
                moments_s.append(monotonic())
            loss = nn.functional.binary_cross_entropy_with_logits(values, labels)
            backward_from_s = monotonic()
            farcall.autograd.backward(context_id, [loss])
            moments_s.append(monotonic())
            self._optimizer.step(context_id)
            moments_s.append(monotonic())
        took_s = [after - before for before, after in pairwise(moments_s)]
        took_s[len(SERVERS)] = moments_s[-2] - backward_from_s  # without the loss, which is no remote work
        return Step(self._name, moments_s[0], loss.item(), tuple(took_s))


def prepare() -> None:
    """On a trainer: get ready."""
    Trainer.here.find_servers()


def train(steps: int) -> Report:
    """On a trainer: take ``steps`` steps."""
    return Trainer.here.train(steps)


def steps_done() -> int:
    """On a trainer: the number of steps so far."""
    return Trainer.here.done


def evaluate(points: torch.Tensor) -> torch.Tensor:
    """The probability that each point is on the second spiral, by the model as it is now."""
    with torch.no_grad():
        return Model()(points).sigmoid()
