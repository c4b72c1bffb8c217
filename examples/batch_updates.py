"""Batched updates: a parameter server that waits for a gradient from every trainer, and then steps once for all.

    python examples/batch_updates.py

Each trainer sends its gradient with one call and gets the updated parameters as its answer. The function that serves
that call is an asynchronous one: it returns a future and occupies no thread while it waits for the other trainers, so
a server can have thousands of them waiting. Gradients are added in the order of the trainers and not of their
arrival: the run is the same each time, and the same, bit for bit, as in one process. The program trains both and
compares them.
"""

from __future__ import annotations

import os
import tempfile
import threading

import torch
import torch.multiprocessing
from torch import nn

import farcall

TRAINERS = 2
STEPS = 40

Gradients = list[torch.Tensor]
Weights = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def gradients_of(model: nn.Module, trainer: int, step: int) -> tuple[Gradients, float]:
    """What a trainer computes in a step: the gradients of its own batch, and the loss."""
    x = torch.rand(32, 8, generator=torch.Generator().manual_seed(1000 * trainer + step % 4))
    loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True).sqrt())
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], loss.item()


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Gradients]) -> None:
    """One step with the mean of the gradients."""
    for parameter, *parts in zip(model.parameters(), *batch, strict=True):
        parameter.grad = torch.stack(parts).mean(0)
    optimizer.step()


class Server:
    """At the server: the model, and the gradients that have come for the next step."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.lock = threading.Lock()
        self.batch: dict[int, Gradients] = {}
        self.answer: torch.futures.Future[Weights] = torch.futures.Future()

    @farcall.functions.async_execution
    def update(self, trainer: int, gradients: Gradients) -> torch.futures.Future[Weights]:
        """Take part in the next step; the answer, to all who did, are the weights after it."""
        with self.lock:
            self.batch[trainer] = gradients
            answer = self.answer
            if len(self.batch) == TRAINERS:
                step_with(self.model, self.optimizer, [self.batch[number] for number in range(TRAINERS)])
                self.batch, self.answer = {}, torch.futures.Future()
                answer.set_result({name: value.clone() for name, value in self.model.state_dict().items()})
        return answer


_server: Server | None = None


def get_server() -> farcall.RRef[Server]:
    """At the server: a reference to what all trainers share."""
    assert _server is not None
    return farcall.RRef(_server)


def train(trainer: int) -> list[float]:
    server = farcall.worker("server").call(get_server)
    model = make_model()
    losses = []
    for step in range(STEPS):
        gradients, loss = gradients_of(model, trainer, step)
        model.load_state_dict(server.call.update(trainer, gradients))
        losses.append(loss)
    return losses


def train_alone() -> list[list[float]]:
    """The twin, in one process: the losses of each trainer."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses: list[list[float]] = [[] for _ in range(TRAINERS)]
    for step in range(STEPS):
        batch = []
        for trainer in range(TRAINERS):
            gradients, loss = gradients_of(model, trainer, step)
            batch.append(gradients)
            losses[trainer].append(loss)
        step_with(model, optimizer, batch)
    return losses


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    global _server
    name = "server" if rank == 0 else f"trainer{rank - 1}"
    if rank == 0:
        _server = Server()  # before anybody can ask for it
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(name, rank=rank, world_size=1 + TRAINERS, rpc_backend_options=options)
    if rank > 0:
        losses = train(rank - 1)
        print(f"{name}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
        assert losses == train_alone()[rank - 1], "not the losses of one process"
        assert losses[-1] < losses[0] / 2
        print(f"{name}: the same, bit for bit, as in one process", flush=True)
    farcall.shutdown()  # the server serves in here until all trainers are done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=1 + TRAINERS)


if __name__ == "__main__":
    main()
