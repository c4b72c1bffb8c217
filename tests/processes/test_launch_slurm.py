"""Workers by a real Slurm of two nodes: inside an allocation and outside; called, killed, ended with their driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.launched import check_launch
from tests.kit.launching import DRIVER_PROGRAM, ROOT, START_S, check_killed_driver, driver, runs, wait_gone
from tests.kit.rigs.slurm import slurm_cluster
from tests.kit.waiting import wait_until

from farcall.launcher.engines.slurm import SlurmEngine

pytestmark = pytest.mark.timeout(600)
IMPORTS = "from farcall.launcher.engines.slurm import SlurmEngine"


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with slurm_cluster() as environment:
        yield environment


@pytest.fixture(autouse=True)
def in_reach(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])


def jobs() -> list[str]:
    return subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, timeout=60).stdout.split()


def test_launch() -> None:
    check_launch("slurm", nodes=2, args=["--time=10"])
    wait_until(lambda: not jobs(), "the nodes were given back")


def test_outside_an_allocation_one_is_asked_for(tmp_path: Path) -> None:
    """One worker is killed, one is started again, all end with the engine, and the nodes are given back."""
    engine = SlurmEngine(nodes=2, args=["--time=10"])
    with driver(tmp_path) as launched:
        try:
            specs = launched.start(engine, 2)
            assert launched.watching.states[specs[0]][0].phase == "queued"
            nodes = [launched.node[spec.name].call(os.getenv, "SLURMD_NODENAME") for spec in specs]
            assert nodes == ["node0", "node1"]
            assert len(jobs()) == 1
            first, second = launched.process_ids(specs)
            os.kill(second, signal.SIGKILL)
            assert launched.wait_ended(specs[1]).exit_code == -signal.SIGKILL
            again = launched.spec(1, life=1)
            engine.start([again], launched.watching)
            launched.wait_joined([again])
            (third,) = launched.process_ids([again])
        finally:
            engine.close()
        wait_gone([first, third])
    wait_until(lambda: not jobs(), "the nodes were given back")


def test_no_worker_or_allocation_outlives_its_driver(slurm: dict[str, str]) -> None:
    check_killed_driver(IMPORTS, "SlurmEngine(args=['--time=10'])", environment=slurm)
    wait_until(lambda: not jobs(), "the nodes were given back")


def test_inside_a_batch_job_its_nodes_are_used(slurm: dict[str, str], tmp_path: Path) -> None:
    """The script is the driver; when the job is cancelled, nothing of it is left."""
    program = tmp_path / "driver.py"
    program.write_text(DRIVER_PROGRAM.format(imports=IMPORTS, engine="SlurmEngine()", size=2))
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -u {program}\n")
    said = tmp_path / "said"
    subprocess.run(
        ["sbatch", "--nodes=2", "--ntasks=2", "--time=10", f"--chdir={ROOT}", f"--output={said}", str(script)],
        env={**slurm, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=True,
        timeout=60,
    )
    try:
        wait_until(lambda: said.exists() and "workers " in said.read_text(), "the workers are there", START_S)
        wait_until(lambda: said.read_text().endswith("\n"), "all was said")
        workers = [int(word) for word in said.read_text().splitlines()[-1].split()[1:]]
        assert len(workers) == 2, said.read_text()
        assert all(map(runs, workers))
    finally:
        subprocess.run(["scancel", *jobs()], check=True, timeout=60)
    wait_gone(workers)


def test_what_slurm_refuses_is_told(tmp_path: Path) -> None:
    engine = SlurmEngine(args=["--partition=nowhere"])
    with driver(tmp_path) as launched:
        try:
            spec = launched.spec(0)
            engine.start([spec], launched.watching)
            assert "Invalid partition" in str(launched.wait_ended(spec))
        finally:
            engine.close()


def test_a_worker_that_waits_for_nodes_says_why_and_can_be_ended(tmp_path: Path) -> None:
    engine = SlurmEngine(args=["--begin=now+1hour"])
    with driver(tmp_path) as launched:
        try:
            spec = launched.spec(0)
            engine.start([spec], launched.watching)
            states = launched.watching.states[spec]
            wait_until(lambda: "BeginTime" in states[-1].detail, "Slurm's reason is told")
            engine.end([spec])
            assert str(launched.wait_ended(spec)) == "ended (before it was started)"
        finally:
            engine.close()
    wait_until(lambda: not jobs(), "nothing is asked for any more")
