"""Which worker of xdist runs a test: any of them, but one for all tests of some files.

The mark ``xdist_group`` is meant for that. xdist 3.8 writes it into a field that pytest 9.2 no longer has, so it does
nothing there, and nobody says so: PyTorch's suite ran once in each worker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "tests/conformance/test_conformance.py",  # the first test that asks has the suite servers run all of them
    "tests/conformance/test_driver.py",  # the same, for samples
    "tests/processes/test_a_call.py",  # traced once
    "tests/processes/test_launch_slurm.py",  # one cluster
    "tests/processes/test_site.py",  # built once
    "tests/processes/test_torchscript.py",  # one program has the results of most
    "tests/sites/test_launch_ray.py",  # one cluster
}
"""Files whose tests share what takes long to make."""


class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]
    """The tests in the order in which they were found, one at a time, or a whole file of `TOGETHER`."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path in TOGETHER else nodeid


def folder_of_the_run(worker: pytest.TempPathFactory) -> Path:
    """A temporary folder that all workers of this run share; each has one of its own below it."""
    base = worker.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def only_one_worker(what: str, worker: pytest.TempPathFactory) -> None:
    """Fail in the second worker that gets here: nobody would see but the clock that all is done twice."""
    try:
        (folder_of_the_run(worker) / f"one worker, {what}").touch(exist_ok=False)
    except FileExistsError:
        pytest.fail(f"two workers share {what}: run pytest with --dist loadgroup")
