"""Streams over connections that break and come back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.options import MemoryOptions
from farcall.testing.faults import Faults

CUTS = 8
MADE: list[int] = []


def mixed(seed: int) -> Iterator[Any]:
    """Items of all sizes, until the connection was cut often enough."""
    source = random.Random(seed)
    buffer = torch.zeros(300_000)
    index = 0
    while not ENOUGH.is_set():
        MADE.append(index)
        size = source.choice([0, 0, 0, 10, 20_000, 300_000])
        if size:
            buffer[:size] = index  # the memory of the item before, as makers of batches do
            yield index, buffer[:size]
        else:
            yield index
        index += 1
    yield "end"


ENOUGH = threading.Event()


def check(items: Iterable[Any]) -> int:
    """Every item is there, in order and whole; how many."""
    for index, item in enumerate(items):
        if isinstance(item, str):
            return index
        number, tensor = item if isinstance(item, tuple) else (item, None)
        assert number == index
        assert tensor is None or bool((tensor == index).all())
    raise AssertionError("the stream ended too early")


def cut_often(faults: Faults) -> None:
    try:
        for cut in range(CUTS):
            before = len(MADE)
            wait_until(lambda before=before: len(MADE) > before + 20, "the stream's going on")  # type: ignore[misc]
            with faults.cut(sender=f"w{cut % 2}") as rule:
                rule.wait_hits()
    finally:
        ENOUGH.set()


@pytest.mark.parametrize(
    ("transport", "memory"),
    [
        ("unix", MemoryOptions()),
        ("unix", MemoryOptions(shared_memory_limit_bytes=1)),  # items that find no room there go through the socket
        ("tcp", MemoryOptions()),
    ],
    ids=["unix", "no room", "tcp"],
)
def test_no_item_is_lost_doubled_or_out_of_order(transport: str, memory: MemoryOptions) -> None:
    faults = Faults(seed=1)
    MADE.clear()
    ENOUGH.clear()
    with team(faults, transports=(transport,), memory=memory, rpc_timeout=LONG_S) as (reader, _):
        cutter = threading.Thread(target=cut_often, args=(faults,))
        cutter.start()
        found = check(reader["w1"].stream(mixed, 1))
        cutter.join(LONG_S)
        assert found == len(MADE) > 100


def test_an_outgoing_stream_as_well() -> None:
    faults = Faults(seed=2)
    MADE.clear()
    ENOUGH.clear()
    with team(faults, transports=("tcp",), rpc_timeout=LONG_S) as (writer, _):
        cutter = threading.Thread(target=cut_often, args=(faults,))
        cutter.start()
        found = writer["w1"].options(timeout=4 * LONG_S).call(check, farcall.outgoing(mixed(2)))
        cutter.join(LONG_S)
        assert found == len(MADE) > 100
