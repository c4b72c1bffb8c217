"""The writing end of a stream: which letters travel together, by a clock that the test turns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.protocol.frames import Frame
from farcall.protocol.streams import decode_part
from farcall.rpc import stream_writing
from farcall.rpc.stream_writing import QUICK_S, Closed, Writer

LARGE = torch.zeros(stream_writing.MOST_BYTES)


class Peer:
    """What was sent, in writes: a list for each system call, with (first item, items) of its letters."""

    lending = None
    devices = None

    def __init__(self) -> None:
        self.writes: list[list[tuple[int, int]]] = []
        self._outbox: list[tuple[int, int]] = []

    def send(self, frame: Frame, more: bool = False) -> None:
        part = decode_part(frame.function)
        self._outbox.append((part.first, part.items))
        if not more:
            self.flush()

    def flush(self) -> None:
        if self._outbox:
            self.writes.append(self._outbox)
            self._outbox = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stream_writing, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def stream() -> tuple[Writer, Peer, list[Writer]]:
    """A writer, its peer, and the writers that are to be flushed later."""
    held: list[Writer] = []
    peer: Any = Peer()
    streams: Any = SimpleNamespace(flush_later=held.append, items_written=0)
    return Writer(streams, peer, 7, outgoing=False), peer, held


def test_large_items_that_come_quickly_share_a_write(clock: Any, stream: tuple[Writer, Peer, list[Writer]]) -> None:
    writer, peer, held = stream
    for _ in range(6):
        writer.put(LARGE)
        clock.now += QUICK_S / 2.5
    # The first one came after a pause, and goes at once; the last one finds that others have waited for QUICK_S.
    assert peer.writes == [[(0, 1)], [(1, 1), (2, 1), (3, 1), (4, 1)]]
    assert held == [writer, writer]
    assert writer.flush_nowait()
    assert peer.writes[2:] == [[(5, 1)]]


def test_large_items_that_come_slowly_go_at_once(clock: Any, stream: tuple[Writer, Peer, list[Writer]]) -> None:
    writer, peer, held = stream
    for _ in range(3):
        writer.put(LARGE)
        clock.now += 2 * QUICK_S
    assert peer.writes == [[(0, 1)], [(1, 1)], [(2, 1)]]
    assert not held


def test_small_and_large_items_keep_their_order_in_one_write(
    clock: Any, stream: tuple[Writer, Peer, list[Writer]]
) -> None:
    writer, peer, held = stream
    for item in (0, 1, (2,), LARGE, 4, LARGE, (6,)):
        writer.put(item)
    assert peer.writes == [[(0, 1)]]  # after a pause
    assert held == [writer], "one timer is enough for all that is held back"
    writer.finish(None)
    assert peer.writes[1:] == [[(1, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 0)]]


def test_nothing_is_held_back_from_a_reader_that_must_grant_more(
    clock: Any, stream: tuple[Writer, Peer, list[Writer]]
) -> None:
    writer, peer, _ = stream
    writer._machine.granted_items = 3
    for _ in range(3):
        writer.put(LARGE)
    assert peer.writes == [[(0, 1)]]
    assert writer._must_wait()
    assert peer.writes[1:] == [[(1, 1), (2, 1)]]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_item_of_a_closed_stream_takes_back_what_its_pickling_took(
    stream: tuple[Writer, Peer, list[Writer]], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """References to values, blocks of a device's memory: nobody else would ever give them back."""
    writer, _, _ = stream
    undone: list[str] = []

    def write_value(frame: Frame, values: Any, peer: Any) -> None:
        frame.undo = (lambda: undone.append("fork"),)

    monkeypatch.setattr(stream_writing, "write_value", write_value)
    writer.close()
    with pytest.raises(Closed):
        asyncio.run(writer.put_soon(object())) if is_async else writer.put(object())
    assert undone == ["fork"]
