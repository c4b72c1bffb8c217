"""Tensors on one GPU between two processes: farcall against stock torch RPC, in turns, in one run.

    python benchmarks/gpu.py [--rounds 3] [--out FILE]

Every case runs the same program over both. Where it says "done", the device has done the work: the callee (send) or the
caller (echo) waits for its stream. "calls in flight" are rpc_async echoes of 4 KiB, waited for together. A layer is
``tanh(x @ w)`` of square matrices, both sent, with a fresh result; "and backward" is one such call in a context.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

GIBIBYTE = 1 << 30
WARM_UP = 5


def take(x: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def take_only(x: torch.Tensor) -> None:
    pass


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


# Functions of their own for small tensors, as programs have them: farcall remembers of a function how long it takes.
def take_small(x: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def echo_small(x: torch.Tensor) -> torch.Tensor:
    return x


def echo_many(x: torch.Tensor) -> torch.Tensor:
    return x


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a model does most."""
    return torch.tanh(x @ w)


def timed(rpc: Any, function: Any, size: int, count: int, wait: bool) -> float:
    """The median time of a call, in seconds."""
    x = torch.ones(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    took = []
    for _ in range(WARM_UP + count):
        started = time.perf_counter()
        rpc.rpc_sync("w1", function, args=(x,))
        if wait:
            torch.cuda.current_stream().synchronize()
        took.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(took[WARM_UP:])


def in_flight(rpc: Any, width: int, seconds: float) -> float:
    """Calls a second."""
    x = torch.ones(1024, device="cuda")
    for _ in range(3):
        torch.futures.wait_all([rpc.rpc_async("w1", echo_many, args=(x,)) for _ in range(width)])
    torch.cuda.synchronize()
    started = time.perf_counter()
    done = 0
    while time.perf_counter() - started < seconds:
        for future in [rpc.rpc_async("w1", echo_many, args=(x,)) for _ in range(width)]:
            future.wait()
        done += width
    torch.cuda.synchronize()
    return done / (time.perf_counter() - started)


def layers(rpc: Any, width: int, count: int, calls: int = 1) -> float:
    """The median time of that many layers in flight, done, in seconds."""
    x, w = torch.randn(width, width, device="cuda"), torch.randn(width, width, device="cuda")
    took = []
    for _ in range(WARM_UP + count):
        started = time.perf_counter()
        for future in [rpc.rpc_async("w1", layer, args=(x, w)) for _ in range(calls)]:
            future.wait()
        torch.cuda.current_stream().synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took[WARM_UP:])


def with_backward(rpc: Any, autograd: Any, width: int, count: int) -> float:
    """The median time of a layer and its backward pass, done, in seconds."""
    x = torch.randn(width, width, device="cuda", requires_grad=True)
    w = torch.randn(width, width, device="cuda", requires_grad=True)
    took = []
    for _ in range(WARM_UP + count):
        started = time.perf_counter()
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("w1", layer, args=(x, w)).sum()])
            autograd.get_gradients(context)
        torch.cuda.current_stream().synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took[WARM_UP:])


def measured(rpc: Any, autograd: Any) -> dict[str, float]:
    return {
        **{f"layer {width} (us)": 1e6 * layers(rpc, width, 100) for width in (256, 1024, 4096)},
        **{f"16 layers {width} in flight (us)": 1e6 * layers(rpc, width, 30, 16) for width in (256, 1024)},
        "layer 256 and backward (us)": 1e6 * with_backward(rpc, autograd, 256, 100),
        **{f"echo {kib} KiB, done (us)": 1e6 * timed(rpc, echo, kib << 10, 100, True) for kib in (64, 16384)},
        "send 1 GiB, done (GiB/s)": 1 / timed(rpc, take, GIBIBYTE, 12, False),
        "echo 1 GiB, done (GiB/s, both ways counted)": 2 / timed(rpc, echo, GIBIBYTE, 12, True),
        "send 1 MiB, done (us)": 1e6 * timed(rpc, take, 1 << 20, 100, False),
        "echo 1 MiB, done (us)": 1e6 * timed(rpc, echo, 1 << 20, 100, True),
        "send 4 KiB (us)": 1e6 * timed(rpc, take_only, 4096, 300, False),
        "send 4 KiB, done (us)": 1e6 * timed(rpc, take_small, 4096, 300, False),
        "echo 4 KiB (us)": 1e6 * timed(rpc, echo_small, 4096, 300, False),
        "echo 4 KiB, done (us)": 1e6 * timed(rpc, echo_small, 4096, 300, True),
        "16 calls in flight (calls/s)": in_flight(rpc, 16, 2.0),
        "64 calls in flight (calls/s)": in_flight(rpc, 64, 2.0),
    }


def member(which: str, rank: int, port: int) -> None:
    rpc: Any
    autograd: Any
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if which == "stock":
        import torch.distributed.autograd as autograd
        import torch.distributed.rpc as rpc

        options = rpc.TensorPipeRpcBackendOptions()
        options.set_device_map(f"w{1 - rank}", {0: 0})
    else:
        import farcall as rpc
        from farcall import autograd

        options = rpc.RpcBackendOptions(device_maps={f"w{1 - rank}": {0: 0}})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        print(json.dumps(measured(rpc, autograd)), flush=True)
    rpc.shutdown()


def run(which: str) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--member", which, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if which == "stock" else None,
        )
        for rank in range(2)
    ]
    said, _ = ranks[0].communicate(timeout=120)
    ranks[1].communicate(timeout=30)
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{which} failed: {[process.returncode for process in ranks]}")
    figures: dict[str, float] = json.loads(said.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.member:
        member(asked.member[0], int(asked.member[1]), int(asked.member[2]))
        return
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(asked.rounds):
        rounds.append({which: run(which) for which in ("stock", "farcall")})
    print(f"{'':45}{'stock':>12}{'farcall':>12}{'better by':>12}")
    table = {}
    for case in rounds[0]["stock"]:
        stock, own = (statistics.median(each[which][case] for each in rounds) for which in ("stock", "farcall"))
        ratios = [
            each["farcall"][case] / each["stock"][case] if "/s" in case else each["stock"][case] / each["farcall"][case]
            for each in rounds
        ]
        table[case] = {"stock": stock, "farcall": own, "better_by": ratios}
        print(f"{case:45}{stock:12.1f}{own:12.1f}{statistics.median(ratios):11.1f}x")
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": f"python benchmarks/gpu.py --rounds {asked.rounds}",
    }
    if asked.out:
        asked.out.write_text(json.dumps({"about": about, "cases": table, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
