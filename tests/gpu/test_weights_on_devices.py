"""Versions of tensors on a device: through pinned memory of the host, or out of the publisher's own device memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import PublicationClosed
from farcall.runtime.node import current_runtime
from farcall.testing.cluster import finish, run_cluster, start_cluster
from farcall.weights.node import Weights

COUNT = MEBIBYTE + 3
VERSIONS = 12
ALL_MAPS = {"device_maps": {f"w{rank}": {"cuda:0": "cuda:0"} for rank in range(3)}}
kept: dict[str, Any] = {}


def model(value: int) -> dict[str, Any]:
    """Large, small, odd, tied, transposed, of several dtypes, and on the host."""
    large = torch.full((COUNT,), float(value), device=CUDA)
    table = torch.arange(6000, dtype=torch.int16, device=CUDA).view(60, 100) + value
    return {
        "large": large,
        "head": large[: COUNT // 2],
        "turned": table.t(),
        "bytes": torch.full((1_000_001,), value % 251, dtype=torch.uint8, device=CUDA),
        "odd": torch.full((13,), value, dtype=torch.uint8, device=CUDA)[3:],
        "mask": torch.full((5,), bool(value % 2), device=CUDA),
        "none": torch.empty(0, device=CUDA),
        "host": torch.full((1000,), float(value)),
        "step": value,
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in other if name != "step")


def publish(value: int) -> None:
    kept["source"] = model(value)
    kept["policy"] = farcall.publish("policy", kept["source"])


def push(value: int, only: list[str] | None = None) -> Any:
    for name, tensor in model(value).items():
        if name != "step" and (only is None or name in only):
            kept["source"][name].copy_(tensor)
    return kept["policy"].push(only=only)


def twin_bytes() -> int:
    return farcall.metrics().device_memory.weights_bytes


def wait_for(weights: Any, version: Any) -> None:
    while weights.version != version:
        weights.wait(newer_than=weights.version, timeout=LONG_S)


def opened() -> int:
    twins = current_runtime().part(Weights).twins
    return sum(one.memory is not None for one in twins._opened.values())


def push_and_load(rank: int, has_twins: bool) -> None:
    if rank:
        return
    farcall.rpc_sync("w1", publish, args=(0,))
    weights = farcall.subscribe("policy")
    here = model(-1)

    def load_one() -> bool:
        wait_for(weights, farcall.rpc_sync("w1", push, args=(7,)))
        weights.load_into(here)
        return bool(opened())

    if has_twins:
        wait_until(load_one)  # the first goes through the host, while the quicker way is tried
    for value in range(1, VERSIONS):
        wait_for(weights, farcall.rpc_sync("w1", push, args=(value,)))
        weights.load_into(here)
        assert equal(here, model(value)), value
        assert here["head"].data_ptr() == here["large"].data_ptr()
        assert equal(weights.get(), model(value)), value
        weights.verify()  # the checksums of the device are those of the host
        part = {"large": torch.empty(10, device=CUDA), "turned": torch.empty(2, 60, dtype=torch.int16, device=CUDA)}
        weights.load_into(part, slices={"large": (slice(5, 15),), "turned": (slice(3, 5),)})
        assert torch.equal(part["turned"], model(value)["turned"][3:5])
        half = {"large": torch.empty(COUNT, dtype=torch.float16, device=CUDA)}
        weights.load_into(half)
        assert float(half["large"].float().sum()) == value * COUNT
    before = {**model(VERSIONS - 1), "bytes": model(99)["bytes"]}
    wait_for(weights, farcall.rpc_sync("w1", push, args=(99, ["bytes"])))
    weights.load_into(here)
    assert equal(here, before), "what has not changed is shared"
    weights.verify()
    assert bool(opened()) is has_twins
    taken = farcall.rpc_sync("w1", twin_bytes)
    assert (0 < taken < 8 * sum(one.nbytes for one in model(0).values() if isinstance(one, torch.Tensor))) is has_twins


@pytest.mark.parametrize("has_twins", [True, False])
def test_versions_of_tensors_on_a_device(has_twins: bool) -> None:
    run_cluster(2, push_and_load, has_twins, **(MAPS if has_twins else {}))


def load_without_room(rank: int) -> None:
    if rank:
        return
    farcall.rpc_sync("w1", publish, args=(0,))
    weights = farcall.subscribe("policy")
    here = model(-1)
    for value in range(6):
        wait_for(weights, farcall.rpc_sync("w1", push, args=(value,)))
        weights.load_into(here)
        assert equal(here, model(value))
    assert farcall.rpc_sync("w1", twin_bytes) == 0


def test_no_more_device_memory_is_taken_than_allowed() -> None:
    run_cluster(2, load_without_room, memory=farcall.MemoryOptions(device_memory_limit_bytes=1 << 20), **MAPS)


def push_on(rank: int) -> None:
    """Many versions while others load: each is whole."""
    here = {f"layer{index}": torch.zeros(COUNT, device=CUDA) for index in range(4)}
    if rank == 1:
        policy = farcall.publish("policy", here)
        farcall.barrier()
        for value in range(200):
            for tensor in here.values():
                tensor.fill_(float(value))
            policy.push()
        policy.close()
    else:
        weights = farcall.subscribe("policy")
        farcall.barrier()
        version = None
        stream = torch.cuda.Stream()
        try:
            while True:
                version = weights.wait(newer_than=version, timeout=LONG_S)
                with torch.cuda.stream(stream):
                    weights.load_into(here)
                    found = {float(value) for tensor in here.values() for value in (tensor.min(), tensor.max())}
                assert len(found) == 1, (version, found)
        except PublicationClosed:
            pass
        assert float(here["layer0"][0]) == 199.0
    farcall.barrier()


def test_versions_are_whole_while_others_load() -> None:
    run_cluster(3, push_on, **ALL_MAPS)


def rows_of(part: int, value: float) -> torch.Tensor:
    return torch.arange(COUNT, device=CUDA).view(1, -1).expand(4, -1) + value + 4 * part


def load_from_parts(rank: int) -> None:
    if rank:
        mine = rows_of(rank - 1, 0.0).clone()
        publication = farcall.publish_part(
            "policy", {"up": farcall.Part(mine, (8, COUNT), (4 * (rank - 1), 0))}, part=rank - 1, parts=2
        )
        for value in range(1, VERSIONS):
            farcall.barrier()
            mine.copy_(rows_of(rank - 1, float(value)))
            publication.push()
        farcall.barrier()
        return
    weights = farcall.subscribe_parts("policy", 2)
    here, there = {"up": torch.zeros(4, COUNT, device=CUDA)}, {"up": torch.zeros(4, COUNT)}
    version = None
    for value in range(1, VERSIONS):
        farcall.barrier()
        version = weights.wait(newer_than=version, timeout=LONG_S)
        for target in (here, there):
            weights.load_into(target, slices={"up": (slice(2, 6),)})
            wanted = torch.cat([rows_of(part, float(value)) for part in range(2)])[2:6]
            assert torch.equal(target["up"].to(CUDA), wanted), value
    assert opened() > 1
    farcall.barrier()


def test_slices_of_several_publishers_parts() -> None:
    run_cluster(3, load_from_parts, **ALL_MAPS)


def lose_the_publisher(rank: int) -> int:
    if rank:
        return 0
    farcall.rpc_sync("w1", publish, args=(0,))
    weights = farcall.subscribe("policy")
    here = model(-1)

    def load_one() -> bool:
        wait_for(weights, farcall.rpc_sync("w1", push, args=(7,)))
        weights.load_into(here)
        return bool(opened())

    wait_until(load_one)
    farcall.rpc_async("w1", die)
    loads = 0
    while weights.publisher is not None or loads < 20:
        here["large"].zero_()
        weights.load_into(here)
        assert equal(here, model(7)), loads
        loads += 1
    assert opened() == 0
    weights.verify()
    return loads


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_version_outlives_its_publisher() -> None:
    assert finish(start_cluster(2, lose_the_publisher, **MAPS), may_fail=[1])[0] >= 20
