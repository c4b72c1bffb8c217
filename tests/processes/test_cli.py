"""The commands, run as a user would run them, for as short a time as they allow."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.kit.wheel import Installed

import farcall


def farcall_command(installed: Installed, *arguments: str) -> subprocess.CompletedProcess[str]:
    return installed.run(installed.command, *arguments)


def test_bench_measures_all_three(installed: Installed, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    places = ["--json", str(figures), "--plot", str(picture)]
    done = farcall_command(installed, "bench", "--quick", "--rounds", "1", "--only", "^no-op$|^send 64 KiB$", *places)
    assert done.returncode == 0, done.stderr
    document = json.loads(figures.read_text())
    assert document["failures"] == []
    assert [case["name"] for case in document["cases"]] == ["no-op", "send 64 KiB"]
    for case in document["cases"]:
        medians = case["statistics"]["p50"]["median"]
        assert all(medians[contender] > 0 for contender in ("floor", "stock", "farcall"))
    assert picture.read_text().startswith("<svg")


def test_bench_names_its_cases_where_none_matches(installed: Installed) -> None:
    done = farcall_command(installed, "bench", "--only", "no such case")
    assert done.returncode == 2
    assert "no case matches" in done.stderr


def test_version(installed: Installed) -> None:
    done = farcall_command(installed, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"farcall {farcall.__version__} (torch ")
