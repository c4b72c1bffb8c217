"""Several trainers, one model: a step of one between forward and backward of another."""

from __future__ import annotations

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


def test_the_error_of_a_model_that_is_not_shared_says_what_to_do() -> None:
    run_cluster(2, train_unshared)
