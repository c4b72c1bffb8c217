"""Every type of the package is written down, as a type checker of a program that uses farcall sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright", reason="the dev extra is not installed")


def test_pyright_knows_the_type_of_every_public_name(tmp_path: Path) -> None:
    # pyright asks the interpreter that it finds first for the places to look in; its own node is in the same folder.
    # From elsewhere: in the repository it would take the tests for a part of the package.
    programs = str(Path(sys.executable).parent)
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "farcall", "--ignoreexternal"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join([programs, os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    problems = found.stdout.partition("Symbols used in public interface:")[2]
    assert found.returncode == 0, f"annotate these:\n{problems or found.stdout}\n{found.stderr}"
    assert "Type completeness score: 100%" in found.stdout
