"""Hyper-parameter search over references: every trial is an object on some worker, the master only holds references.

    python examples/hyperparameter_search.py

Successive halving: all trials train for a while, all workers at once; the worse half is given up; the rest goes on. A
trial keeps its model, its optimizer and its data where it is: only scores travel. Giving one up means to drop the
reference to it: farcall frees the object on its worker by itself, and the program checks that. At the end the
winner's weights are fetched, through its reference.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from time import monotonic, sleep
from typing import Any, ClassVar

import torch
import torch.multiprocessing
from torch import nn

import farcall

WORKERS = ("worker0", "worker1")
LEARNING_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
WIDTHS = (4, 32)
STEPS_A_ROUND = 30


class Trial:
    """One choice of hyper-parameters, at its worker."""

    alive: ClassVar[weakref.WeakSet[Trial]] = weakref.WeakSet()

    def __init__(self, learning_rate: float, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.x = torch.rand(256, 2) * 4 - 2
        self.wanted = torch.sin(self.x[:, :1] * self.x[:, 1:])
        Trial.alive.add(self)

    def train(self, steps: int) -> float:
        """Train on; the loss."""
        loss = torch.tensor(0.0)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(self.x), self.wanted)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def count_trials() -> int:
    """At a worker: how many trials there are."""
    return len(Trial.alive)


def search() -> None:
    choices = [(learning_rate, width) for learning_rate in LEARNING_RATES for width in WIDTHS]
    # Created wherever there is room, here in turn; `remote` returns at once, so they are all created together.
    trials: dict[tuple[float, int], Any] = {
        choice: farcall.worker(WORKERS[number % len(WORKERS)]).create(Trial, *choice)
        for number, choice in enumerate(choices)
    }
    round_number = 0
    while len(trials) > 1:
        round_number += 1
        futures = {choice: trial.start.train(STEPS_A_ROUND) for choice, trial in trials.items()}
        losses = {choice: future.wait() for choice, future in futures.items()}
        best_first = sorted(losses, key=lambda choice: losses[choice])
        for learning_rate, width in best_first:
            loss = losses[learning_rate, width]
            print(f"round {round_number}: learning rate {learning_rate:g}, width {width}: loss {loss:.4f}", flush=True)
        for choice in best_first[len(best_first) // 2 :]:
            del trials[choice]  # the last reference to it
    [(choice, winner)] = trials.items()
    weights = winner.call.weights()
    numbers = sum(weight.numel() for weight in weights.values())
    print(f"the best: learning rate {choice[0]:g}, width {choice[1]}; its {numbers} weights are here now", flush=True)
    left = wait_until_one_is_left()
    print(f"trials left on the workers: {left}", flush=True)


def wait_until_one_is_left() -> int:
    """Freeing takes a moment: nobody waits for it, unless they want to see it."""
    give_up_at = monotonic() + 30.0
    while (left := sum(farcall.worker(worker).call(count_trials) for worker in WORKERS)) > 1:
        assert monotonic() < give_up_at, f"{left} trials were not freed"
        sleep(0.01)
    return left


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    torch.set_num_threads(1)  # the workers share this machine
    names = ("master", *WORKERS)
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        search()
    farcall.shutdown()  # the workers serve in here until the master is done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=1 + len(WORKERS))


if __name__ == "__main__":
    main()
