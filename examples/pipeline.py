"""A pipeline: a model in two stages on two workers, fed with micro-batches that overlap.

    python examples/pipeline.py

While the second stage works on one micro-batch, the first works on the next. The result of the first stage travels
straight to the second: the master only holds references. Gradients of the micro-batches add up in whatever order they
come, so the losses are those of one process to within rounding; the program trains both and compares them.
"""

from __future__ import annotations

import os
import tempfile
import threading
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

import farcall

STAGES = ("stage0", "stage1")
MICRO_BATCHES = 4
STEPS = 15


def make_layers(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    if stage == 0:
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Stage:
    """A stage of the model, at its worker."""

    def __init__(self, stage: int) -> None:
        self.layers = make_layers(stage)
        self.lock = threading.Lock()  # one micro-batch at a time, as on a device

    def forward(self, x: torch.Tensor | farcall.RRef[torch.Tensor]) -> torch.Tensor:
        value = x.to_here() if isinstance(x, farcall.RRef) else x
        with self.lock:
            return self.layers(value)  # type: ignore[no-any-return]

    def parameters(self) -> list[farcall.RRef[nn.Parameter]]:
        return [farcall.RRef(parameter) for parameter in self.layers.parameters()]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(32, 10, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def train() -> list[float]:
    stages: list[Any] = [farcall.worker(name).create(Stage, number) for number, name in enumerate(STAGES)]
    parameters = [rref for stage in stages for rref in stage.call.parameters()]
    optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        x, wanted = batch(step)
        with farcall.autograd.context() as context_id:
            futures = []
            for micro in x.chunk(MICRO_BATCHES):
                first = stages[0].remote().forward(micro)
                futures.append(stages[1].start.forward(first))
            loss = nn.functional.mse_loss(torch.cat(torch.futures.wait_all(futures)), wanted)
            farcall.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_alone() -> list[float]:
    """The twin, in one process."""
    model = nn.Sequential(make_layers(0), make_layers(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, wanted = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(torch.cat([model(micro) for micro in x.chunk(MICRO_BATCHES)]), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    names = ("master", *STAGES)
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        losses, alone = train(), train_alone()
        worst = max(abs(got - wanted) for got, wanted in zip(losses, alone, strict=True))
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
        assert worst < 1e-6, worst
        assert losses[-1] < losses[0]
        print("the same, to within rounding, as in one process", flush=True)
    farcall.shutdown()  # the stages serve in here until the master is done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=1 + len(STAGES))


if __name__ == "__main__":
    main()
