"""DistributedDataParallel in a context: dense layers replicated on trainers, an embedding on a parameter server."""

from __future__ import annotations

import gc
import tempfile
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farcall
import farcall.autograd as autograd
from farcall.optim import DistributedOptimizer
from farcall.testing.cluster import run_cluster

TRAINERS = 2
STEPS = 3


def make_dense() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


class Table:
    """The embedding, at the server."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.rand(6, 4))

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(indices, self.weight)

    def parameter(self) -> Any:
        return farcall.RRef(self.weight)

    def value(self) -> torch.Tensor:
        return self.weight.detach()


class Server:
    table: Table | None = None
    lock = threading.Lock()

    @classmethod
    def get(cls) -> Any:
        with cls.lock:
            cls.table = cls.table or Table()
        return farcall.RRef(cls.table)


def indices_of(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank, (rank + step) % 6, 3])


class Derived(DistributedDataParallel):
    """Many programs have such a class."""


def train(rank: int, store: str) -> dict[str, Any] | None:
    if rank >= TRAINERS:
        return None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TRAINERS)
    try:
        table = farcall.rpc_sync(f"w{TRAINERS}", Server.get)
        dense = Derived(make_dense())
        gc.freeze()  # before the first context; from here on the garbage collector does not list the replica
        rrefs = [farcall.RRef(parameter) for parameter in dense.parameters()]
        mine = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        gradients: list[torch.Tensor] = []
        table_gradients: list[torch.Tensor] = []
        for step in range(STEPS):
            with autograd.context() as context_id:
                looked_up = table.rpc_sync().look_up(indices_of(rank, step))
                loss = dense(looked_up).sum()
                autograd.backward(context_id, [loss])
                found = autograd.get_gradients(context_id)
                gradients += [found[parameter].clone() for parameter in dense.parameters()]
                table_gradients.append(farcall.rpc_sync(f"w{TRAINERS}", table_gradient, (context_id,)))
                assert all(parameter.grad is None for parameter in dense.parameters())
                mine.step(context_id)
        # As lists: multiprocessing would have this process serve tensors after its end.
        return {
            "gradients": [gradient.tolist() for gradient in gradients],
            "table": [gradient.tolist() for gradient in table_gradients],
        }
    finally:
        dist.destroy_process_group()


def table_gradient(context_id: int) -> torch.Tensor:
    assert Server.table is not None
    return autograd.get_gradients(context_id)[Server.table.weight]


def test_the_context_holds_what_the_trainers_agreed_on() -> None:
    with tempfile.TemporaryDirectory() as directory:
        first, second, _ = run_cluster(TRAINERS + 1, train, f"{directory}/store")
    dense, table = make_dense(), Table()
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    place = 0
    for step in range(STEPS):
        wanted = [torch.zeros_like(parameter) for parameter in dense.parameters()]
        for rank, trainer in enumerate((first, second)):
            optimizer.zero_grad()
            table.weight.grad = None
            dense(table.look_up(indices_of(rank, step))).sum().backward()
            for total, parameter in zip(wanted, dense.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad / TRAINERS
            # The embedding's gradient is this trainer's own: its context is.
            torch.testing.assert_close(torch.tensor(trainer["table"][step]), table.weight.grad)
        for parameter, total in zip(dense.parameters(), wanted, strict=True):
            torch.testing.assert_close(torch.tensor(first["gradients"][place]), total)
            assert first["gradients"][place] == second["gradients"][place]
            parameter.grad = total
            place += 1
        optimizer.step()
