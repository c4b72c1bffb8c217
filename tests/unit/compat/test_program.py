"""A program under `farcall run`: interrupted, or in want of a rank."""

from __future__ import annotations

import signal
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


def test_an_interruption_ends_the_process_at_once_while_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def look(*_: object) -> None:
        found.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setenv("FARCALL_INSTALL", "1")  # set by `run_program`: put back afterwards
    monkeypatch.setattr(program, "install", look)
    monkeypatch.setattr(program, "_execute", look)
    for handler in (signal.default_int_handler, signal.SIG_IGN):
        before = signal.signal(signal.SIGINT, handler)
        try:
            program.run_program(["program.py"])
        finally:
            signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN, signal.SIG_IGN]


def test_a_missing_rank_is_told_with_the_command_that_sets_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(arguments: Sequence[str]) -> None:
        raise KeyError("RANK")

    monkeypatch.setenv("FARCALL_INSTALL", "1")  # set by `run_program`: put back afterwards
    monkeypatch.setattr(program, "install", lambda: None)
    monkeypatch.setattr(program, "_execute", execute)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # process groups of other tests have put torch's there
    with pytest.raises(SystemExit):
        program.run_program(["program.py", "--workers", "2"])
    *_, error, note = capsys.readouterr().err.splitlines()
    assert error == "KeyError: 'RANK'"
    assert note == "`farcall run --workers N PROGRAM` sets it; options after PROGRAM are the program's own"
