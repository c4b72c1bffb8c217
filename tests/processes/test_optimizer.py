"""`DistributedOptimizer` against torch's own, and what it says when workers fail."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch

import farcall
import farcall.autograd as autograd
from farcall.errors import RpcError
from farcall.optim import DistributedOptimizer
from farcall.testing.cluster import run_cluster


class Layer:
    """One weight, on some worker."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.rand(3, 3))
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()

    def parameters(self) -> list[Any]:
        return [farcall.RRef(self.weight), farcall.RRef(self.unused)]

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.weight.grad is None
        return self.weight.detach(), self.unused.detach()

    def set_gradient(self, value: float) -> None:
        self.weight.grad = torch.full((3, 3), value)

    def gradient(self) -> torch.Tensor | None:
        return self.weight.grad


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.05}),
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adamax, {}),
    (torch.optim.Rprop, {}),
]


def every_class(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3)
    for optimizer_class, options in CLASSES:
        layers = [farcall.remote(f"w{1 + number}", Layer, (number,)) for number in range(2)]
        twins = [Layer(number) for number in range(2)]
        rrefs = [rref for layer in layers for rref in layer.rpc_sync().parameters()]
        optimizer = DistributedOptimizer(optimizer_class, rrefs, **options)
        twin = optimizer_class([p for layer in twins for p in (layer.weight, layer.unused)], **options)
        for _ in range(4):
            with autograd.context() as context_id:
                y = x
                for layer in layers:
                    y = layer.rpc_sync().forward(y)
                autograd.backward(context_id, [y.sum()])
                optimizer.step(context_id)
            twin.zero_grad()
            twins[1].forward(twins[0].forward(x)).sum().backward()
            twin.step()
        twin.zero_grad()
        for layer, other in zip(layers, twins, strict=True):
            for got, wanted in zip(layer.rpc_sync().values(), other.values(), strict=True):
                assert torch.equal(got, wanted), optimizer_class


def test_every_class_does_what_it_does_in_one_process() -> None:
    run_cluster(3, every_class)


def groups_and_grad(rank: int) -> None:
    if rank:
        return
    layer = farcall.remote("w1", Layer, (0,))
    mine = Layer(1)
    weight, unused = layer.rpc_sync().parameters()
    optimizer = DistributedOptimizer(
        torch.optim.SGD,
        [{"params": [weight, farcall.RRef(mine.weight)], "lr": 0.5}, {"params": [unused], "lr": 1.0}],
        lr=0.1,
    )
    layer.rpc_sync().set_gradient(7.0)
    before = layer.rpc_sync().forward(torch.eye(3)).atanh()
    with autograd.context() as context_id:
        layer.rpc_sync().forward(torch.eye(3))
        autograd.backward(context_id, [mine.forward(torch.eye(3)).sum()])
        optimizer.step(context_id)
    # The remote weight had no gradient in the context, whatever its .grad says, which is still there.
    torch.testing.assert_close(layer.rpc_sync().forward(torch.eye(3)).atanh(), before)
    torch.testing.assert_close(layer.rpc_sync().gradient(), torch.full((3, 3), 7.0))
    torch.testing.assert_close(mine.weight, Layer(1).weight - 0.5 * (1 - Layer(1).forward(torch.eye(3)) ** 2))


def test_groups_and_an_untouched_grad() -> None:
    run_cluster(2, groups_and_grad)


def no_gradients(rank: int) -> None:
    if rank:
        return
    layers = [farcall.remote(f"w{1 + number}", Layer, (number,)) for number in range(2)]
    for owners in (layers[:1], layers):
        rrefs = [rref for layer in owners for rref in layer.rpc_sync().parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        layers[0].rpc_sync().forward(torch.eye(3)).sum().backward()  # outside of a context: it ends here
        with autograd.context() as context_id:
            with pytest.warns(
                UserWarning, match="changed nothing: no parameter has a gradient in this context"
            ) as told:
                optimizer.step(context_id)
            assert [warning.filename for warning in told] == [__file__]
            optimizer.step(context_id)  # once: warnings are errors in tests


def test_a_step_that_finds_no_gradient_at_all_says_so_once() -> None:
    run_cluster(3, no_gradients)


class Failing(torch.optim.Optimizer):
    """Fails where, and as, it is told."""

    def __init__(self, params: Any, making: list[str], stepping: list[str]) -> None:
        super().__init__(params, {})
        self.stepping = stepping
        if farcall.get_worker_info().name in making:
            raise ValueError("Error creating optimizer.")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if farcall.get_worker_info().name in self.stepping:
            raise ValueError("Error running optimizer.")
        Stepped.count += 1


class Stepped:
    count: ClassVar[int] = 0

    @classmethod
    def get(cls) -> int:
        return cls.count


def failures(rank: int) -> None:
    if rank:
        return
    layers = [farcall.remote(f"w{1 + number}", Layer, (number,)) for number in range(3)]
    rrefs = [layer.rpc_sync().parameters()[0] for layer in layers]
    with pytest.raises(ValueError, match=r"Error creating optimizer\.") as caught:
        DistributedOptimizer(Failing, rrefs, making=["w1", "w3"], stepping=[])
    assert "on 2 of 3 workers: w1 (ValueError" in caught.value.__notes__[-1]
    assert "w3 (ValueError" in caught.value.__notes__[-1]
    optimizer = DistributedOptimizer(Failing, rrefs, making=[], stepping=["w2"])
    with autograd.context() as context_id:
        with pytest.raises(ValueError, match=r"Error running optimizer\.") as caught:
            optimizer.step(context_id)
        assert "on 1 of 3 workers: w2 (ValueError" in caught.value.__notes__[-1]
    assert [farcall.rpc_sync(f"w{other}", Stepped.get) for other in (1, 2, 3)] == [1, 0, 1]
    with pytest.raises(RpcError, match="Could not find autograd context"):
        optimizer.step(context_id)
    with pytest.raises(ValueError, match="empty"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with pytest.raises(TypeError, match=r"farcall.RRef\), not Parameter"):
        DistributedOptimizer(torch.optim.SGD, [torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="not both"):
        DistributedOptimizer(torch.optim.SGD, [rrefs[0], {"params": rrefs[1:]}], lr=0.1)


def test_errors_of_all_workers_are_collected() -> None:
    run_cluster(4, failures)


class Watched(torch.optim.SGD):
    """Notices when two steps overlap."""

    inside: ClassVar[int] = 0
    overlaps: ClassVar[int] = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        cls = type(self)
        cls.inside += 1
        cls.overlaps += cls.inside > 1
        threading.Event().wait(0.001)  # lets others run, so that an overlap would show
        result = super().step(closure)
        cls.inside -= 1
        return result

    @classmethod
    def seen(cls) -> int:
        return cls.overlaps


def at_once(rank: int) -> None:
    if rank:
        return
    layer = farcall.remote("w1", Layer, (0,))
    rrefs = layer.rpc_sync().parameters()
    optimizers = [DistributedOptimizer(Watched, rrefs, lr=0.1) for _ in range(2)]
    failed: list[BaseException] = []

    def train(number: int) -> None:
        try:
            for _ in range(5):
                with autograd.context() as context_id:
                    loss = layer.rpc_sync().forward(torch.eye(3)).sum()
                    autograd.backward(context_id, [loss])
                    optimizers[number % 2].step(context_id)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert farcall.rpc_sync("w1", Watched.seen) == 0
    assert layer.rpc_sync().gradient() is None


def test_steps_at_the_same_time_come_one_after_the_other() -> None:
    run_cluster(2, at_once)
