"""FARCALL_LOG: off unless asked for, and one line for each event."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall.observe.logs import _OwnHandler, log_as_told
from farcall.options import ObservingOptions, RpcBackendOptions

LOGGER = logging.getLogger("farcall")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level, propagate, handlers = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    yield
    for handler in [one for one in LOGGER.handlers if one not in handlers]:
        LOGGER.removeHandler(handler)
        if isinstance(handler, _OwnHandler) and ":" in handler.told:
            handler.stream.close()
    LOGGER.setLevel(level)
    LOGGER.propagate = propagate


def test_nothing_is_changed_by_default() -> None:
    before = list(LOGGER.handlers)
    log_as_told(None)
    assert LOGGER.handlers == before


def test_to_a_file_from_a_level_on(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log_as_told(f"info:{file}")
    LOGGER.info("%s is connected to %s", "w0", "w1")
    LOGGER.debug("too much")
    assert file.stat().st_mode & 0o777 == 0o600  # errors that functions raised are in it
    (line,) = file.read_text().splitlines()
    assert line.endswith("farcall: w0 is connected to w1")
    assert "INFO" in line


def test_the_last_word_counts_and_no_line_comes_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    log_as_told(f"info:{first}")
    log_as_told(f"debug:{second}")
    log_as_told(f"debug:{second}")
    LOGGER.debug("once")
    assert first.read_text() == ""
    assert second.read_text().count("once") == 1


def test_the_option_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().observing.log is None
    monkeypatch.setenv("FARCALL_LOG", "debug:/tmp/x:y")
    assert RpcBackendOptions().observing.log == "debug:/tmp/x:y"
    assert RpcBackendOptions(observing=ObservingOptions(log="info")).observing.log == "info"
    for wrong in ("loud", "info:", ""):
        with pytest.raises(ValueError, match="log"):
            RpcBackendOptions(observing=ObservingOptions(log=wrong))


def test_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcBackendOptions().observing.metrics_port is None
    monkeypatch.setenv("FARCALL_METRICS_PORT", "9100")
    assert RpcBackendOptions().observing.metrics_port == 9100
    with pytest.raises(ValueError, match="port"):
        RpcBackendOptions(observing=ObservingOptions(metrics_port=70000))
    monkeypatch.setenv("FARCALL_METRICS_PORT", "many")
    with pytest.raises(TypeError, match="FARCALL_METRICS_PORT"):
        RpcBackendOptions()
