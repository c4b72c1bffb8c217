"""How long a no-op takes while 1 GiB travels on the same link, over TCP at 1 Gbit/s.

    python benchmarks/beside_large.py [--rate 1gbit] [--mebibytes 1024]

Two processes in network namespaces of their own, joined by a link whose rate the kernel limits (``tc``): needs root and
iproute2. Says p50 and p99 of a no-op on the quiet link, beside a large argument, and beside a large result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

import farcall

QUIET_S = 3.0
PAUSE_S = 0.001
"""Between two no-ops: they are samples, no load."""


def nothing() -> None:
    pass


def swallow(tensor: torch.Tensor) -> int:
    return tensor.numel()


def give(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes << 20, dtype=torch.uint8)


def sample(until: Callable[[], bool]) -> str:
    took = []
    while not until():
        began = time.perf_counter()
        farcall.rpc_sync("w1", nothing)
        took.append(time.perf_counter() - began)
        time.sleep(PAUSE_S)
    took.sort()
    p50, p99 = (1e3 * took[int(part * len(took))] for part in (0.5, 0.99))
    return f"p50 {p50:8.3f} ms   p99 {p99:8.3f} ms   {len(took)} no-ops"


def run(rank: int, meeting: str, mebibytes: int) -> None:
    options = farcall.RpcBackendOptions(
        init_method=f"file://{meeting}", advertise=address(rank), transports=("tcp",), rpc_timeout=600.0
    )
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        value = give(mebibytes)
        for _ in range(200):
            farcall.rpc_sync("w1", nothing)
        over = time.monotonic() + QUIET_S
        print(f"quiet                   {sample(lambda: time.monotonic() > over)}", flush=True)
        for name, function, args in (("argument", swallow, (value,)), ("result", give, (mebibytes,))):
            began = time.monotonic()
            # On a thread of its own: who sends a large argument waits until the kernel has it.
            large = threading.Thread(target=farcall.rpc_sync, args=("w1", function, args))
            large.start()
            text = sample(lambda: not large.is_alive())  # noqa: B023
            rate = mebibytes / (time.monotonic() - began)
            print(f"beside a large {name:8} {text}   {rate:.0f} MiB/s", flush=True)
    farcall.shutdown()


def address(rank: int) -> str:
    return f"10.198.0.{rank + 1}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        run(given.rank, given.meeting, given.mebibytes)
        return
    spaces = [f"farcall-{os.getpid()}-{rank}" for rank in range(2)]
    with ExitStack() as stack:
        meeting = stack.enter_context(tempfile.TemporaryDirectory()) + "/store"
        for space in spaces:
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
        ip("-n", spaces[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", spaces[1])
        limit = ("root", "tbf", "rate", given.rate, "burst", "128kb", "latency", "50ms")
        for rank, space in enumerate(spaces):
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", "eth0", *limit], check=True)
        passed = ["--meeting", meeting, "--mebibytes", str(given.mebibytes)]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, __file__, "--rank", str(rank), *passed],
            )
            for rank, space in enumerate(spaces)
        ]
        sys.exit(max(abs(one.wait()) for one in ranks))


if __name__ == "__main__":
    main()
