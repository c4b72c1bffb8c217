"""The I/O thread never waits for who reads its log lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import IO, Any

import pytest

from farcall.runtime.io.log_room import LogRoom
from farcall.runtime.io.reader import reading

LOGGER = logging.getLogger("farcall.test of log lines")


@pytest.fixture
def pipe() -> Iterator[tuple[int, IO[str]]]:
    """A pipe that LOGGER writes to, and its other end."""
    there, here = os.pipe()
    stream = os.fdopen(here, "w", buffering=1)
    handler, room = logging.StreamHandler(stream), LogRoom()
    LOGGER.addHandler(handler)
    LOGGER.addFilter(room)
    LOGGER.propagate = False
    yield there, stream
    LOGGER.removeHandler(handler)
    LOGGER.removeFilter(room)
    stream.close()
    os.close(there)


@pytest.fixture
def _on_io_thread() -> Iterator[None]:
    before: Any = reading.loop
    reading.loop = object()  # type: ignore[assignment]
    yield
    reading.loop = before


def fill(stream: IO[str]) -> None:
    descriptor = stream.fileno()
    os.set_blocking(descriptor, False)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except BlockingIOError:
        os.set_blocking(descriptor, True)


def drain(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    try:
        while os.read(descriptor, 65536):
            pass
    except BlockingIOError:
        os.set_blocking(descriptor, True)


@pytest.mark.usefixtures("_on_io_thread")
def test_what_nobody_reads_is_left_out_and_counted(pipe: tuple[int, IO[str]]) -> None:
    there, stream = pipe
    LOGGER.warning("first")
    assert os.read(there, 100) == b"first\n"
    fill(stream)
    for _ in range(3):
        LOGGER.warning("never written")  # this thread would wait for good
    drain(there)
    LOGGER.warning("room %s", "again")
    assert os.read(there, 1000) == b"room again (3 lines before this were left out: nobody read them)\n"


def test_other_threads_write_as_ever(pipe: tuple[int, IO[str]]) -> None:
    there, _ = pipe
    LOGGER.warning("as %s", "ever")
    assert os.read(there, 100) == b"as ever\n"
