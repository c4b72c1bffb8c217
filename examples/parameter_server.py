"""A parameter server: one worker owns the model, trainers compute on it and step its optimizer.

    python examples/parameter_server.py

The trainers take turns, so the run is the same each time, and the same, bit for bit, as one process that sees the
batches in that order: the program trains both and compares them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading

import torch
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
    model = farcall.nn.RemoteModule.init_from_module_rref("server", farcall.rpc_sync("server", Server.get))
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
            farcall._barrier(TRAINERS)
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


def run(rank: int, directory: str, losses: multiprocessing.Queue[tuple[int, list[float]]]) -> None:
    names = ("server", *TRAINERS)
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/meeting")
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank > 0:
        losses.put((rank - 1, train(rank - 1)))
    farcall.shutdown()  # the server serves in here until all trainers are done


def main() -> None:
    spawning = multiprocessing.get_context("spawn")
    losses: multiprocessing.Queue[tuple[int, list[float]]] = spawning.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [spawning.Process(target=run, args=(rank, directory, losses)) for rank in range(3)]
        for process in processes:
            process.start()
        found = dict(losses.get(timeout=120) for _ in TRAINERS)
        for process in processes:
            process.join()
            assert process.exitcode == 0
    alone = train_alone()
    for trainer, name in enumerate(TRAINERS):
        print(f"{name}: loss {found[trainer][0]:.4f} at first, {found[trainer][-1]:.4f} at last")
        assert found[trainer] == alone[trainer], "not the losses of one process"
    assert found[0][-1] < found[0][0]
    print("the same, bit for bit, as in one process")


if __name__ == "__main__":
    main()
