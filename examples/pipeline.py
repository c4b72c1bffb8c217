"""A pipeline: a model in two stages on two workers, fed with micro-batches that overlap.

    python examples/pipeline.py

While the second stage works on one micro-batch, the first works on the next. The result of the first stage travels
straight to the second: the master only holds references. Gradients of the micro-batches add up in whatever order they
come, so the losses are those of one process to within rounding; the program trains both and compares them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from typing import Any

import torch
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
    stages: list[Any] = [farcall.remote(name, Stage, args=(number,)) for number, name in enumerate(STAGES)]
    parameters = [rref for stage in stages for rref in stage.rpc_sync().parameters()]
    optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        x, wanted = batch(step)
        with farcall.autograd.context() as context_id:
            futures = []
            for micro in x.chunk(MICRO_BATCHES):
                first = stages[0].remote().forward(micro)
                futures.append(stages[1].rpc_async().forward(first))
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


def run(rank: int, directory: str, losses: multiprocessing.Queue[list[float]]) -> None:
    names = ("master", *STAGES)
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/meeting")
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        losses.put(train())
    farcall.shutdown()  # the stages serve in here until the master is done


def main() -> None:
    spawning = multiprocessing.get_context("spawn")
    losses: multiprocessing.Queue[list[float]] = spawning.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [spawning.Process(target=run, args=(rank, directory, losses)) for rank in range(3)]
        for process in processes:
            process.start()
        found = losses.get(timeout=120)
        for process in processes:
            process.join()
            assert process.exitcode == 0
    alone = train_alone()
    worst = max(abs(got - wanted) for got, wanted in zip(found, alone, strict=True))
    print(f"loss {found[0]:.4f} at first, {found[-1]:.4f} at last; at most {worst:.1e} from those of one process")
    assert worst < 1e-6
    assert found[-1] < found[0]


if __name__ == "__main__":
    main()
