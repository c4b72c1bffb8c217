"""Test processes begin with what `tests.kit.preloaded` has loaded, programs of tests load torch without collections.

Where either failed, nothing but the clock would tell.
"""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
from tests.kit.times import LONG_S
from tests.kit.wheel import Installed

from farcall.testing.cluster import finish, start_processes


def look(rank: int) -> tuple[bool, float]:
    return "tests.kit.preloaded" in sys.modules, numpy.random.random()


def test_processes_share_what_was_loaded_and_no_random_numbers() -> None:
    loaded, numbers = zip(*finish(start_processes(3, look)), strict=True)
    assert all(loaded)
    assert len(set(numbers)) == 3


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
