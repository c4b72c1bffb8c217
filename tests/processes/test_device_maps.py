"""Device maps on a machine without a device: what names only the CPU works, and the rest is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farcall
from farcall.testing.cluster import MemberFailed, run_cluster


def calls(rank: int) -> None:
    other = f"w{1 - rank}"
    for size in (3, 100_000):
        x = torch.arange(size)
        assert torch.equal(farcall.rpc_sync(other, torch.add, args=(x, 1)), x + 1)
        assert torch.equal(farcall.rpc_async(other, torch.add, args=(x, 1)).then(lambda f: f.wait() + 1).wait(), x + 2)
        assert torch.equal(farcall.remote(other, torch.add, args=(x, 1)).to_here(), x + 1)


@pytest.mark.parametrize(
    "options",
    [{"device_maps": {"w0": {"cpu": "cpu"}, "w1": {"cpu": "cpu"}}}, {"automatic_device_maps": True}],
    ids=["cpu", "automatic"],
)
def test_maps_of_the_cpu(options: dict[str, Any]) -> None:
    run_cluster(2, calls, **options)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are devices here")
def test_a_device_that_is_not_there_is_refused_at_the_start_by_all() -> None:
    with pytest.raises(MemberFailed) as failed:
        run_cluster(2, calls, device_maps={"w1": {"cpu": "cuda:0"}})
    said = "Node w0 has target devices with invalid indices in its device map for w1"
    assert str(failed.value).count(said) == 2
