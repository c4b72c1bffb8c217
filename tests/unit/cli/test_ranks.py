"""What a launcher tells, translated."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall.cli.ranks import told_by_launcher
from farcall.errors import InitError

PLACE = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}


def open_mpi(rank: int, folder: Path, local_size: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_SERVER_TMPDIR": str(folder),
        "PMIX_NAMESPACE": "17",
    }


def test_nobody_started_several() -> None:
    assert told_by_launcher({"HOME": "/"}) == {}


def test_the_users_word_comes_first() -> None:
    assert told_by_launcher({"RANK": "3", "PMI_RANK": "0", "PMI_SIZE": "2"}) == {}


def test_ranks_of_one_mpirun_agree_on_a_port(tmp_path: Path) -> None:
    first, second = (told_by_launcher(open_mpi(rank, tmp_path)) for rank in (0, 1))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["LOCAL_WORLD_SIZE"] == first["WORLD_SIZE"] == "2"


def test_several_hosts_of_mpirun_need_a_place(tmp_path: Path) -> None:
    environ = open_mpi(1, tmp_path, local_size=1)
    with pytest.raises(InitError, match="-x MASTER_ADDR"):
        told_by_launcher(environ)
    told = told_by_launcher(environ | PLACE)
    assert told["RANK"] == "1"
    assert "MASTER_ADDR" not in told


def test_mpich() -> None:
    told = told_by_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", **PLACE})
    assert told == {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(("step", "is_task"), [(None, False), ("0", True), ("4294967290", False)])
def test_a_shell_of_slurms_is_no_task(step: str | None, is_task: bool) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", **PLACE}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert told_by_launcher(environ) == ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"} if is_task else {})
