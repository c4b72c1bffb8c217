"""Every type of the package is written down, as a type checker of a program that uses farcall sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.type_check import run_mypy

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
        timeout=280,
    )
    problems = found.stdout.partition("Symbols used in public interface:")[2]
    assert found.returncode == 0, f"annotate these:\n{problems or found.stdout}\n{found.stderr}"
    assert "Type completeness score: 100%" in found.stdout


TYPED = """
from typing import assert_type

import torch

import farcall


async def wait(x: int) -> str:
    return str(x)


@farcall.functions.async_execution
def later(x: int) -> torch.futures.Future[int]:
    return torch.futures.Future()


def plain() -> float:
    return 1.0


class Table:
    def get(self, key: str) -> bytes:
        return key.encode()


def use(node: farcall.Node) -> None:
    assert_type(farcall.rpc_sync("w1", wait, (1,)), str)
    assert_type(farcall.rpc_async("w1", wait, (1,)), farcall.Future[str])
    assert_type(farcall.remote("w1", wait, (1,)), farcall.RRef[str])
    assert_type(farcall.rpc_sync("w1", later, (1,)), int)
    assert_type(farcall.rpc_sync("w1", plain), float)
    assert_type(farcall.remote("w1", Table).rpc_sync().get("x"), bytes)
    assert_type(node.rpc_sync("w1", wait, (1,)), str)
"""


def test_a_call_has_the_type_that_its_caller_gets(tmp_path: Path) -> None:
    """Not that of a coroutine, or of a future, which only the callee sees."""
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    checked = run_mypy(program)
    assert checked.returncode == 0, checked.stdout
