"""Weights on devices: streams order pushes and loads; a remote tensor goes the way that a device map names."""

from __future__ import annotations

import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, SLOW_CYCLES
from tests.kit.times import LONG_S

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
    remote.write_from(torch.zeros(10, device=CUDA), slices=slice(0, 10))
    assert float(remote.read_into(torch.empty(20), slices=slice(0, 20)).sum()) == sum(range(10, 20))


def test_a_remote_tensor_with_a_device_map() -> None:
    run_cluster(2, read_and_write, **MAPS)


def test_a_remote_tensor_without_one() -> None:
    run_cluster(2, read_and_write)
