"""A parameter server: one worker owns the model, trainers compute on it and step its optimizer.

    python examples/parameter_server.py                                     # everything on this machine
    torchrun --standalone --nproc-per-node 3 examples/parameter_server.py   # or on several: docs/multi_host.md

The trainers take turns, so the run is the same each time, and the same, bit for bit, as one process that sees the
batches in that order: the program trains both and compares them.
"""

from __future__ import annotations

import os
import tempfile
import threading

import torch
import torch.multiprocessing
from torch import nn

import farcall

TRAINERS = ("trainer0", "trainer1")
STEPS = 30
WORDS = 50


class Model(nn.Module):
    """Scores bags of words: an embedding too large for the trainers, say, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.EmbeddingBag(WORDS, 16, mode="mean")
        self.score = nn.Linear(16, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.score(self.embedding(words)).squeeze(-1)


def batch(trainer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a trainer sees in a step: words, and the score they should have."""
    generator = torch.Generator().manual_seed(1000 * trainer + step % 5)
    words = torch.randint(WORDS, (16, 5), generator=generator)
    return words, (words.float().mean(1) > WORDS / 2).float()


class Server:
    """At the server: the one model that all trainers share."""

    model: Model | None = None
    lock = threading.Lock()

    @classmethod
    def get(cls) -> farcall.RRef[nn.Module]:
        with cls.lock:
            if cls.model is None:
                cls.model = Model()
        return farcall.RRef(cls.model)


def train(trainer: int) -> list[float]:
    model = farcall.nn.RemoteModule.init_from_module_rref("server", farcall.worker("server").call(Server.get))
    optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=2.0)
    losses = []
    for step in range(STEPS):
        for turn in range(len(TRAINERS)):
            if turn == trainer:
                words, wanted = batch(trainer, step)
                with farcall.autograd.context() as context_id:
                    loss = nn.functional.binary_cross_entropy_with_logits(model(words), wanted)
                    farcall.autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
            farcall.barrier(TRAINERS)
    return losses


def train_alone() -> list[list[float]]:
    """The twin, in one process: the losses of each trainer."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses: list[list[float]] = [[] for _ in TRAINERS]
    for step in range(STEPS):
        for trainer in range(len(TRAINERS)):
            words, wanted = batch(trainer, step)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(words), wanted)
            loss.backward()
            optimizer.step()
            losses[trainer].append(loss.item())
    return losses


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    names = ("server", *TRAINERS)
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank > 0:
        losses = train(rank - 1)
        print(f"{names[rank]}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
        assert losses == train_alone()[rank - 1], "not the losses of one process"
        assert losses[-1] < losses[0]
        print(f"{names[rank]}: the same, bit for bit, as in one process", flush=True)
    farcall.shutdown()  # the server serves in here until all trainers are done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=1 + len(TRAINERS))


if __name__ == "__main__":
    main()
