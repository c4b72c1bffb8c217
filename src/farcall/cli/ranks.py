"""The rank of a process that ``mpirun`` or ``srun`` starts, in the variables of ``torchrun``.

`farcall run PROGRAM` without ``--workers`` is one process; started several times by one of these launchers, it learns
here its rank and the meeting place. Variables that the user has set stay as they are.

    started by             rank, size                        the meeting place
    mpirun (Open MPI)      OMPI_COMM_WORLD_RANK, _SIZE       one host: a port that rank 0 tells in mpirun's folder
                                                             several: MASTER_ADDR and MASTER_PORT, which the user gives
    mpiexec (MPICH)        PMI_RANK, PMI_SIZE                MASTER_ADDR and MASTER_PORT, which the user gives
    srun                   SLURM_PROCID, SLURM_STEP_NUM_TASKS     the step's first node, a port by the job's number

A batch script of Slurm's has SLURM_PROCID as well, and so has the shell of `salloc`: neither is a task among others.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from farcall.errors import InitError

MEETING_S = 60.0
"""How long a rank waits for the port that rank 0 tells."""
LOOK_S = 0.05
_PORTS = range(20_000, 32_000)
"""Below those that the system gives to clients."""
_FIRST_OWN_STEP = 0xFFFFFFF0
"""From here on the numbers of Slurm's steps mean its own: the batch script, an interactive shell."""


class _Launcher(NamedTuple):
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    meet: Callable[[Mapping[str, str]], dict[str, str]]


def told_by_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of the program; none where it was not started by such a launcher."""
    if "RANK" in environ:
        return {}
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and launcher.size in environ and not _is_slurms_own(launcher, environ):
            names = {
                "RANK": launcher.rank,
                "WORLD_SIZE": launcher.size,
                "LOCAL_RANK": launcher.local_rank,
                "LOCAL_WORLD_SIZE": launcher.local_size,
            }
            told = {name: environ[theirs] for name, theirs in names.items() if theirs in environ}
            if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
                told |= launcher.meet(environ)
            return {name: text for name, text in told.items() if name not in environ}
    return {}


def _is_slurms_own(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    if launcher.name != "srun":
        return False
    step = environ.get("SLURM_STEP_ID", "")
    return not step.isdecimal() or int(step) >= _FIRST_OWN_STEP


def _meet_in_folder(environ: Mapping[str, str]) -> dict[str, str]:
    folder = environ.get("PMIX_SERVER_TMPDIR")
    if folder is None or environ["OMPI_COMM_WORLD_LOCAL_SIZE"] != environ["OMPI_COMM_WORLD_SIZE"]:
        return _ask_user(environ)
    # The folder is one run's, and mpirun removes it. A program may be run after another one in it: one file for each.
    file = Path(folder, f"farcall-{environ.get('PMIX_NAMESPACE', '')}")
    if environ["OMPI_COMM_WORLD_RANK"] == "0":
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            unfinished = file.with_suffix(".new")
            unfinished.write_text(str(listening.getsockname()[1]))
            unfinished.rename(file)  # whole, or not there
    give_up_at = time.monotonic() + MEETING_S
    while not file.exists():  # a moment, as mpirun starts all ranks together
        if time.monotonic() > give_up_at:
            raise InitError(f"rank 0 of this mpirun did not write its port to {file} within {MEETING_S:.0f} s")
        time.sleep(LOOK_S)
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": file.read_text()}


def _ask_user(environ: Mapping[str, str]) -> dict[str, str]:
    raise InitError(
        "mpirun does not name the host of rank 0: export MASTER_ADDR (that host), MASTER_PORT (a free port there) "
        "and FARCALL_SECRET, and start with `mpirun -x MASTER_ADDR -x MASTER_PORT -x FARCALL_SECRET ...`"
    )


def _meet_at_first_node(environ: Mapping[str, str]) -> dict[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=MEETING_S, check=True
    )
    number = int(environ["SLURM_JOB_ID"]) * 37 + int(environ["SLURM_STEP_ID"])
    return {"MASTER_ADDR": listed.stdout.split()[0], "MASTER_PORT": str(_PORTS[number % len(_PORTS)])}


_LAUNCHERS = (
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        _meet_in_folder,
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", _ask_user),
    # How many tasks a node has, Slurm tells for all nodes at once, as "4(x2),3".
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", _meet_at_first_node),
)
