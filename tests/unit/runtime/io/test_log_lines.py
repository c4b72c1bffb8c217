"""What members choose makes no lines of the log, and does nothing to a terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import farcall  # with it, the logger has its filters

LOGGER = logging.getLogger("farcall")
HOSTILE = "w0\x1b[2J\r\n2026-11-19 08:00:00.000 INFO    1 farcall: all is well \x9b\u202e\u2028\x85\x00\ud800"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a handler without a formatter of its own writes, as Python's last resort is one."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    LOGGER.addHandler(handler)
    yield written
    LOGGER.removeHandler(handler)


def test_an_event_is_one_line_whoever_chose_its_words(log: io.StringIO) -> None:
    LOGGER.warning("%s: %s cannot be reached", HOSTILE, OSError(HOSTILE))
    (line,) = log.getvalue().splitlines()
    assert line.isprintable()
    assert "\\x1b[2J\\r\\n2026" in line


def test_a_traceback_stays_readable_and_no_line_of_it_looks_like_an_event(log: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        LOGGER.exception("a task failed")
    first, *others = log.getvalue().splitlines()
    assert first == "a task failed"
    assert all(line.isprintable() and line.startswith("  ") for line in others)
    assert "  Traceback (most recent call last):" in others


def test_words_of_farcall_itself_pass_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    LOGGER.warning("%s waits for %d of them", "Zoë", 3)
    assert caplog.messages == ["Zoë waits for 3 of them"]
    assert caplog.records[0].args == ("Zoë", 3)  # programs that group events by their words find those


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_printed_raises_nothing(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    LOGGER.propagate = False
    try:
        LOGGER.warning("it failed: %s", Unprintable())
        raise Unprintable
    except Unprintable:
        LOGGER.exception("it failed")
    finally:
        LOGGER.propagate = True
    assert log.getvalue().startswith("it failed\n  Traceback")


def test_no_module_logs_past_it() -> None:
    for path in Path(farcall.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert "getLogger(" not in line or '"farcall"' in line or path.name == "log_room.py", path
