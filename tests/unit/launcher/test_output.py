"""The output of several workers in one stream."""

from __future__ import annotations

import io

import pytest

from farcall.launcher import output
from farcall.launcher.output import LONGEST_LINE_BYTES, LastLines, Output, WorkerOutput


@pytest.fixture(autouse=True)
def _without_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


class Screen:
    """An output into memory."""

    def __init__(self, is_terminal: bool = False) -> None:
        self._bytes = io.BytesIO()
        file = io.TextIOWrapper(self._bytes, write_through=True)
        self.output = Output(file, is_terminal=is_terminal)
        self.zero, self.one = self.output.source("0", 0), self.output.source("1", 1)

    def text(self) -> bytes:
        return self._bytes.getvalue()


def test_a_line_wider_than_the_terminal_stays_one_line() -> None:
    screen = Screen()
    line = b'{"x": "' + 100 * b"y" + b'"}\n'
    screen.zero.write(line)
    assert screen.text() == b"0 | " + line


@pytest.mark.parametrize("data", [b"\xff\xfe\x00\n", b"[bold]not ours[/]\n", b"\x1b[31mred\x1b[0m\n", b"a\tb  \n"])
def test_bytes_are_not_touched(data: bytes) -> None:
    screen = Screen()
    screen.zero.write(data)
    assert screen.text() == b"0 | " + data


def test_no_line_gets_into_another() -> None:
    screen = Screen()
    screen.zero.write(b"one half, ")
    screen.one.write(b"whole\n")
    screen.zero.write(b"the other\n")
    assert screen.text() == b"1 | whole\n0 | one half, the other\n"


def test_progress_bars_are_shown_as_they_come() -> None:
    screen = Screen()
    screen.zero.write(b"10 %\r")
    screen.zero.write(b"20 %\r")
    assert screen.text() == b"0 | 10 %\r0 | 20 %\r"
    screen.zero.write(b"\n")
    assert screen.text() == b"0 | 10 %\r0 | 20 %\r\n"


def test_progress_bars_that_begin_with_the_return() -> None:
    screen = Screen()
    for data in (b"\r10 %", b"\r20 %", b"\r30 %\n"):
        screen.zero.write(data)
    assert screen.text() == b"\r0 | 10 %\r0 | 20 %\r0 | 30 %\n"


def test_lines_that_end_as_on_windows() -> None:
    screen = Screen()
    screen.zero.write(b"a\r\nb\r")
    screen.zero.write(b"\n")
    assert screen.text() == b"0 | a\r\n0 | b\r\n"


def test_the_last_line_need_not_end() -> None:
    screen = Screen()
    screen.zero.write(b"no end")
    screen.zero.end()
    screen.one.write(b"next\n")
    assert screen.text() == b"0 | no end\n1 | next\n"


def test_a_terminal_shows_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    for is_terminal, shown in ((True, b"0 | sure? "), (False, b"")):
        screen = Screen(is_terminal)
        screen.zero.write(b"sure? ")
        screen.output.show_unfinished()
        assert screen.text() == b""
        now += 1.0
        screen.output.show_unfinished()
        assert screen.text() == shown


def test_on_a_terminal_bars_of_two_workers_share_a_line() -> None:
    screen = Screen(is_terminal=True)
    screen.zero.write(b"a long bar\r")
    screen.one.write(b"short\r")
    assert screen.text() == b"0 | a long bar\r\x1b[K1 | short\r"


def test_names_have_colors_and_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    bytes_ = io.BytesIO()
    shown = Output(io.TextIOWrapper(bytes_, write_through=True), is_terminal=True, width=8)
    shown.source("worker9", 0).write(b"a\n")
    shown.source("worker10", 1).write(b"b\n")
    assert bytes_.getvalue() == b"\x1b[36m worker9 |\x1b[0m a\n\x1b[32mworker10 |\x1b[0m b\n"


def test_no_line_gets_into_one_that_the_program_itself_prints() -> None:
    bytes_ = io.BytesIO()
    file = io.TextIOWrapper(bytes_, line_buffering=True)
    source = Output(file).source("0", 0)
    file.write("mine, ")  # as `print` does, one argument after the other
    source.write(b"first\n")
    source.write(b"second\n")
    file.write("whole\n")
    source.write(b"third\n")
    assert bytes_.getvalue() == b"0 | first\n0 | second\nmine, whole\n0 | third\n"


def test_a_status_fits_into_one_line_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    bytes_ = io.BytesIO()
    file = io.TextIOWrapper(bytes_, write_through=True)
    shown = WorkerOutput(Output(file, is_terminal=True), None)
    shown.show_status("pending:\n  more than fits")
    assert bytes_.getvalue().replace(b"\x1b[K", b"") == b"pending: mo\r"
    shown.write("a process", "worker0", 0, b"line\n")
    shown.show_status("")
    assert bytes_.getvalue().replace(b"\x1b[K", b"") == b"pending: mo\rworker0 | line\n\r"


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"half a ", b"line\nlast words"], ["half a line", "last words"]),
        ([b"10 %\r", b"20 %\r", b"30 %\r\n", b"done\n"], ["30 %", "done"]),
        ([b"\r10 %", b"\r20 %", b"\r30 %", b"\n"], ["30 %"]),
        ([b"dos\r", b"\n", b"2\r\n"], ["dos", "2"]),
        ([b"a\nb\nc\nd\n"], ["b", "c", "d"]),
        ([b"x" * LONGEST_LINE_BYTES] * 3 + [b"y"], ["x" * (LONGEST_LINE_BYTES - 1) + "y"]),
    ],
)
def test_last_lines_are_few_and_bounded(pieces: list[bytes], lines: list[str]) -> None:
    kept = LastLines(3)
    for piece in pieces:
        kept.write(piece)
    assert kept.texts() == lines


def test_a_notebook_takes_text_alone() -> None:
    file = io.StringIO()
    Output(file).source("worker0", 0).write(b"caf\xc3\xa9 \xff\n")
    assert file.getvalue() == "worker0 | caf\u00e9 \ufffd\n"
