"""docs/commands.md speaks of every command."""

from __future__ import annotations

from pathlib import Path

from farcall.cli.app import app

PAGE = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()


def test_each_command_is_on_the_page() -> None:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert "doctor" in names
    assert [name for name in names if f"`farcall {name}" not in PAGE] == []
