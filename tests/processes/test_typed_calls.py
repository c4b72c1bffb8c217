"""A type checker accepts right calls through handles, and refuses wrong ones: names, counts and types of arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright", reason="the dev extra is not installed")
PROGRAM = Path(__file__).parent / "typed" / "calls.py"


def test_pyright_refuses_exactly_the_wrong_calls(tmp_path: Path) -> None:
    # Away from the repository and its configuration; see test_public_types.py.
    lines = PROGRAM.read_text().splitlines()
    (tmp_path / "calls.py").write_text("\n".join(["# pyright: strict", *lines[1:]]))
    programs = str(Path(sys.executable).parent)
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "calls.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join([programs, os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = json.loads(found.stdout)
    said = {problem["range"]["start"]["line"] + 1: problem["message"] for problem in report["generalDiagnostics"]}
    refused = {number for number, line in enumerate(lines, 1) if "# refused:" in line}
    wrongly = {number: said[number] for number in said.keys() - refused}
    assert not wrongly, "\n".join(f"line {number}: {text}" for number, text in wrongly.items())
    assert not refused - said.keys(), f"pyright takes these for right calls: {sorted(refused - said.keys())}"
