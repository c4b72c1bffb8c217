"""What the command line refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from farcall.cli.app import app


@pytest.mark.parametrize("option", ["--restart=1", "--keep-going", "--on=ssh"])
def test_options_that_need_workers(option: str) -> None:
    result = CliRunner().invoke(app, ["run", option, "program.py"])
    assert result.exit_code == 2
    assert "--workers" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-w", "2", "program.py"], "No such option: -w (did you mean --workers?)"),
        (["-n", "2", "program.py"], "No such option: -n (did you mean --workers?)"),
        (["--nproc_per_node=2", "program.py"], "No such option: --nproc_per_node=2 (did you mean --workers?)"),
        (["--workers", "2", "--restrat=3", "program.py"], "No such option: --restrat=3 (did you mean --restart?)"),
        (["-z", "program.py"], "No such option: -z"),
        (["demo"], "demo is no program: name a file, or -m and a module"),  # nor is it the command of that name
        (["--workers", "2", "-m"], "-m is no program: name a file, or -m and a module"),
    ],
)
def test_run_names_its_own_usage(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments], prog_name="farcall", env={"COLUMNS": "100"})
    assert result.exit_code == 2
    assert "Usage: farcall run [OPTIONS]" in result.output
    assert told in result.output
