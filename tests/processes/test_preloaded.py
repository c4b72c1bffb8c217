"""Test processes begin with what `tests.kit.preloaded` has loaded, programs of tests load torch without collections.

Where either failed, nothing but the clock would tell.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from tests.kit.wheel import Installed

from farcall.testing.cluster import finish, start_processes


def look(rank: int) -> tuple[bool, float]:
    return "tests.kit.preloaded" in sys.modules, numpy.random.random()


def test_processes_share_what_was_loaded_and_no_random_numbers() -> None:
    loaded, numbers = zip(*finish(start_processes(3, look)), strict=True)
    assert all(loaded)
    assert len(set(numbers)) == 3


def test_a_signal_to_a_process_that_the_fork_server_has_reaped_is_no_error() -> None:
    """A test lets a process go on that it has stopped, and the process may end before that."""
    (process,) = start_processes(1, look)
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists(), "nobody is left of the process")
    process.kill(signal.SIGCONT)
    finish([process])


FROZEN = "import torch, gc; print(gc.get_freeze_count() > 100_000, gc.isenabled())"


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_program_loads_torch_without_collections_and_collects_afterwards(
    installed: Installed, is_installed: bool
) -> None:
    if is_installed:
        done = installed.run(installed.python, "-c", FROZEN)
    else:
        done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=10 * LONG_S)
    assert done.stdout.split() == ["True", "True"], done.stderr
