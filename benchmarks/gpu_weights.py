"""Weights on one GPU, from one process to another: a remote tensor, and a published version, beside a device copy.

    python benchmarks/gpu_weights.py [--gib 4] [--rounds 5]

A device map leads to the owner. A remote tensor and a version on its device are read by CUDA IPC, out of the owner's
memory; "by the host" is the same version without twins (`device_sharing=False`), out of shared memory, which is pinned.
Each figure is the median of the rounds, in GiB/s, with the device's work done; "share of a copy" is what it is of the
copy of the same bytes inside one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import farcall
from farcall.options import MemoryOptions
from farcall.testing.cluster import run_cluster

GIBIBYTE = 1 << 30
WARM_UP = 8
"""So many versions are pushed before each block has been filled and pinned."""
CUDA = "cuda:0"

kept: dict[str, Any] = {}


def share_weights(count: int) -> farcall.RemoteTensor:
    kept["weights"] = torch.ones(count, device=CUDA)
    torch.cuda.synchronize()
    return farcall.share(kept["weights"])


def publish_weights() -> None:
    kept["policy"] = farcall.publish("policy", {"weights": kept["weights"]})


def push_weights() -> Any:
    return kept["policy"].push()


def rate(action: Callable[[], object], gib: float, rounds: int) -> float:
    times = []
    for _ in range(WARM_UP + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return gib / statistics.median(times[WARM_UP:])


def measure(rank: int, gib: float, rounds: int, way: str) -> dict[str, float]:
    """``way``: how versions go, for the names of the figures."""
    if rank:
        return {}
    count = int(gib * GIBIBYTE) // 4
    here, source = torch.empty(count, device=CUDA), torch.ones(count, device=CUDA)
    found = {"device copy": rate(partial(here.copy_, source), gib, rounds)}
    del source
    remote = farcall.rpc_sync("w1", share_weights, (count,))
    found["remote tensor, read"] = rate(lambda: remote.read_into(here), gib, rounds)
    assert bool((here == 1.0).all())
    farcall.rpc_sync("w1", publish_weights)
    weights = farcall.subscribe("policy")

    def push_and_load() -> None:
        version = farcall.rpc_sync("w1", push_weights, timeout=None)
        while weights.version != version:
            weights.wait(newer_than=weights.version, timeout=60.0)
        weights.load_into({"weights": here})

    found[f"version {way}, push and load"] = rate(push_and_load, gib, rounds)
    found[f"version {way}, load"] = rate(lambda: weights.load_into({"weights": here}), gib, rounds)
    found[f"version {way}, push"] = rate(lambda: farcall.rpc_sync("w1", push_weights, timeout=None), gib, rounds)
    assert bool((here == 1.0).all())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch sees none")
    maps = {"w0": {CUDA: CUDA}, "w1": {CUDA: CUDA}}
    found: dict[str, float] = {}
    for way, shares in (("by the host", False), ("by the device", True)):
        memory = MemoryOptions(
            device_views=True, device_sharing=shares, device_memory_limit_bytes=int(6 * chosen.gib * GIBIBYTE)
        )
        options = {"memory": memory, "device_maps": maps, "rpc_timeout": 120.0}
        found |= run_cluster(2, measure, chosen.gib, chosen.rounds, way, timeout_s=300, **options)[0]
    for name, gib_per_s in found.items():
        share = gib_per_s / found["device copy"]
        print(f"{name:38} {gib_per_s:8.1f} GiB/s   share of a copy {share:.2f}", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "gib": chosen.gib, **found}))


if __name__ == "__main__":
    main()
