"""The examples run: those that train reach the loss of their single-process twins, and check that themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("parameter_server", "the same, bit for bit, as in one process"),
        ("pipeline", "from those of one process"),
        ("restart", "the same, bit for bit, as in one process that nobody disturbed"),
        ("deadlock", "CYCLE: left and right wait for each other"),
    ],
)
def test_an_example(name: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
