"""Replicated modules in a context, reduced by a hook that halves and communicates nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.autograd.cluster import Network
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from farcall.errors import RpcError


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


# torch compares the hook's annotations with real classes: no deferred annotations in this file.
def replicated(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    def halve(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    replica = DistributedDataParallel(module, **options)
    replica.register_comm_hook(None, halve)
    return replica


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_the_context_holds_reduced_gradients(options: dict[str, Any]) -> None:
    network = Network(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    replica = replicated(model, **options)
    mine = torch.rand(3, requires_grad=True)
    # With views of buckets, DistributedDataParallel moves a .grad it finds into them: nothing to keep there.
    before = None if "gradient_as_bucket_view" in options else torch.ones(3, 3)
    model[0].weight.grad = before
    for _ in range(3):
        context = network.workers[0].new_context()
        (there,) = network.move(context.id, 0, 1, [mine])
        (back,) = network.move(context.id, 1, 0, [there * 2])
        network.workers[0].backward(context.id, [replica(back).sum()])
        found = network.workers[0].get_gradients(context.id)
        wanted = torch.autograd.grad(model(mine * 2).sum(), [mine, *model.parameters()])
        torch.testing.assert_close(found[mine], wanted[0])
        for parameter, gradient in zip(model.parameters(), wanted[1:], strict=True):
            torch.testing.assert_close(found[parameter], gradient / 2)
        network.workers[0].release(context.id)
    assert model[0].weight.grad is before
    assert model[1].weight.grad is None


@pytest.mark.usefixtures("two_ranks")
def test_without_synchronisation_nothing_is_reduced() -> None:
    network = Network(1)
    replica = DistributedDataParallel(torch.nn.Linear(3, 1))
    context = network.workers[0].new_context()
    with replica.no_sync():
        network.workers[0].backward(context.id, [replica(torch.ones(3)).sum()])
    found = network.workers[0].get_gradients(context.id)
    assert torch.equal(found[replica.module.weight], torch.ones(1, 3))


@pytest.mark.usefixtures("two_ranks")
def test_a_static_graph_is_refused() -> None:
    network = Network(1)
    replica = replicated(torch.nn.Linear(3, 1), static_graph=True)
    context = network.workers[0].new_context()
    with pytest.raises(RpcError, match="static_graph"):
        network.workers[0].backward(context.id, [replica(torch.ones(3)).sum()])


@pytest.mark.usefixtures("two_ranks")
def test_a_module_built_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from farcall.autograd import replicas

    monkeypatch.setattr(replicas, "_note", lambda *_: None)
    replica = DistributedDataParallel(torch.nn.Linear(3, 1))
    replicas.REPLICAS.pop(replica, None)
    monkeypatch.setattr(replicas, "_is_watching", False)
    Network(1).workers[0].admit(1)  # the first context
    assert replica in replicas.REPLICAS
