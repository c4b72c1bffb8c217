"""farcall with tensors on a GPU beside what else a program has there: DDP, profilers, metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, echo, share, slowly_filled

import farcall
from farcall.testing.cluster import run_cluster

WIDTH = 64
GRADIENTS: dict[int, torch.Tensor] = {}


def gradient_of(step: int) -> torch.Tensor:
    return GRADIENTS[step]


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.full((WIDTH, WIDTH), float(rank + 1 + step), device=CUDA)


def trains(rank: int, backend: str, folder: str) -> None:
    together = backend == "gloo"  # NCCL takes one process of each device
    meeting = f"file://{folder}/{'all' if together else rank}"
    dist.init_process_group(backend, init_method=meeting, rank=rank if together else 0, world_size=2 if together else 1)
    other = f"w{1 - rank}"
    share(other)
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, WIDTH).to(CUDA)
    model = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[0])
    reference = torch.nn.Linear(WIDTH, WIDTH).to(CUDA)
    reference.load_state_dict(layer.state_dict())
    for step in range(4):
        x = farcall.rpc_sync(other, slowly_filled, args=(rank + 1 + step, WIDTH * WIDTH)).view(WIDTH, WIDTH)
        futures = [farcall.rpc_async(other, echo, args=(torch.full((MEBIBYTE,), 3, device=CUDA),)) for _ in range(4)]
        model.zero_grad()
        (model(x) ** 2).mean().backward()
        assert all(bool((future.wait()[0] == 3).all()) for future in futures)
        ranks = (0, 1) if together else (rank,)
        reference.zero_grad()
        for each in ranks:
            ((reference(inputs_of(each, step)) ** 2).mean() / len(ranks)).backward()
        torch.testing.assert_close(layer.weight.grad, reference.weight.grad)
        assert layer.weight.grad is not None
        GRADIENTS[step] = layer.weight.grad.clone()
        torch.cuda.current_stream().synchronize()  # functions that others call here run on other streams
        if together:
            dist.barrier()
            torch.testing.assert_close(farcall.rpc_sync(other, gradient_of, args=(step,)), GRADIENTS[step])
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ddp_beside_it(backend: str, tmp_path: Path) -> None:
    run_cluster(2, trains, backend, str(tmp_path), **MAPS)


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def profiled(rank: int, folder: str) -> dict[str, list[tuple[str, float]]] | None:
    if rank:
        return None
    share("w1")
    x = torch.randn(2048, 2048, device=CUDA)
    farcall.rpc_sync("w1", product, args=(x,))
    with farcall.profile(use_device=True) as prof:
        farcall.rpc_sync("w1", product, args=(x,))
    with torch.autograd.profiler_legacy.profile(use_cuda=True) as legacy:
        farcall.rpc_sync("w1", product, args=(x,))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as kineto:
        farcall.rpc_sync("w1", product, args=(x,))
    kineto.export_chrome_trace(f"{folder}/trace.json")
    both = {"farcall": prof.events(), "legacy": legacy.function_events}
    return {which: [(event.name, event.device_time_total) for event in events] for which, events in both.items()}


def test_profiles_have_the_time_that_a_callees_operators_took_on_the_device(tmp_path: Path) -> None:
    found = run_cluster(2, profiled, str(tmp_path), **MAPS)[0]
    for profiler, events in found.items():
        products = [(name, time_us) for name, time_us in events if "#remote_op: aten::mm" in name]
        assert products, (profiler, [name for name, _ in events])
        assert all(time_us > 10 for _, time_us in products), (profiler, products)
    trace = json.loads((tmp_path / "trace.json").read_text())
    worker = next(each["pid"] for each in trace["traceEvents"] if each.get("args", {}).get("name") == "w1")
    (there,) = [each for each in trace["traceEvents"] if each.get("name") == "aten::mm" and each["pid"] == worker]
    assert there["args"]["kernels"][0][2] > 10, there


def measured(rank: int) -> None:
    if rank:
        return
    share("w1")
    farcall.rpc_sync("w1", echo, args=(torch.ones(MEBIBYTE, device=CUDA),))
    metrics = farcall.metrics()
    assert metrics.device_memory.total_bytes >= 4 * MEBIBYTE
    (channel,) = [channel for channel in metrics.channels if channel.channel == "device memory"]
    assert channel.peer == "w1"
    assert channel.sent_bytes >= 4 * MEBIBYTE
    assert channel.received_bytes >= 4 * MEBIBYTE


def test_metrics_show_the_memory_and_what_went_through_it() -> None:
    run_cluster(2, measured, **MAPS)
