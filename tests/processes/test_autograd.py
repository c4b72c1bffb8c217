"""Distributed autograd between real processes: what is recorded, what backward finds, who knows it afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kit.autograd_callees import Held, known, onward, released_everywhere, through_weight
from tests.kit.waiting import PATIENCE_S, wait_until
from torch.utils.checkpoint import checkpoint

import farcall
import farcall.autograd as autograd
from farcall.errors import FunctionNotFound, RpcError
from farcall.options import MemoryOptions
from farcall.testing.cluster import finish, run_cluster, start_processes, temporary_file_url

# ---------------------------------------------------------------------- what the callees run


def unweighted(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def weight_gradient(context_id: int) -> torch.Tensor | None:
    assert Held.weight.grad is None
    return autograd.get_gradients(context_id).get(Held.weight)


def pair_of(x: torch.Tensor) -> dict[str, Any]:
    return {"used": [x * 2], "unused": (x * 3, "text", x.detach()), "again": x * 5}


def current_id() -> int:
    return autograd._current_context()._context_id()


@farcall.functions.async_execution
def later(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return farcall.rpc_async(to, through_weight, (x,)).then(lambda future: through_weight(future.value()))


async def in_coroutine(to: str, x: torch.Tensor) -> torch.Tensor:
    first = await farcall.rpc_async(to, through_weight, (x,))
    await asyncio.sleep(0)
    assert autograd._current_context() is not None
    return through_weight(first)


def twin(x: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of ``times`` passages through a weight, in one process; with the gradients of input and weight."""
    x = x.detach().clone().requires_grad_()
    weight = Held.weight.detach().clone().requires_grad_()
    y = x
    for _ in range(times):
        y = y @ weight
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return y.sum(), x.grad, weight.grad


# ---------------------------------------------------------------------- calls of every kind


let_go = threading.Event()


def wait_until_let_go() -> None:
    assert let_go.wait(PATIENCE_S)
    let_go.clear()


def let_all_go() -> None:
    let_go.set()


def by_callback(make: Callable[[Any], Any], x: torch.Tensor) -> Any:
    """A call that a callback makes, on another thread: its future is not done when the callback is added."""
    future = make(farcall.rpc_async("w1", wait_until_let_go))
    called = future.then(lambda _: farcall.rpc_sync("w1", through_weight, (x,)))
    farcall.rpc_sync("w1", let_all_go)
    return called.wait()


class Derived(torch.Tensor):
    """A class of a program's own. What it takes part in is of this class, too: the call's result as well."""


def one_call_each(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    routes: list[Any] = [
        lambda: farcall.rpc_sync("w1", through_weight, (x,)),
        lambda: farcall.rpc_async("w1", through_weight, (x,)).wait(),
        lambda: farcall.rpc_sync("w0", through_weight, (x,)),
        lambda: farcall.rpc_async("w1", through_weight, kwargs={"x": x}).wait(),
        lambda: farcall.remote("w1", through_weight, (x,)).to_here(),
        lambda: farcall.remote("w0", through_weight, (x,)).to_here(),
        lambda: farcall.remote("w1", torch.nn.Identity).rpc_sync().forward(through_weight(x)),
        lambda: farcall.rpc_sync("w1", through_weight, (x.as_subclass(Derived),)),
        lambda: farcall.rpc_sync("w1", through_weight, ((x * 1).as_subclass(Derived),)),
        lambda: by_callback(farcall.gather, x),
        lambda: by_callback(lambda future: future, x),
        lambda: by_callback(lambda future: future.then(lambda done: done.value()), x),
    ]
    for make in routes:
        with autograd.context() as context_id:
            loss, x_gradient, weight = twin(x, 1)
            got = make().sum()
            torch.testing.assert_close(got, loss)
            autograd.backward(context_id, [got])
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], x_gradient)
            owned = [farcall.rpc_sync(name, weight_gradient, (context_id,)) for name in ("w0", "w1")]
            (only,) = [gradient for gradient in owned if gradient is not None]
            torch.testing.assert_close(only, weight)
            assert x.grad is None
        released_everywhere(context_id, ["w0", "w1"])
    # Outside a context nothing is recorded, and what comes is a leaf.
    plain = farcall.rpc_sync("w1", through_weight, (x,))
    assert plain.requires_grad
    assert plain.is_leaf


def test_each_kind_of_call_carries_gradients() -> None:
    run_cluster(2, one_call_each)


def long_ways(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    for route in (["w2"], ["w0"], ["w1"], ["w2", "w0", "w1", "w2", "w1", "w0"]):
        with autograd.context() as context_id:
            _, x_gradient, weight = twin(x, len(route) + 1)
            loss = farcall.rpc_sync("w1", onward, (route, x)).sum()
            autograd.backward(context_id, [loss])
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], x_gradient)
            found = [farcall.rpc_sync(f"w{other}", weight_gradient, (context_id,)) for other in range(3)]
            total = sum(gradient for gradient in found if gradient is not None)
            torch.testing.assert_close(total, weight)
        released_everywhere(context_id, ["w1", "w2"])
    for call in (later, in_coroutine):
        with autograd.context() as context_id:
            _, x_gradient, _ = twin(x, 2)
            loss = farcall.rpc_sync("w1", call, ("w2", x)).sum()
            autograd.backward(context_id, [loss])
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], x_gradient)
            for other in ("w1", "w2"):
                assert farcall.rpc_sync(other, weight_gradient, (context_id,)) is not None
        released_everywhere(context_id, ["w1", "w2"])


def test_nested_calls_calls_back_and_functions_that_answer_later() -> None:
    run_cluster(3, long_ways)


def unused_results(rank: int) -> None:
    if rank:
        return
    x = torch.rand(3, 3, requires_grad=True)
    with autograd.context() as context_id:
        kept = farcall.rpc_sync("w1", pair_of, (x,))
        never_used = [farcall.rpc_sync("w1", through_weight, (x,)) for _ in range(3)]
        not_waited_for = farcall.rpc_async("w1", onward, (["w0", "w1"], x))
        autograd.backward(context_id, [kept["used"][0].sum()], retain_graph=True)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((3, 3), 2.0))
        assert farcall.rpc_sync("w1", weight_gradient, (context_id,)) is None
        # Once more: gradients add up, and what was not used before may be used now.
        loss = kept["again"].sum() + never_used[0].sum() + not_waited_for.wait().sum()
        autograd.backward(context_id, [loss, kept["unused"][0].sum()], retain_graph=True)
        _, once, _ = twin(x, 1)
        _, thrice, _ = twin(x, 3)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], 10.0 + once + thrice)
        context = autograd._current_context()
        assert context._context_id() == context_id == autograd._retrieve_context(context_id)._context_id()
        assert context._known_worker_ids() == {1}
        assert context._send_functions()
        assert context._recv_functions()
        assert autograd._get_max_id() > context_id
        assert farcall.rpc_sync("w1", current_id) == context_id
        with torch.no_grad():
            with pytest.raises(RpcError, match="in no autograd context"):
                farcall.rpc_sync("w1", current_id)
            assert farcall.rpc_sync("w1", through_weight, (x,)).is_leaf
    released_everywhere(context_id, ["w0", "w1"])


def test_what_does_not_reach_the_loss_is_no_obstacle() -> None:
    run_cluster(2, unused_results)


def only_at_the_caller(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError(x)


def a_function_that_is_not_there(rank: int) -> None:
    if rank:
        del globals()["only_at_the_caller"]
    farcall.barrier(["w0", "w1"])
    if rank:
        return
    x = torch.rand(3, 3, requires_grad=True)
    with autograd.context() as context_id:
        with pytest.raises(FunctionNotFound):
            farcall.rpc_sync("w1", only_at_the_caller, (x,))
        autograd.backward(context_id, [farcall.rpc_sync("w1", unweighted, (x,)).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], x.detach().cos())


def test_a_pass_does_not_wait_for_arguments_that_nobody_read() -> None:
    run_cluster(2, a_function_that_is_not_there, rpc_timeout=20.0)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def special_graph(x: torch.Tensor, way: str) -> torch.Tensor:
    if way == "in place":
        x = x * 1.0
        return x.mul_(Held.weight).add_(1)
    if way == "custom":
        return Tripled.apply(x)
    if way == "checkpoint":
        return checkpoint(through_weight, x, use_reentrant=False)
    if way == "reentrant":
        return checkpoint(through_weight, x, use_reentrant=True)
    if way == "in place of what came":
        return x.mul_(2)
    Held.kept["table"] = torch.arange(12.0).reshape(4, 3).requires_grad_()
    indices = torch.tensor([0, 2, 2])
    return torch.nn.functional.embedding(indices, Held.kept["table"], sparse=True) * x


def table_gradient(context_id: int) -> Any:
    gradient = autograd.get_gradients(context_id)[Held.kept["table"]]
    return gradient.is_sparse, gradient.to_dense()


def special_graphs(rank: int) -> None:
    if rank:
        return
    x = torch.rand(3, 3, requires_grad=True)
    for way in ("in place", "custom", "checkpoint", "reentrant", "in place of what came", "sparse"):
        with autograd.context() as context_id:
            seen: list[torch.Tensor] = []
            y = farcall.rpc_sync("w1", special_graph, (x * 1.0, way))
            y.register_hook(lambda gradient, seen=seen: seen.append(gradient))
            autograd.backward(context_id, [(y * y).sum()])
            got = autograd.get_gradients(context_id)[x]
            alike = x.detach().clone().requires_grad_()
            twin_y = special_graph(alike * 1.0, way)
            (twin_y * twin_y).sum().backward()
            Held.weight.grad = None
            torch.testing.assert_close(got, alike.grad)
            assert len(seen) == 1
            torch.testing.assert_close(seen[0], 2 * y)
            if way == "sparse":
                is_sparse, gradient = farcall.rpc_sync("w1", table_gradient, (context_id,))
                assert is_sparse
                table = Held.kept["table"].grad
                assert table is not None
                torch.testing.assert_close(gradient, table.to_dense())


def test_graphs_of_every_kind() -> None:
    run_cluster(2, special_graphs)


def large_and_shared(rank: int) -> None:
    if rank:
        return
    big = torch.rand(600, 500, requires_grad=True)
    with autograd.context() as context_id:
        views = farcall.rpc_sync("w1", rows_of, (big,))
        autograd.backward(context_id, [(views[0] * 2).sum() + (views[2] * 3).sum()])
        expected = torch.zeros(600, 500)
        expected[0], expected[2] = 2.0, 3.0
        torch.testing.assert_close(autograd.get_gradients(context_id)[big], expected)


def rows_of(big: torch.Tensor) -> list[torch.Tensor]:
    return [big[0], big[1], big[2]]


def test_large_tensors_and_views() -> None:
    run_cluster(2, large_and_shared)
    run_cluster(2, large_and_shared, memory=MemoryOptions(shared_memory=False))


# ---------------------------------------------------------------------- contexts


def many_at_once(rank: int) -> None:
    failures: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(5):
                x = torch.rand(2, 3, generator=generator).requires_grad_()
                route = [f"w{int(hop)}" for hop in torch.randint(3, (3,), generator=generator)]
                with autograd.context() as context_id:
                    loss = farcall.rpc_sync(route[0], onward, (route[1:], x)).sum()
                    _, x_gradient, _ = twin(x, 3)
                    autograd.backward(context_id, [loss])
                    torch.testing.assert_close(autograd.get_gradients(context_id)[x], x_gradient)
                assert not autograd._is_valid_context(context_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(100 * rank + number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    farcall.barrier(["w0", "w1", "w2"])
    wait_until(lambda: autograd._get_debug_info()["num_autograd_contexts"] == "0", "the end of all contexts")
    assert autograd._get_debug_info()["num_current_backward_passes"] == "0"


def test_many_threads_of_many_workers() -> None:
    run_cluster(3, many_at_once)


def full_pool(rank: int) -> None:
    """More contexts than threads for functions, each waiting for others: letters never wait for a thread."""
    many_at_once(rank)


def test_backward_with_one_worker_thread() -> None:
    run_cluster(3, full_pool, num_worker_threads=1)


def wrong_uses(rank: int) -> None:
    if rank:
        return
    with autograd.context() as context_id:
        with pytest.raises(RpcError, match="do not nest"), autograd.context():
            pass
        x = torch.rand(2, 3, requires_grad=True)
        y = farcall.rpc_sync("w1", through_weight, (x,))
        with pytest.raises(RpcError, match="scalar"):
            autograd.backward(context_id, [y])
        with pytest.raises(RpcError, match="requires_grad not set"):
            autograd.backward(context_id, [torch.ones(())])
        with pytest.raises(RpcError, match="empty"):
            autograd.backward(context_id, [])
        with pytest.raises(TypeError):
            autograd.backward(context_id, y.sum())  # type: ignore[arg-type]
        with pytest.raises(RpcError, match="Could not find"):
            autograd.backward(context_id + 1, [y.sum()])
        with pytest.raises(RuntimeError, match=r"autograd\.backward"):
            y.sum().backward(retain_graph=True)
        autograd.backward(context_id, [y.sum()])
        with pytest.raises(RpcError, match="second time"):
            autograd.backward(context_id, [y.sum()])
    for use in (autograd.get_gradients, autograd._retrieve_context, autograd._release_context):
        with pytest.raises(RpcError, match="Could not find"):
            use(context_id)
    with pytest.raises(RpcError, match="in no autograd context"):
        autograd._current_context()
    opened = autograd._new_context()
    farcall.rpc_sync("w1", through_weight, (x,))
    assert farcall.rpc_sync("w1", known, (opened._context_id(),))
    autograd._release_context(opened._context_id())
    released_everywhere(opened._context_id(), ["w0", "w1"])


def test_wrong_uses_say_what_is_wrong() -> None:
    run_cluster(2, wrong_uses)


def references(rank: int) -> None:
    if rank:
        return
    with autograd.context() as context_id:
        x = torch.rand(2, 3, requires_grad=True)
        rref = farcall.remote("w1", through_weight, (x,))
        # A chain of references over two workers, the loss at the far end.
        there = farcall.remote("w2", through_reference, (rref,))
        loss = farcall.remote("w2", sum_of, (there,))
        loss.backward(context_id)
        _, x_gradient, _ = twin(x, 2)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], x_gradient)
        assert farcall.rpc_sync("w1", weight_gradient, (context_id,)) is not None
    released_everywhere(context_id, ["w1", "w2"])


def through_reference(rref: Any) -> torch.Tensor:
    return through_weight(rref.to_here())


def sum_of(rref: Any) -> torch.Tensor:
    return rref.to_here().sum()


def test_references_and_a_root_elsewhere() -> None:
    run_cluster(3, references)


def left_open(rank: int) -> None:
    autograd._new_context()
    other = f"w{1 - rank}"
    x = torch.rand(2, 3, requires_grad=True)
    farcall.rpc_sync(other, through_weight, (x,))
    Held.kept["result"] = farcall.rpc_sync(other, through_weight, (x,))


def test_a_context_left_open_does_not_keep_a_node_from_leaving() -> None:
    run_cluster(2, left_open)


class HeldUp(torch.autograd.Function):
    """Its backward takes until this worker is shutting down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Held.in_backward.set()
        node = farcall.api.current_runtime()
        wait_until(lambda: node.leaving.entered, "shutdown to begin")
        return gradient


def shut_down_during_backward(rank: int, url: str) -> list[Exception]:
    options = farcall.RpcBackendOptions(init_method=url)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    failures: list[Exception] = []

    def train() -> None:
        try:
            with autograd.context() as context_id:
                y = farcall.rpc_sync("w1", through_weight, (torch.ones(3, 3),))
                autograd.backward(context_id, [HeldUp.apply(y).sum()])  # type: ignore[no-untyped-call]
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    if not rank:
        thread.start()
        assert Held.in_backward.wait(PATIENCE_S)
    farcall.shutdown()
    if not rank:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return failures


def test_shutdown_waits_for_a_backward_pass() -> None:
    assert finish(start_processes(2, shut_down_during_backward, temporary_file_url())) == [[], []]
