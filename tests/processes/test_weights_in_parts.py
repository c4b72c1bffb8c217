"""Weights that several workers publish in parts: a version exists when all parts of it do."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist
from tests.kit.times import LONG_S

import farcall
from farcall.errors import RpcTimeout
from farcall.testing.cluster import run_cluster
from farcall.weights.parts import PartsSubscription, take_part

ROWS, COLUMNS = 8, 6


def whole(value: float) -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + value


def rows(part: int, value: float) -> dict[str, object]:
    """One of two publishers: half of the rows of one tensor, half of the columns of another, and a whole one."""
    above = slice(part * ROWS // 2, (part + 1) * ROWS // 2)
    beside = slice(part * COLUMNS // 2, (part + 1) * COLUMNS // 2)
    return {
        "up": farcall.Part(whole(value)[above].clone(), (ROWS, COLUMNS), (above.start, 0)),
        "down": farcall.Part(whole(-value)[:, beside].clone(), (ROWS, COLUMNS), (0, beside.start)),
        "norm": torch.full((3,), value),
        "step": int(value),
    }


async def first_version(weights: PartsSubscription) -> object:
    async for version in weights:
        return version
    raise AssertionError


def push_and_load(rank: int) -> None:
    if rank < 2:
        source = rows(rank, 1.0)
        publication = farcall.publish_part("policy", source, part=rank, parts=2)
        publication.push()
        farcall.barrier()
        if rank == 0:  # the other part of version 2 is late
            source.update(rows(rank, 2.0))
            publication.push()
        farcall.barrier()
        farcall.barrier()  # the subscriber has looked
        if rank == 1:
            source.update(rows(rank, 2.0))
            publication.push()
        farcall.barrier()  # it has all that it wanted
        return
    weights = farcall.subscribe_parts("policy", 2)
    version = weights.wait(timeout=LONG_S)
    assert version.number == 1
    # Another layout: rows across the border of the parts, columns likewise.
    mine = {"up": torch.zeros(4, COLUMNS, dtype=torch.float64), "down": torch.zeros(ROWS, 2), "norm": torch.zeros(3)}
    slices = {"up": (slice(2, 6),), "down": (slice(None), slice(2, 4))}
    weights.load_into(mine, slices=slices)
    assert torch.equal(mine["up"], whole(1.0)[2:6].double())
    assert torch.equal(mine["down"], whole(-1.0)[:, 2:4])
    assert mine["norm"].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"up has the shape \(8, 6\), the target's has \(4, 6\)"):
        weights.load_into({"norm": mine["norm"], "up": torch.zeros(4, COLUMNS)})
    assert asyncio.run(asyncio.wait_for(first_version(weights), LONG_S)) == version
    farcall.barrier()
    farcall.barrier()  # the first publisher has pushed version 2
    with pytest.raises(RpcTimeout, match="a part of a version of 'policy' is missing"):
        weights.wait(newer_than=version, timeout=0.05)
    weights.load_into(mine, slices=slices)
    assert mine["norm"].tolist() == [1.0] * 3, "one part alone is no version"
    farcall.barrier()
    assert weights.wait(newer_than=version, timeout=LONG_S).number == 2
    found = weights.get()
    assert torch.equal(found["up"], whole(2.0))
    assert torch.equal(found["down"], whole(-2.0))
    assert found["step"] == 2
    weights.close()
    farcall.barrier()


def test_a_version_exists_when_all_parts_do() -> None:
    run_cluster(3, push_and_load)


def publish_distributed(rank: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            source = {
                "up": distribute_tensor(whole(1.0), mesh, [Shard(0)]),
                "down": distribute_tensor(whole(2.0), mesh, [Shard(1)]),
                "norm": distribute_tensor(torch.ones(3), mesh, [Replicate()]),
            }
            farcall.publish_part("policy", source, part=rank, parts=2).push()
            farcall.barrier()
        finally:
            dist.destroy_process_group()
        return
    weights = farcall.subscribe_parts("policy", 2)
    weights.wait(timeout=LONG_S)
    found = weights.get()
    assert torch.equal(found["up"], whole(1.0))
    assert torch.equal(found["down"], whole(2.0))
    assert torch.equal(found["norm"], torch.ones(3))
    farcall.barrier()


def test_the_part_of_a_distributed_tensor(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run_cluster(3, publish_distributed, str(tmp_path / "gloo"))


def test_what_is_no_part() -> None:
    with pytest.raises(ValueError, match=r"up: \(4, 6\) at \(6, 0\) is no part of \(8, 6\)"):
        take_part({"up": farcall.Part(torch.zeros(4, COLUMNS), (ROWS, COLUMNS), (6, 0))})
    with pytest.raises(ValueError, match="part 2 of 2"):
        farcall.publish_part("policy", {}, part=2, parts=2)
    with pytest.raises(ValueError, match="at least one part"):
        farcall.subscribe_parts("policy", 0)
