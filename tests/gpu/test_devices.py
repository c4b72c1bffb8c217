"""Tensors on a GPU between two processes: maps, ways, streams, references, gradients, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, SLOW_CYCLES, echo, lent, share, slowly_filled, total
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as autograd
from farcall.errors import PeerDead, RpcTimeout, SerializationError
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer
from farcall.options import MemoryOptions
from farcall.runtime.node import current_runtime, runtime_of
from farcall.testing.cluster import finish, run_cluster, start_cluster, start_processes, temporary_file_url


def described(x: torch.Tensor) -> tuple[Any, ...]:
    return str(x.device), x.dtype, tuple(x.shape), x.requires_grad, x.to_dense().cpu().resolve_conj().resolve_neg()


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return first[:4] == second[:4] and torch.equal(first[4], second[4])


def describe_all(values: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [described(value) for value in values]


def kinds() -> list[torch.Tensor]:
    base = torch.arange(4 * MEBIBYTE, device=CUDA, dtype=torch.float32).view(2048, 2048)
    return [
        torch.tensor(3.5, device=CUDA),
        torch.arange(10, device=CUDA, dtype=torch.int16),
        torch.empty(0, 3, device=CUDA),
        base[:, 5],
        base[100:110],
        base.t(),
        torch.ones(3, 1, device=CUDA).expand(3, 1000),
        torch.randn(300, dtype=torch.complex64, device=CUDA).conj(),
        torch.randn(300, dtype=torch.complex64, device=CUDA).conj().imag,
        torch.randn(MEBIBYTE, device=CUDA).bfloat16(),
        torch.rand(70_000, device=CUDA) > 0.5,
        torch.eye(50, device=CUDA).to_sparse(),
        torch.nn.Parameter(torch.randn(7, device=CUDA)),
        torch.randn(9, device=CUDA, requires_grad=True),
    ]


def all_kinds(rank: int, shared: bool) -> None:
    if rank:
        return
    if shared:
        share("w1")
    for _ in range(2):
        values = kinds()
        there = farcall.rpc_sync("w1", describe_all, args=(values,))
        back = farcall.rpc_sync("w1", echo, args=tuple(values))
        for value, seen, returned in zip(values, there, back, strict=True):
            assert same(described(value), seen), value
            assert same(described(value), described(returned)), value
            assert type(returned) is type(value)


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_of_all_kinds_go_both_ways(shared: bool) -> None:
    run_cluster(2, all_kinds, shared, memory=MemoryOptions(device_sharing=shared), **MAPS)


def test_over_tcp() -> None:
    run_cluster(2, all_kinds, False, memory=MemoryOptions(device_sharing=False), transports=["tcp"], **MAPS)


called = threading.Event()


def note_called() -> None:
    called.set()


def newcomer(rank: int, url: str) -> None:
    options = farcall.RpcBackendOptions(init_method=url, device_maps={"w0": {0: 0}, "w1": {0: 0}})
    with farcall.Node(f"w{rank}", rank, options=options) as node:
        other = f"w{1 - rank}"
        wait_until(lambda: len(node.workers()) == 2)
        for size in (10, MEBIBYTE):
            (back,) = node.rpc_sync(other, echo, (torch.full((size,), rank, device=CUDA),))
            assert (back == rank).all()
        node.rpc_sync(other, note_called)
        assert called.wait(60.0), "a group without a fixed size lets its members go: the other one would call nobody"


def test_members_that_join_bring_their_maps() -> None:
    finish(start_processes(2, newcomer, temporary_file_url()))


def test_two_members_of_one_process() -> None:
    """Which cannot open their own memory: the driver says so, and the tensors go through the host."""
    finish(start_processes(1, both_members, temporary_file_url()))


def both_members(rank: int, url: str) -> None:
    maps = {"w0": {0: 0}, "w1": {0: 0}}
    with ExitStack() as stack:
        nodes = [
            farcall.Node(f"w{number}", number, options=farcall.RpcBackendOptions(init_method=url, device_maps=maps))
            for number in range(2)
        ]
        for node in nodes:
            node.start()
            stack.callback(node.shutdown, False)
        wait_until(lambda: len(nodes[0].workers()) == 2)
        x = torch.arange(MEBIBYTE, device=CUDA)

        def is_refused() -> bool:
            (back,) = nodes[0].rpc_sync("w1", echo, (x,))
            assert torch.equal(back, x)
            return runtime_of(nodes[0]).peer("w1").devices._ways.get(0) is False

        wait_until(is_refused)


def are_views(first: torch.Tensor, second: torch.Tensor) -> bool:
    first.fill_(7)
    return bool((second == 7).all()) and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def views(rank: int) -> None:
    if rank:
        return
    for _ in range(2):
        base = torch.zeros(100_000, device=CUDA)
        assert farcall.rpc_sync("w1", are_views, args=(base[:70_000], base[60_000:70_000]))
        assert not base.any(), "the callee has a copy"
        share("w1")


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    run_cluster(2, views, **MAPS)


def large(rank: int) -> None:
    if rank:
        return
    x = torch.randint(0, 255, (100 * MEBIBYTE + 3,), device=CUDA, dtype=torch.uint8)
    (back,) = farcall.rpc_sync("w1", echo, args=(x,))
    assert torch.equal(x, back)
    assert current_runtime().devices is not None
    assert current_runtime().devices.stats().total == 0, "nothing was shared"


def test_large_tensors_go_through_the_host_in_chunks() -> None:
    run_cluster(2, large, memory=MemoryOptions(device_sharing=False), **MAPS)


def beyond_limit(rank: int) -> None:
    if rank:
        return
    share("w1")
    x = torch.randint(0, 255, (300 * MEBIBYTE,), device=CUDA, dtype=torch.uint8)
    (back,) = farcall.rpc_sync("w1", echo, args=(x,))
    assert torch.equal(x, back)
    assert current_runtime().devices.stats().total <= 128 * MEBIBYTE  # type: ignore[union-attr]


def test_what_the_pool_has_no_room_for_goes_through_the_host() -> None:
    run_cluster(2, beyond_limit, memory=MemoryOptions(device_memory_limit_bytes=128 * MEBIBYTE), **MAPS)


def values_stay(rank: int) -> None:
    if rank:
        return
    share("w1")
    futures = []
    x = torch.zeros(MEBIBYTE, device=CUDA)
    for number in range(20):
        torch.cuda._sleep(SLOW_CYCLES // 20)
        x.fill_(number)  # the call must see it, although the device has not done it yet
        futures.append(farcall.rpc_async("w1", total, args=(x,)))
        x.fill_(-1)  # and not this
    assert [future.wait() for future in futures] == [number * MEBIBYTE for number in range(20)]


def test_a_call_sees_what_its_caller_had_put_onto_the_stream_and_nothing_later() -> None:
    run_cluster(2, values_stay, **MAPS)


def results_ready(rank: int) -> None:
    if rank:
        return
    share("w1")
    for size in (10, MEBIBYTE):
        assert (farcall.rpc_sync("w1", slowly_filled, args=(3, size)) == 3).all()
        future = farcall.rpc_async("w1", slowly_filled, args=(4, size))
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            assert (future.wait() == 4).all()
        doubled = farcall.rpc_async("w1", slowly_filled, args=(5, size)).then(lambda done: done.wait() * 2)
        with torch.cuda.stream(other):
            assert (doubled.wait() == 10).all()
        assert (doubled.wait() == 10).all()


def test_a_result_is_ready_on_the_stream_of_whoever_waits() -> None:
    run_cluster(2, results_ready, **MAPS)


STATE: dict[str, torch.Tensor] = {}


def set_state(value: int) -> None:
    state = STATE.setdefault("x", torch.zeros(MEBIBYTE, device=CUDA))
    torch.cuda._sleep(SLOW_CYCLES // 10)
    state.fill_(value)


def get_state() -> torch.Tensor:
    return STATE["x"]


def stream_of_call(seconds: float) -> int:
    time.sleep(seconds)
    return torch.cuda.current_stream().cuda_stream


def states(rank: int) -> None:
    if rank:
        return
    share("w1")
    for value in range(10):
        farcall.rpc_sync("w1", set_state, args=(value,))
        assert (farcall.rpc_sync("w1", get_state) == value).all()
    overlapping = [farcall.rpc_async("w1", stream_of_call, args=(0.3,)) for _ in range(4)]
    streams = [future.wait() for future in overlapping]
    assert len(set(streams)) == 4
    assert 0 not in streams


def test_a_call_sees_the_work_of_calls_before_it_and_overlapping_ones_have_streams_of_their_own() -> None:
    run_cluster(2, states, **MAPS)


async def slowly_filled_async(value: int) -> torch.Tensor:
    x = torch.zeros(MEBIBYTE, device=CUDA)
    torch.cuda._sleep(SLOW_CYCLES // 4)
    await asyncio.sleep(0.01)
    return x.fill_(value)


@farcall.functions.async_execution
def asking_on(to: str, value: int) -> Any:
    return farcall.rpc_async(to, slowly_filled, args=(value, MEBIBYTE)).then(lambda done: done.wait() + 1)


def later_answers(rank: int) -> None:
    if rank:
        return
    share("w1")
    futures = [farcall.rpc_async("w1", slowly_filled_async, args=(value,)) for value in range(5)]
    assert all(bool((future.wait() == value).all()) for value, future in enumerate(futures))
    for value in range(3):
        assert (farcall.rpc_sync("w1", asking_on, args=("w0", value)) == value + 1).all()


def test_answers_that_come_later() -> None:
    run_cluster(2, later_answers, **MAPS)


def where(x: torch.Tensor) -> str:
    return str(x.device)


def cpu_and_gpu(rank: int) -> None:
    if rank:
        return
    for size in (4, 100_000):
        x = torch.arange(size, dtype=torch.float32)
        assert farcall.rpc_sync("w1", where, args=(x,)) == "cuda:0"
        (back,) = farcall.rpc_sync("w1", echo, args=(x,))
        assert back.is_cpu
        assert torch.equal(x, back)


def gpu_to_cpu(rank: int) -> None:
    if rank:
        return
    for size in (4, 100_000):
        x = torch.arange(size, dtype=torch.float32, device=CUDA)
        assert farcall.rpc_sync("w1", where, args=(x,)) == "cpu"
        (back,) = farcall.rpc_sync("w1", echo, args=(x,))
        assert back.is_cuda
        assert torch.equal(x, back)


def test_maps_from_the_cpu_and_to_it() -> None:
    run_cluster(2, cpu_and_gpu, device_maps={"w1": {"cpu": "cuda:0"}})
    run_cluster(2, gpu_to_cpu, device_maps={"w1": {"cuda:0": "cpu"}})


def no_map(rank: int) -> None:
    x = torch.ones(3, device=CUDA)
    with pytest.raises(SerializationError, match="`set_device_map` on `TensorPipeRpcBackendOptions`"):
        farcall.rpc_sync(f"w{1 - rank}", echo, args=(x,))
    with pytest.raises(RuntimeError, match="Response device mapping is not available"):
        farcall.rpc_sync(f"w{1 - rank}", slowly_filled, args=(1, 3))
    assert farcall.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(2), 1)).sum() == 4


def test_without_a_map_nothing_is_sent_and_nothing_breaks() -> None:
    run_cluster(2, no_map)


def automatic(rank: int) -> None:
    other = f"w{1 - rank}"
    (back,) = farcall.rpc_sync(other, echo, args=(torch.arange(70_000, device=CUDA),))
    assert torch.equal(back, torch.arange(70_000, device=CUDA))


def test_automatic_maps() -> None:
    run_cluster(2, automatic, automatic_device_maps=True)


def to_oneself(rank: int) -> None:
    me = f"w{rank}"
    for number in range(20):
        x = torch.zeros(MEBIBYTE, device=CUDA)
        torch.cuda._sleep(SLOW_CYCLES // 20)
        x.fill_(number)
        future = farcall.rpc_async(me, echo, args=(x,))
        x.fill_(-1)
        (back,) = future.wait()
        assert (back == number).all()
        assert back.data_ptr() != x.data_ptr()


def test_calls_to_oneself() -> None:
    run_cluster(2, to_oneself, **MAPS)


def references(rank: int) -> None:
    if rank:
        return
    share("w1")
    for value in range(3):
        there = farcall.remote("w1", slowly_filled, args=(value, MEBIBYTE))
        assert (there.to_here() == value).all()
        assert there.rpc_sync().sum().item() == value * MEBIBYTE
        here = farcall.RRef(slowly_filled(value, MEBIBYTE))
        assert (farcall.rpc_sync("w1", fetched, args=(here,)) == value).all()
        own = farcall.remote("w0", slowly_filled, args=(value, MEBIBYTE))
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            assert (own.local_value() == value).all()


def fetched(rref: Any) -> torch.Tensor:
    return rref.to_here()


def test_references_to_values_on_the_gpu() -> None:
    run_cluster(2, references, **MAPS)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = torch.nn.Linear(500, 500).to(CUDA)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))

    def weights(self) -> list[Any]:
        return [farcall.RRef(parameter) for parameter in self.inner.parameters()]

    def gradient(self, context_id: int) -> torch.Tensor:
        return autograd.get_gradients(context_id)[self.inner.weight]

    def weight(self) -> torch.Tensor:
        return self.inner.weight.detach()


def training(rank: int) -> None:
    if rank:
        return
    share("w1")
    layer = farcall.remote("w1", Layer)
    local = Layer()
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().weights(), lr=0.05)
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
    for _ in range(5):
        x = torch.randn(2000, 500, device=CUDA, requires_grad=True)
        (expected,) = torch.autograd.grad((local(x) ** 2).mean(), x, retain_graph=False)
        local_optimizer.zero_grad()
        (local(x.detach()) ** 2).mean().backward()
        with autograd.context() as context_id:
            loss = (layer.rpc_sync().forward(x) ** 2).mean()
            autograd.backward(context_id, [loss])
            torch.testing.assert_close(autograd.get_gradients(context_id)[x], expected)
            torch.testing.assert_close(layer.rpc_sync().gradient(context_id), local.inner.weight.grad)
            optimizer.step(context_id)
        local_optimizer.step()
        torch.testing.assert_close(layer.rpc_sync().weight(), local.weight())


def test_distributed_autograd_and_the_optimizer() -> None:
    run_cluster(2, training, **MAPS)


def modules(rank: int) -> None:
    if rank:
        return
    module = RemoteModule("w1/cuda:0", torch.nn.Linear, args=(20, 30))
    assert module(torch.randn(5, 20, device=CUDA)).device == CUDA
    assert module.forward_async(torch.randn(5, 20)).wait().shape == (5, 30)
    with pytest.raises(RuntimeError):
        RemoteModule("w1/cuda:99", torch.nn.Linear, args=(20, 30))


def test_remote_modules() -> None:
    run_cluster(2, modules, **MAPS)


def use_little() -> None:
    torch.cuda.set_per_process_memory_fraction(0.02)


def too_large(rank: int) -> None:
    if rank:
        return
    share("w1")
    farcall.rpc_sync("w1", use_little)
    x = torch.ones(4 << 30, dtype=torch.uint8, device=CUDA)
    with pytest.raises(RuntimeError, match=r"OutOfMemory|out of memory"):
        farcall.rpc_sync("w1", where, args=(x,))
    assert farcall.rpc_sync("w1", total, args=(torch.ones(MEBIBYTE, device=CUDA),)) == MEBIBYTE
    wait_until(lambda: lent() == 0)


def test_no_memory_at_the_receiver_is_an_error_of_that_call_alone() -> None:
    run_cluster(2, too_large, memory=MemoryOptions(device_memory_limit_bytes=8 << 30), **MAPS)


def sleep_and_fill(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.ones(MEBIBYTE, device=CUDA)


def unread(rank: int) -> None:
    if rank:
        return
    share("w1")
    with pytest.raises(RpcTimeout):
        farcall.rpc_sync("w1", sleep_and_fill, args=(0.5,), timeout=0.1)
    wait_until(lambda: farcall.rpc_sync("w1", lent_after_all) == 0)
    assert lent() == 0


def lent_after_all() -> int:
    return lent() + len(current_runtime().server.active) - 1


def test_what_nobody_reads_is_given_back() -> None:
    run_cluster(2, unread, **MAPS)


def dies(x: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def survives(rank: int) -> None:
    if rank == 1:
        signal.pause()  # until it is killed
    share("w1")
    x = torch.ones(MEBIBYTE, device=CUDA)
    torch.cuda._sleep(SLOW_CYCLES)
    with pytest.raises(PeerDead):
        farcall.rpc_sync("w1", dies, args=(x,))
    wait_until(lambda: lent() == 0)
    torch.cuda.synchronize()
    assert x.sum().item() == MEBIBYTE


def test_the_death_of_a_receiver() -> None:
    finish(start_cluster(2, survives, **MAPS), 60.0, may_fail=[1])
