"""Both ends of streams over links in memory that delay, reorder and repeat messages, while readers leave and nodes die.

The ends are the real ones; only what lies between them, and the loop's clock, is the test's. A failure prints its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.errors import PeerDead
from farcall.protocol.frames import Frame
from farcall.protocol.streams import StreamCredit, decode_part
from farcall.rpc.stream_reading import Reader
from farcall.rpc.stream_writing import Closed, Writer, _go_through
from farcall.rpc.streams import Stream
from farcall.serialize import encode_failure

SEEDS = range(150)


class Link:
    """One direction between two nodes: what is sent arrives later, perhaps twice, perhaps behind later messages."""

    lending = None
    info = SimpleNamespace(name="other", id=1)

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._outbox: list[Frame] = []
        self.dead = False
        self.deliver: Callable[[Any], None] = lambda message: None

    def _send(self, message: Any) -> None:
        if self.dead:
            raise PeerDead("dead")
        for _ in range(1 + (self._source.random() < 0.2)):
            delay_s = self._source.choice([0.0, 0.0, 0.001, 0.003])
            asyncio.get_running_loop().call_later(delay_s, lambda: None if self.dead else self.deliver(message))

    def send(self, frame: Frame, more: bool = False) -> None:
        if self.dead:
            raise PeerDead("dead")
        self._outbox.append(
            Frame(frame.kind, 0, frame.call_id, frame.function, b"", bytes(frame.payload), list(frame.buffers))
        )
        if not more:
            self.flush()

    def flush(self) -> None:
        held, self._outbox = self._outbox, []
        for frame in held:
            if not self.dead:
                self._send(frame)

    def control(self, message: Any) -> None:
        if not self.dead:
            self._send(message)


class SimulatedReader(Reader):
    def _end(self) -> None:
        self.peer.control("closed")


class Pair:
    """A writer and a reader, and the two directions between them."""

    def __init__(self, source: random.Random) -> None:
        self.parts, self.words = Link(source), Link(source)
        node = SimpleNamespace(timeout_s=0.0, info="writer")
        streams: Any = SimpleNamespace(
            node=node, flush_later=self._flush_later, close_later=lambda reader: None, items_written=0, items_read=0
        )
        self.writer = Writer(streams, self.parts, 7, outgoing=False)  # type: ignore[arg-type]
        self.reader = SimulatedReader(streams, self.words, "simulated", outgoing=False)  # type: ignore[arg-type]
        self.parts.deliver = lambda frame: self.reader.on_part(decode_part(frame.function), frame)
        self.words.deliver = self._on_word

    def _flush_later(self, writer: Writer) -> None:
        asyncio.get_running_loop().call_later(0.001, writer.flush_nowait)

    def _on_word(self, message: Any) -> None:
        if isinstance(message, StreamCredit):
            self.writer.on_credit(message.items, message.size_bytes)
        else:
            self.writer.close()

    def die(self) -> None:
        """The connection is gone for good: both sides are told."""
        self.parts.dead = self.words.dead = True
        self.writer.close()
        self.reader.break_off(PeerDead("dead"))


async def run(seed: int) -> None:
    source = random.Random(seed)
    pair = Pair(source)
    length = source.choice([0, 1, 10, 3000])
    fails = source.random() < 0.3
    leaves_after = source.choice([None, None, 0, 5, 1500])
    dies_after = source.choice([None, None, 0, 5, 1500])
    ended = []

    async def items() -> AsyncIterator[Any]:
        try:
            for index in range(length):
                if source.random() < 0.01:
                    await asyncio.sleep(source.choice([0.0, 0.002]))
                yield (index, b"x" * source.choice([0, 10, 5_000, 70_000])) if source.random() < 0.1 else index
            if fails:
                raise ValueError("as you wish")
        finally:
            ended.append(True)

    async def write() -> None:
        failure = None
        try:
            await _go_through(pair.writer, items())
        except (Closed, PeerDead):
            return
        except ValueError as error:
            failure = encode_failure(error, "writer")
        try:
            pair.writer.finish(failure)
        except PeerDead:
            pass

    async def read() -> tuple[list[int], str]:
        stream: Stream[Any] = Stream(pair.reader)
        taken: list[int] = []
        try:
            while leaves_after is None or len(taken) < leaves_after:
                if dies_after is not None and len(taken) == dies_after:
                    pair.die()
                item = await anext(stream)
                taken.append(item[0] if isinstance(item, tuple) else item)
                if source.random() < 0.002:
                    await asyncio.sleep(0.003)
        except StopAsyncIteration:
            return taken, "all"
        except (PeerDead, ValueError) as error:
            return taken, type(error).__name__
        stream.close()
        return taken, "left"

    writing = asyncio.create_task(write())
    taken, end = await asyncio.wait_for(read(), 60)
    if end == "PeerDead":
        pair.die()
    await asyncio.wait_for(writing, 60)
    assert taken == list(range(len(taken))), "lost, doubled or out of order"
    assert ended == [True] or not taken, "a generator was left running"
    if end == "all":
        assert len(taken) == length
        assert not fails
    elif end == "ValueError":
        assert len(taken) == length
        assert fails
    elif end == "left":
        assert len(taken) == leaves_after
    else:
        assert dies_after is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_item_is_lost_doubled_or_out_of_order_and_no_generator_is_left(seed: int) -> None:
    asyncio.run(run(seed))
