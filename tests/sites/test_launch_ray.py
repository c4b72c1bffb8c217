"""Workers by a real Ray cluster of three nodes: called, killed, ended with their driver; a node dies under load.

Not among the processes' tests, which look for descriptors left open: a process that was connected to Ray keeps some.
"""

from __future__ import annotations

import json
import operator
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.launched import check_launch
from tests.kit.launching import Driver, check_killed_driver, driver, wait_gone
from tests.kit.rigs.ray import RayRig, ray_cluster

from farcall.launcher.engine import WorkerSpec
from farcall.launcher.engines.ray import RayEngine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster() as running:
        patch.setenv("RAY_TQDM_PATCH_PRINT", "0")  # it would replace `print`, for the tests that follow here, too
        import ray

        ray.init(address=running.address, log_to_driver=False)
        yield running
        ray.shutdown()


def node_of(launched: Driver, spec: WorkerSpec) -> str:
    running = next(state for state in launched.watching.states[spec] if state.phase == "running")
    return running.detail.split()[2]


def test_launch(rig: RayRig) -> None:
    check_launch("ray", resources={"CPU": 1}, strategy="SPREAD")


def test_workers_are_killed_and_started_again(rig: RayRig, tmp_path: Path) -> None:
    engine = RayEngine(strategy="SPREAD")
    with driver(tmp_path) as launched:
        try:
            specs = launched.start(engine, 3)
            assert {node_of(launched, spec) for spec in specs} == set(rig.nodes)
            first, second, third = launched.process_ids(specs)
            os.kill(second, signal.SIGKILL)
            assert launched.wait_ended(specs[1]).exit_code == -signal.SIGKILL
            again = launched.spec(1, life=1)
            engine.start([again], launched.watching)
            launched.wait_joined([again])
            (fourth,) = launched.process_ids([again])
            engine.end([specs[2]])
            launched.wait_ended(specs[2])
            wait_gone([third])
        finally:
            engine.close()
        wait_gone([first, fourth])


def test_no_worker_outlives_its_driver(rig: RayRig) -> None:
    imports = "from farcall.launcher.engines.ray import RayEngine"
    check_killed_driver(imports, f"RayEngine(address={rig.address!r})", environment=rig.environment)


def test_the_doctor_looks_at_each_node(rig: RayRig) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from farcall.cli import main; main()", "doctor", "--on", "ray", "--json"],
        env=rig.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = {finding["subject"]: finding for finding in json.loads(ended.stdout)["findings"]}
    assert told["cluster"]["found"].startswith("3 nodes"), told["cluster"]
    assert [told[f"node {node[:8]}"]["state"] for node in rig.nodes] == ["ok"] * 3, told


def test_a_node_dies_under_load(rig: RayRig, tmp_path: Path) -> None:
    """Its worker ends and is told as such; the other works on; the lost one comes back on another node."""
    engine = RayEngine(strategy="STRICT_SPREAD")
    with driver(tmp_path) as launched:
        try:
            specs = launched.start(engine, 2)
            lost = next(spec for spec in specs if node_of(launched, spec) != rig.nodes[0])
            (kept,) = (spec for spec in specs if spec is not lost)
            answers, enough = [], threading.Event()

            def load() -> None:
                while not enough.is_set():
                    answers.append(launched.node[kept.name].call(operator.add, len(answers), 1))

            loading = threading.Thread(target=load)
            loading.start()
            try:
                (process,) = launched.process_ids([lost])
                rig.kill(rig.nodes.index(node_of(launched, lost)))
                state = launched.wait_ended(lost)
                assert "node" in state.detail, state
                wait_gone([process])
                again = launched.spec(lost.rank, life=1)
                engine.start([again], launched.watching)
                launched.wait_joined([again])
                assert node_of(launched, again) not in (node_of(launched, lost), node_of(launched, kept))
            finally:
                enough.set()
                loading.join()
            assert answers == list(range(1, len(answers) + 1))
        finally:
            engine.close()
