"""The no-op round trip of two source trees of farcall, measured in turns: what a change costs, or saves.

    git worktree add /tmp/before <commit>
    python benchmarks/compare_trees.py /tmp/before/src src --rounds 6

Each round starts a cluster of two processes from either tree and takes the best median of many short segments: the
figure that disturbances by other programs change least. Printed are all figures, and the medians of both columns.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys

PROGRAM = """
import os, statistics, sys, time
import farcall
from farcall.cli.bench.functions import noop

def timed():
    begun = time.perf_counter()
    farcall.rpc_sync("w1", noop)
    return time.perf_counter() - begun

rank = 0 if os.fork() else 1
options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}", busy_wait_s=250e-6)
farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    for _ in range(2000):
        timed()
    print(min(statistics.median(timed() for _ in range(500)) for _ in range(40)) * 1e6, flush=True)
farcall.shutdown()
if rank == 0:
    os.wait()
"""


def measure(tree: str) -> float:
    """The best median, in microseconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(port)],
        env={**os.environ, "PYTHONPATH": os.path.abspath(tree)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return float(done.stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a folder that holds the package farcall")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=6)
    chosen = parser.parse_args()
    figures: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(chosen.rounds):
        for name, tree in (("before", chosen.before), ("after", chosen.after)):
            figures[name].append(measure(tree))
        print(f"before {figures['before'][-1]:7.2f} us   after {figures['after'][-1]:7.2f} us", flush=True)
    before, after = (statistics.median(figures[name]) for name in ("before", "after"))
    print(f"median {before:7.2f} us         {after:7.2f} us   {100 * (after / before - 1):+.1f} %")
    print(f"best   {min(figures['before']):7.2f} us         {min(figures['after']):7.2f} us")


if __name__ == "__main__":
    main()
