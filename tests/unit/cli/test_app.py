"""What the command line refuses."""

from __future__ import annotations

from typer.testing import CliRunner

from farcall.cli.app import app


def test_restart_needs_workers() -> None:
    result = CliRunner().invoke(app, ["run", "--restart", "1", "program.py"])
    assert result.exit_code == 2
    assert "--workers" in result.output
