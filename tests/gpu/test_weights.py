"""Weights on devices: streams order pushes and loads; a remote tensor goes the way that a device map names."""

from __future__ import annotations

import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, SLOW_CYCLES, lent
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.testing.cluster import run_cluster

COUNT = 4 * MEBIBYTE
shared: list[torch.Tensor] = []


def push_and_load(rank: int) -> None:
    device = torch.device(CUDA)
    source = {"weight": torch.zeros(COUNT, device=device)}
    if rank:
        policy = farcall.publish("policy", source)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW_CYCLES)
            source["weight"].fill_(1.0)
            policy.push()  # what this stream is still to do comes first
            source["weight"].fill_(2.0)
        farcall.barrier()
        return
    weights = farcall.subscribe("policy")
    weights.wait(timeout=LONG_S)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)
        source["weight"].fill_(3.0)
        weights.load_into(source)
        total = source["weight"].double().sum()
    stream.synchronize()
    assert float(total) == COUNT
    farcall.barrier()


def test_streams_order_a_push_and_a_load() -> None:
    run_cluster(2, push_and_load)


def share_on_device() -> farcall.RemoteTensor:
    shared.append(torch.arange(float(COUNT), device=CUDA))
    torch.cuda.synchronize()
    return farcall.share(shared[-1], writable=True)


def read_and_write(rank: int) -> None:
    if rank:
        return
    remote = farcall.rpc_sync("w1", share_on_device)
    assert not remote.in_shared_memory
    here = torch.empty(COUNT, device=CUDA)
    for _ in range(3):  # the first goes through the host, while the quicker way is tried
        remote.read_into(here)
        assert torch.equal(here, torch.arange(float(COUNT), device=CUDA))
    half = torch.empty(COUNT // 2, device=CUDA)
    assert torch.equal(remote.read_into(half, slices=slice(COUNT // 2, COUNT)), here[COUNT // 2 :])
    remote.write_from(torch.zeros(10, device=CUDA), slices=slice(0, 10))
    assert float(remote.read_into(torch.empty(20), slices=slice(0, 20)).sum()) == sum(range(10, 20))


def fill_slowly(value: float) -> None:
    torch.cuda._sleep(SLOW_CYCLES // 10)
    shared[-1].fill_(value)


def read_opened(rank: int) -> None:
    """Out of the owner's own memory: what calls have put before the read is in it, what they put behind it is not."""
    if rank:
        return
    remote = farcall.rpc_sync("w1", share_on_device)
    here = torch.empty(COUNT, device=CUDA)

    def is_opened() -> bool:
        remote.read_into(here)
        return remote._opened is not None

    wait_until(is_opened)
    for value in range(1, 6):
        farcall.rpc_sync("w1", fill_slowly, args=(float(value),))
        torch.cuda._sleep(SLOW_CYCLES // 10)  # the reader's own stream is late, too
        remote.read_into(here)
        later = farcall.rpc_async("w1", fill_slowly, args=(-1.0,))
        assert float(here.sum()) == value * COUNT
        later.wait()
        remote.write_from(torch.full((COUNT,), value + 0.5, device=CUDA))
        assert farcall.rpc_sync("w1", total_of_shared) == (value + 0.5) * COUNT
    wait_until(lambda: farcall.rpc_sync("w1", lent) == 0)  # those by value, before it was opened
    remote.read_into(here)
    assert farcall.rpc_sync("w1", lent) == 0, "no copy was made for it"


def total_of_shared() -> float:
    return float(shared[-1].double().sum())


def test_large_tensors_are_read_and_written_where_they_lie() -> None:
    run_cluster(2, read_opened, **MAPS)


def test_a_remote_tensor_with_a_device_map() -> None:
    run_cluster(2, read_and_write, **MAPS)


def test_a_remote_tensor_without_one() -> None:
    run_cluster(2, read_and_write)
