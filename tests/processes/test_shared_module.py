"""Several trainers, one model: a step of one between forward and backward of another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import farcall
from farcall.testing.cluster import run_cluster


class Model(nn.Module):
    """Two layers: the gradient of the first depends on the weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def make_shared() -> nn.Module:
    return farcall.nn.Shared(Model())


def gradients_here(context_id: int, module: farcall.RRef[nn.Module]) -> list[torch.Tensor]:
    found = farcall.autograd.get_gradients(context_id)
    return [found[weight] for weight in module.local_value().parameters()]


def train_once(model: farcall.nn.RemoteModule, optimizer: farcall.optim.DistributedOptimizer) -> None:
    with farcall.autograd.context() as context_id:
        farcall.autograd.backward(context_id, [model(torch.ones(4, 2)).sum()])
        optimizer.step(context_id)


def step_in_between(make: Callable[[], nn.Module]) -> list[torch.Tensor]:
    """The gradients of a pass whose model another trainer has stepped after the forward."""
    model = farcall.nn.RemoteModule("w1", make)
    optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.5)
    with farcall.autograd.context() as first:
        loss = model(torch.ones(4, 2)).sum()
        with ThreadPoolExecutor(1) as other_trainer:
            other_trainer.submit(train_once, model, optimizer).result()
        farcall.autograd.backward(first, [loss])
        return farcall.rpc_sync("w1", gradients_here, (first, model.module_rref))


def train_shared(rank: int) -> None:
    if rank == 0:
        alone = Model()
        alone(torch.ones(4, 2)).sum().backward()
        for gradient, weight in zip(step_in_between(make_shared), alone.parameters(), strict=True):
            torch.testing.assert_close(gradient, weight.grad)


def train_unshared(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            step_in_between(Model)
        assert any("farcall.nn.Shared(model)" in note for note in caught.value.__notes__)


def test_a_shared_model_has_the_gradients_of_its_own_forward() -> None:
    run_cluster(2, train_shared)


class Meeting(nn.Module):
    """Two forward passes are inside of it at the same time."""

    both = threading.Barrier(2)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.both.wait(60)
        y = self.inner(x)
        self.both.wait(60)
        return y  # type: ignore[no-any-return]


class Holder:
    """A shared module at its worker, and whether its weights are still its own."""

    def __init__(self) -> None:
        self.model = farcall.nn.Shared(Meeting())
        self.weights = list(self.model.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def is_intact(self) -> bool:
        return all(mine is now for mine, now in zip(self.weights, self.model.parameters(), strict=True))


def overlap(rank: int) -> None:
    if rank == 0:
        holder = farcall.remote("w1", Holder)
        for future in [holder.rpc_async().forward(torch.ones(1, 1)) for _ in range(2)]:
            future.wait()
        assert holder.rpc_sync().is_intact()


def test_passes_that_overlap_leave_the_weights_in_their_place() -> None:
    """`torch.func.functional_call` does not: the model would learn nothing from then on, without an error."""
    run_cluster(2, overlap)


def use_every_kind(rank: int) -> None:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    for module in (nn.LSTM(2, 3), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False), tied):
        x = torch.rand(4, 2)
        results = [
            used(x)[0] if isinstance(module, nn.LSTM) else used(x) for used in (module, farcall.nn.Shared(module))
        ]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(result.sum(), list(module.parameters())) for result in results]
        torch.testing.assert_close(*gradients)


def test_modules_of_all_kinds_can_be_shared() -> None:
    run_cluster(1, use_every_kind)


def test_the_error_of_a_model_that_is_not_shared_says_what_to_do() -> None:
    run_cluster(2, train_unshared)
