"""A Ray cluster on this machine: a head and two more nodes (three raylets), in a process of its own.

Run as a program, this file is that process: it says where the cluster is, and obeys lines on stdin (``kill 1``) until
stdin ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NODES = 3
CPUS = 4
"""Of each node, as Ray is told."""
MEMORY_BYTES = 100_000_000
ENDING_S = 250.0
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_enable_worker_prestart": "false",  # a process for each CPU that nobody asked for
    "RAY_DEDUP_LOGS": "0",
    # The head notices a dead node by its closed connection or by these: its defaults are 5 times as patient.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


class RayRig:
    """A cluster that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        answer = self._answer()
        self.address: str = answer["address"]
        self.nodes: list[str] = answer["nodes"]
        """Their ids; the first is the head."""
        self.environment = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": self.address}

    def kill(self, node: int) -> None:
        """SIGKILL for a node's raylet, as if its machine had lost power; returns when it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"kill {node}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the Ray cluster ended with {self._process.wait(ENDING_S)}")


@contextmanager
def ray_cluster() -> Iterator[RayRig]:
    """The nodes are there once this is entered."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install ray")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.rigs.ray"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield RayRig(process)
    finally:
        process.communicate(timeout=ENDING_S)


def main() -> None:
    from ray.cluster_utils import Cluster

    resources = {"num_cpus": CPUS, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=resources)
    nodes = [cluster.head_node, *(cluster.add_node(**resources) for _ in range(1, NODES))]
    cluster.wait_for_nodes()
    try:
        print(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in nodes]}), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line.split()[1])], allow_graceful=False)
            print(json.dumps({"killed": line.split()[1]}), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
