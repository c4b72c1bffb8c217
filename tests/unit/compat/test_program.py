"""A program that is interrupted under `farcall run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from farcall.compat import program


class Pieces:
    """A stream that keeps each write."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)


def interrupted(arguments: Sequence[str]) -> None:
    raise KeyboardInterrupt


def test_the_line_about_an_interruption_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread logs to the same stream: its line once came between this one and its end."""
    stderr = Pieces()
    codes: list[int] = []
    monkeypatch.setenv("FARCALL_RESTARTS", "0")
    monkeypatch.setenv("FARCALL_INSTALL", "1")  # set by `run_program`: put back afterwards
    monkeypatch.setattr(program, "install", lambda: None)
    monkeypatch.setattr(program, "_execute", interrupted)
    monkeypatch.setattr(program, "_end_now", codes.append)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    program.run_program(["program.py"])
    [line] = stderr.written
    assert line.startswith("interrupted at ")
    assert line.endswith(" in interrupted\n")
    assert codes == [130]
