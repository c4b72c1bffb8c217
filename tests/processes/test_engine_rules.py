"""Backward functions across workers are called as torch's engine calls them: which, in which order, with what."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import farcall
import farcall.autograd as autograd
from farcall.testing.cluster import run_cluster


class Calls:
    """Backward functions called at this worker, in order; and values that it keeps."""

    noted: ClassVar[list[str]] = []
    kept: ClassVar[dict[str, torch.Tensor]] = {}


class Fork(torch.autograd.Function):
    """Its input, and an empty tensor that orders what is computed from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.detach() + 0, torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
        Calls.noted.append("fork")
        return gradient


class Recompute(torch.autograd.Function):
    """What checkpointing in a pipeline does: nothing but to be called at the right time."""

    @staticmethod
    def forward(ctx: Any, phony: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        Calls.noted.append("recompute")
        return None, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
        return x.detach() + 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Calls.noted.append("join")
        return gradient, None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Calls.noted.append("twice")
        return gradient * 2


def keep(x: torch.Tensor, returns: bool) -> torch.Tensor | None:
    Calls.kept["y"] = x * 2
    return Calls.kept["y"] if returns else None


def recomputed(t: torch.Tensor) -> torch.Tensor:
    a, phony = Fork.apply(Calls.kept["y"])
    result: torch.Tensor = Join.apply(a, Recompute.apply(phony, Calls.kept["y"])) * t
    return result


def twice(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Twice.apply(x)
    return result


def noted() -> list[str]:
    found, Calls.noted[:] = list(Calls.noted), []
    return found


def orders_by_undefined_gradients(rank: int, returns: bool) -> None:
    """Where the value that is kept there also came here, its gradient is whole only after that call's other input's."""
    if rank:
        return
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = farcall.rpc_sync("w1", keep, (x, returns))
        z = farcall.rpc_sync("w1", recomputed, (y if returns else x * 2,))
        autograd.backward(context_id, [z.sum()])
        gradients = autograd.get_gradients(context_id)
    assert farcall.rpc_sync("w1", noted) == ["join", "recompute", "fork"]
    assert torch.equal(gradients[x], torch.full((2,), 8.0))


@pytest.mark.parametrize("returns", [True, False])
def test_an_undefined_gradient_does_not_stop_a_node(returns: bool) -> None:
    run_cluster(2, orders_by_undefined_gradients, returns)


def crosses_undefined(rank: int) -> None:
    """The tensor that came from w1 gets an undefined gradient here: the function behind it is called there."""
    if rank:
        return
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = farcall.rpc_sync("w1", twice, (x,))
        unused = farcall.rpc_sync("w1", twice, (x,))
        autograd.backward(context_id, [Join.apply(w * 1, Recompute.apply(y, y)).sum()])
        gradients = autograd.get_gradients(context_id)
    assert noted() == ["join", "recompute"]
    assert farcall.rpc_sync("w1", noted) == ["twice"]  # and not for what no path leads to
    assert unused.requires_grad
    assert torch.equal(gradients[x], torch.zeros(2))  # torch fills in zeros for a function in Python
    assert torch.equal(gradients[w], torch.ones(2))


def test_an_undefined_gradient_crosses_workers() -> None:
    run_cluster(2, crosses_undefined)


def keeps_what_it_relays(rank: int) -> None:
    """Without any hook in the process: gradients of tensors that are only passed on do not go through the engine."""
    if rank:
        return
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        y = farcall.rpc_sync("w1", torch.mul, (x, 2))
        z = farcall.rpc_sync("w1", torch.mul, (y, 3))
        y.retain_grad()
        autograd.backward(context_id, [farcall.rpc_sync("w1", torch.mul, (z, 5)).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 30.0))
    assert y.grad is not None
    assert torch.equal(y.grad, torch.full((2,), 15.0))


def test_a_tensor_that_is_only_passed_on_keeps_its_gradient_if_asked_to() -> None:
    run_cluster(2, keeps_what_it_relays)
