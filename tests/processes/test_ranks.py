"""Programs under mpirun and srun: `farcall run` translates what these tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.rigs.programs import found_or_skip
from tests.kit.rigs.slurm import slurm_cluster

PROGRAM = """
import os

import farcall

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
farcall.init_rpc(f"worker{rank}", rank=rank, world_size=size)
answer = farcall.rpc_sync(f"worker{(rank + 1) % size}", divmod, args=(rank, 2))
farcall.shutdown()
os.write(1, f"{rank} of {size}: {answer}\\n".encode())
"""
pytestmark = pytest.mark.timeout(600)
RUN = (sys.executable, "-c", "from farcall.cli import main; main()", "run")
EXPECTED = ["0 of 3: (0, 0)", "1 of 3: (0, 1)", "2 of 3: (1, 0)"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_mpirun(program: Path) -> None:
    (mpirun,) = found_or_skip("openmpi-bin", "mpirun")
    ended = subprocess.run(
        [mpirun, "--oversubscribe", "-n", "3", *RUN, str(program)],
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == EXPECTED


def test_srun(program: Path) -> None:
    with slurm_cluster() as environment:
        # Both nodes are this machine, which is not called as they are.
        ended = subprocess.run(
            ["srun", "--nodes=2", "--ntasks=3", *RUN, str(program)],
            env={**environment, "MASTER_ADDR": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == EXPECTED
