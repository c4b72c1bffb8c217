"""Twins of blocks, at their owner and at a reader, whose device is CPU memory."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_device import FakeApi

from farcall.channel.device_memory import REST_S
from farcall.options import MemoryOptions, RpcBackendOptions
from farcall.protocol.weights.messages import Claim, Key, OnDevice
from farcall.runtime.devices.links import DeviceLink
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import RemotePeer
from farcall.weights import twins as module
from farcall.weights.manifest import Content, Layout, Manifest
from farcall.weights.memory import Block, BlockStore
from farcall.weights.twins import Twins
from farcall.weights.version import HeldVersion

OWNER, READER = 1, 2
SIZE = 8192


class Other(RemotePeer):
    """A peer that is never told anything."""

    def __init__(self, link: DeviceLink, incarnation: int) -> None:
        self.devices: Any = link
        self.incarnation = incarnation
        self.lending: Any = object()
        self.info: Any = SimpleNamespace(name="other")
        self.linked = True
        self.link: Any = SimpleNamespace(up=True)


class Side:
    """One node's twins; ``peer`` is how it sees the other node."""

    def __init__(self, api: FakeApi, limit_bytes: int, peer: int) -> None:
        options = RpcBackendOptions(memory=MemoryOptions(device_memory_limit_bytes=limit_bytes))
        self.later: list[Callable[[], None]] = []
        pool = SimpleNamespace(release_all=lambda peer, now: None)
        host = SimpleNamespace(write_later=self.later.append)
        devices = SimpleNamespace(api=api, options=options, name="node", pool=pool, host=host)
        self.link = DeviceLink(devices, None, {}, automatic=True)  # type: ignore[arg-type]
        self.link._ways[0] = True
        self.link._segments.devices[0] = 0
        self.due: list[float] = []
        node = SimpleNamespace(
            devices=devices, timer=lambda call: SimpleNamespace(at=self.due.append), write_later=self.later.append
        )
        self.blocks = BlockStore(is_shared=True)
        self.others: dict[int, Any] = {peer: Other(self.link, peer)}
        weights: Any = SimpleNamespace(node=node, blocks=self.blocks, peer=self.others.get)
        self.twins = Twins(weights)


class Pair:
    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.api = FakeApi()
        self.owner, self.reader = Side(self.api, limit_bytes, READER), Side(self.api, limit_bytes, OWNER)

    def push(self, value: int) -> tuple[Block, HeldVersion]:
        """A block that is filled, and the version at the reader."""
        block = self.owner.blocks.take(SIZE, 0)
        self.owner.twins.prepare(block, 0, [READER])
        if block.twin is not None:
            block.twin.memory.fill_(value)
        manifest = Manifest([Content(OWNER, block.block_id, block.fill, SIZE)], Layout([], [], [], []), [], b"", [])
        held = HeldVersion(Key(Claim(1, OWNER), value), manifest)
        held.on_devices = self.owner.twins.openers([block], self.owner.others[READER])
        return block, held

    def read(self, held: HeldVersion) -> int | None:
        [memory] = self.reader.twins.open(held)
        return None if memory is None else int(memory[0])


def test_a_twin_is_opened_once_and_filled_again() -> None:
    pair = Pair()
    for value in range(1, 4):
        block, held = pair.push(value)
        assert pair.read(held) == value
        assert pair.reader.twins.are_there(held)
        pair.owner.blocks.release([block])
    assert pair.api.exports == pair.api.opened == 1
    assert pair.owner.twins.total_bytes == SIZE


def test_nobody_who_can_open_it_no_twin() -> None:
    pair = Pair()
    block, held = pair.push(1)
    pair.owner.blocks.release([block])
    pair.owner.link._ways[0] = False
    again, held = pair.push(2)
    assert again is block
    assert block.twin is None
    assert held.on_devices == []
    assert pair.read(held) is None


def test_device_memory_has_a_limit() -> None:
    pair = Pair(limit_bytes=2 * SIZE)
    pushed = [pair.push(value) for value in range(3)]
    assert [pair.read(held) for _, held in pushed] == [0, 1, None]
    assert pair.owner.twins.total_bytes == 2 * SIZE


def test_two_pushes_at_a_time_keep_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two names: what one of them takes is counted before the other one looks."""
    pair = Pair()
    allocate = pair.api.allocate
    was_locked: list[bool] = []

    def allocate_and_look(device: int, size_bytes: int) -> torch.Tensor | None:
        was_locked.append(pair.owner.twins._making.locked())
        return allocate(device, size_bytes)

    monkeypatch.setattr(pair.api, "allocate", allocate_and_look)
    block, _ = pair.push(1)
    assert block.twin is not None
    assert was_locked == [True]


def test_memory_that_cannot_be_opened_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    _, held = pair.push(1)
    tries: list[object] = []

    def fail(export: Any, device: int) -> torch.Tensor:
        tries.append(export)
        raise RuntimeError("the driver has its reasons")

    monkeypatch.setattr(pair.api, "open", fail)
    assert pair.read(held) is None
    assert pair.read(held) is None
    assert len(tries) == 1


def test_too_little_memory_is_not_read() -> None:
    pair = Pair()
    block, held = pair.push(1)
    assert block.twin is not None
    pair.api.memory[1] = block.twin.memory[:-1]
    assert pair.read(held) is None


def test_a_copy_of_a_version_has_no_twin() -> None:
    """Its publisher was told that it was copied, and may have filled the twin again."""
    pair = Pair()
    _, held = pair.push(1)
    held.was_fetched = True
    assert pair.read(held) is None


def test_an_owner_that_is_gone() -> None:
    pair = Pair()
    _, held = pair.push(1)
    assert pair.read(held) == 1
    del pair.reader.others[OWNER]
    assert not pair.reader.twins.are_there(held)
    assert pair.read(held) is None
    [opened] = pair.reader.twins._opened.values()
    pair.reader.link.close()
    pair.reader.twins.close(OWNER)
    assert not pair.reader.twins._opened
    assert opened.memory is not None, "it is closed by a worker, which may wait for a stream"
    for close in pair.reader.later:
        close()
    assert opened.memory is None


def test_an_owner_whose_connection_has_ended_may_be_dead() -> None:
    pair = Pair()
    _, held = pair.push(1)
    assert pair.read(held) == 1
    pair.reader.others[OWNER].link.up = False
    assert not pair.reader.twins.are_there(held), "what was just copied may be of other memory"
    assert pair.read(held) is None
    pair.reader.others[OWNER].link.up = True
    assert pair.read(held) == 1, "it was only the connection"


def test_a_twin_that_is_being_opened_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    _, held = pair.push(1)
    was_locked: list[bool] = []

    def open_slowly(export: Any, device: int) -> torch.Tensor:
        was_locked.append(pair.reader.twins._lock.locked())  # the I/O thread takes it
        memory = torch.zeros(SIZE, dtype=torch.uint8)
        # torch waits for the work on a stream before it closes such memory.
        weakref.finalize(memory, lambda: was_locked.append(pair.reader.twins._lock.locked()))
        return memory

    monkeypatch.setattr(pair.api, "open", open_slowly)
    assert pair.read(held) == 0
    [place] = held.on_devices
    held.on_devices = [OnDevice(place.content, place.device, pickle.dumps((0, 2)))]
    assert pair.read(held) == 0
    assert was_locked == [False] * 3, "opened, opened again, and the first one closed"
    pair.reader.twins.end([], all_end=True)
    assert was_locked == [False] * 4


def test_an_owner_that_leaves_has_its_memory_back_first() -> None:
    pair = Pair()
    _, held = pair.push(1)
    assert pair.read(held) == 1
    pair.reader.link.forget_segments()
    assert pair.read(held) is None


def test_a_block_that_is_given_up() -> None:
    pair = Pair()
    block, held = pair.push(1)
    assert pair.read(held) == 1
    pair.owner.blocks.release([block])
    pair.owner.blocks.trim(0)
    for retired in pair.owner.blocks.take_retired():
        pair.owner.twins.give_up(retired)
    assert pair.owner.twins.total_bytes == 0
    pair.reader.twins.close(OWNER, block.block_id)
    assert not pair.reader.twins._opened


def test_memory_of_a_reader_out_of_reach_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "monotonic", lambda: 100.0)
    pair = Pair()
    block, _ = pair.push(1)
    block.is_stranded = True
    pair.owner.blocks.release([block])
    for retired in pair.owner.blocks.take_retired():
        pair.owner.twins.give_up(retired)
    assert pair.owner.twins.total_bytes == SIZE
    assert pair.owner.due == [100.0 + REST_S]
    later, _ = pair.push(2)
    later.is_stranded = True
    monkeypatch.setattr(module, "monotonic", lambda: 110.0)
    pair.owner.twins.give_up(later)
    assert pair.owner.due == [100.0 + REST_S], "the first is not put off by the second"
    assert pair.owner.twins._on_rested(100.0 + REST_S) == 110.0 + REST_S
    assert pair.owner.twins.total_bytes == SIZE
    assert pair.owner.twins._on_rested(110.0 + REST_S) == NEVER
    assert pair.owner.twins.total_bytes == 0


def test_a_block_on_the_host_has_none() -> None:
    pair = Pair()
    block = pair.owner.blocks.take(SIZE)
    pair.owner.twins.prepare(block, -1, [READER])
    assert block.twin is None
    assert pair.owner.twins.openers([block], pair.owner.others[READER]) == []


def test_a_node_that_ends_with_all_others_holds_nothing() -> None:
    pair = Pair()
    block, held = pair.push(1)
    assert pair.read(held) == 1
    block.is_stranded = True
    pair.owner.twins.give_up(block)
    for side in (pair.owner, pair.reader):
        side.twins.end(side.blocks.close(), all_end=True)
        assert side.twins.total_bytes == 0
        assert not side.twins._opened


def test_a_node_that_ends_alone_keeps_its_memory_from_everybody_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader amid a copy may hear of the end only after it has looked whether the owner lives."""
    pair = Pair()
    memory = []
    for value in range(3):
        block, _ = pair.push(value)
        assert block.twin is not None
        memory.append(block.twin.memory)
    monkeypatch.setattr(module, "monotonic", lambda: 100.0)
    block.is_stranded = True
    pair.owner.twins.give_up(block)
    resting: list[torch.Tensor] = []

    def rest(seconds: float, forget: Any) -> Any:
        assert seconds == REST_S
        resting.extend(forget.__self__)
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(module.threading, "Timer", rest)
    pair.owner.twins.end(pair.owner.blocks.close(), all_end=False)
    assert {one.data_ptr() for one in resting} == {one.data_ptr() for one in memory}
    assert pair.owner.twins.total_bytes == 0


def test_opener_names_the_place_and_the_device() -> None:
    pair = Pair()
    block, held = pair.push(1)
    assert block.twin is not None
    [place] = held.on_devices
    assert place == OnDevice(0, 0, block.twin.openers[READER])
