"""A wait in a destructor: only one that does not interrupt farcall itself may wait."""

from __future__ import annotations

import gc
from types import FunctionType

import pytest

from farcall.errors import RpcError
from farcall.runtime.io import reader
from farcall.runtime.io.reader import reading, stop_reading


class Cyclic:
    """Only a garbage collection ends it."""

    def __init__(self, ends: list[Exception | None]) -> None:
        self.itself = self
        self.ends = ends

    def __del__(self) -> None:
        try:
            stop_reading()
        except RpcError as error:
            self.ends.append(error)
        else:
            self.ends.append(None)


def collect() -> None:
    gc.collect()


@pytest.mark.parametrize("interrupted", ["farcall.runtime.link.link", "program"])
def test_a_destructor_may_wait_unless_it_interrupts_farcall(interrupted: str) -> None:
    ends: list[Exception | None] = []
    Cyclic(ends)
    amid = FunctionType(collect.__code__, {"__name__": interrupted, "gc": gc})
    amid()
    (end,) = ends
    assert isinstance(end, RpcError) is (interrupted != "program")
    stop_reading()  # afterwards everybody may


def test_a_collection_whose_end_was_not_noticed_is_over() -> None:
    """Ctrl-C may cut every Python function that is told of the end."""
    reading.interrupted = reader._collections["stop"]
    with pytest.raises(RpcError, match="use rpc_async in destructors"):
        stop_reading()
    gc.callbacks.remove(reader._on_collection)
    try:
        gc.collect()
    finally:
        gc.callbacks.append(reader._on_collection)
    stop_reading()
    assert reading.interrupted is None
