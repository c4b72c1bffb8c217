"""Replicated modules in a context, reduced by a hook that halves and communicates nothing."""

import gc
from collections import OrderedDict
from collections.abc import Iterator
from itertools import permutations
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from tests.unit.autograd.cluster import Network
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from farcall.autograd import replicas
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


class Derived(DistributedDataParallel):
    """Many programs have such a class."""


@pytest.fixture
def not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has neither called init_rpc nor installed farcall."""
    monkeypatch.setattr(torch.nn.modules.module, "_global_module_registration_hooks", OrderedDict())
    monkeypatch.setattr(replicas, "REPLICAS", WeakKeyDictionary())
    monkeypatch.setattr(replicas, "_is_watching", False)
    monkeypatch.setattr(replicas, "_may_miss", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the tests' own process is frozen


@pytest.mark.usefixtures("two_ranks", "not_begun")
def test_modules_built_before_are_found_in_one_order_whatever_the_collector_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each collection moves objects, and no two ranks collect at the same moments."""
    built = [
        DistributedDataParallel(torch.nn.Linear(3, 1)),
        Derived(torch.nn.Linear(2, 1)),
        Derived(torch.nn.Linear(3, 1)),  # only its values differ from those of the first
    ]
    orders = []
    for listed in permutations(built):
        monkeypatch.setattr(gc, "get_objects", lambda *_, listed=listed: list(listed))
        replicas.REPLICAS.clear()
        Network(1)  # init_rpc
        orders.append([built.index(one) for one in replicas.REPLICAS])
    assert sorted(orders[0]) == [0, 1, 2]
    assert all(order == orders[0] for order in orders)


@pytest.mark.usefixtures("two_ranks", "not_begun")
def test_a_module_that_could_not_be_built_hinders_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of its error may keep it for long; another thread may be building one, too."""

    def fail(*_: Any) -> None:
        raise RuntimeError("another rank has other shapes")

    network = Network(1)
    model = torch.nn.Linear(3, 1)
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "_verify_param_shape_across_processes", fail)
        with pytest.raises(RuntimeError, match="other shapes") as kept:
            Derived(model)
    context = network.workers[0].new_context()
    network.workers[0].backward(context.id, [model(torch.ones(3)).sum()])
    assert torch.equal(network.workers[0].get_gradients(context.id)[model.weight], torch.ones(1, 3))
    network.workers[0].release(context.id)
    del kept


@pytest.mark.usefixtures("two_ranks", "not_begun")
def test_modules_built_after_are_noted_at_once() -> None:
    network = Network(1)
    built = Derived(torch.nn.Linear(3, 1))
    assert built in replicas.REPLICAS
    replicas.REPLICAS.clear()  # as if no hook had seen it: a copy, say
    network.workers[0].admit(1, 0)  # the first context
    assert built in replicas.REPLICAS


@pytest.mark.usefixtures("two_ranks", "not_begun")
def test_of_what_may_be_frozen_the_first_context_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    network = Network(2)
    assert not caplog.records
    for worker in network.workers:
        worker.release(worker.new_context().id)
    assert ["gc.freeze" in text for text in caplog.messages] == [True]


@pytest.mark.usefixtures("not_begun")
def test_what_was_frozen_before_there_was_a_process_group_is_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    network = Network(1)
    network.workers[0].release(network.workers[0].new_context().id)
    assert not caplog.records
