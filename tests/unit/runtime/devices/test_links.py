"""What one peer lends another, between two links whose device is CPU memory."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kit.fake_device import FakeApi

from farcall.channel.device_memory import DevicePool, DeviceTicket
from farcall.errors import SerializationError
from farcall.ids import WorkerInfo
from farcall.options import MemoryOptions, RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.devices import links as device_links
from farcall.runtime.devices.links import VIEWED_BYTES, DeviceLink
from farcall.runtime.peers.peer import Peer, RemotePeer

DEVICE = torch.device("cuda", 0)


class Other:
    """A peer that is never asked anything."""

    info = WorkerInfo("other", 1)


class Pair:
    """A sender and a receiver."""

    def __init__(self, views: bool) -> None:
        self.api = FakeApi()
        self.wakes: list[bool] = []
        self.later: list[Any] = []
        self.shared: list[tuple[int, str]] = []
        self.sender, self.receiver = (self._link(name, views) for name in ("sender", "receiver"))
        self.receiver._segments.devices[0] = 0

    def _link(self, name: str, views: bool) -> DeviceLink:
        node = SimpleNamespace(
            name=name,
            options=RpcBackendOptions(memory=MemoryOptions(device_views=views)),
            api=self.api,
            pool=DevicePool(self.api, 1 << 30),
            host=SimpleNamespace(on_release=self.wakes.append, write_later=self.later.append),
            on_shared=lambda device, peer: self.shared.append((device, peer)),
        )
        return DeviceLink(node, Other(), {}, automatic=True)  # type: ignore[arg-type]

    @property
    def pool(self) -> DevicePool:
        return self.sender._node.pool

    def lend(self, size: int) -> DeviceTicket:
        ticket = self.pool.lend(0, (torch.arange(size) % 251).to(torch.uint8), size, self.sender._peer)
        assert ticket is not None
        return ticket

    def view(self) -> torch.Tensor:
        return self.receiver.take(tuple(self.lend(VIEWED_BYTES)), DEVICE)

    def give_back(self) -> None:
        """What the receiver's node does now and then."""
        self.receiver.settle_views()
        while self.later:
            self.later.pop()()
        self.sender.on_released(messages.DeviceBlocksReleased(self.receiver.take_releases()))


@pytest.fixture(autouse=True)
def cpu_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on the device is the CPU's."""
    empty = torch.empty

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", on_cpu)


def test_what_is_copied_is_given_back_at_once() -> None:
    pair = Pair(views=False)
    taken = pair.receiver.take(tuple(pair.lend(VIEWED_BYTES)), DEVICE)
    pair.give_back()
    assert pair.pool.stats().lent == 0
    assert torch.equal(taken, (torch.arange(VIEWED_BYTES) % 251).to(torch.uint8))
    assert ("finish", 0) not in pair.api.log


def test_a_view_lies_in_the_peers_memory_until_its_last_use_has_ended() -> None:
    pair = Pair(views=True)
    taken = pair.receiver.take(tuple(pair.lend(VIEWED_BYTES)), DEVICE)
    assert torch.equal(taken, (torch.arange(VIEWED_BYTES) % 251).to(torch.uint8))
    assert taken.data_ptr() == next(iter(pair.api.memory.values())).data_ptr()
    part = taken[100:200]
    del taken
    gc.collect()
    pair.give_back()
    assert pair.pool.stats().lent == VIEWED_BYTES
    del part
    gc.collect()
    assert pair.wakes[-1:] == [False], "whoever gives back is woken"
    assert ("finish", 0) not in pair.api.log, "not by whoever dropped it"
    pair.give_back()
    assert pair.api.log[-1] == ("finish", 0)
    assert pair.pool.stats().lent == 0


def test_small_ones_are_copied_even_where_views_are_wanted() -> None:
    pair = Pair(views=True)
    taken = pair.receiver.take(tuple(pair.lend(VIEWED_BYTES // 2)), DEVICE)
    pair.give_back()
    assert pair.pool.stats().lent == 0
    assert taken.numel() == VIEWED_BYTES // 2


def test_what_cannot_be_opened_is_given_back() -> None:
    pair = Pair(views=True)
    ticket = pair.lend(VIEWED_BYTES)
    pair.api.memory.clear()
    with pytest.raises(KeyError):
        pair.receiver.take(tuple(ticket), DEVICE)
    pair.give_back()
    assert pair.pool.stats().lent == 0


def test_one_task_settles_the_dead_views_however_often_the_node_looks() -> None:
    pair = Pair(views=True)
    for _ in range(3):
        pair.view()  # and dies at once
        pair.receiver.settle_views()
    assert len(pair.later) == 1
    pair.give_back()
    assert pair.pool.stats().lent == 0
    pair.view()
    pair.give_back()
    assert pair.pool.stats().lent == 0, "the next ones have a task again"


def test_views_that_die_while_others_are_settled_are_settled_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(views=True)
    alive = [pair.view()]
    pair.view()

    def finish(device: int) -> None:
        alive.clear()
        pair.receiver.settle_views()
        pair.wakes.clear()

    monkeypatch.setattr(pair.api, "finish", finish)
    pair.receiver.settle_views()
    pair.later.pop()()
    assert pair.later == [], "no second worker waits for the device"
    assert pair.wakes == [False, False], "for what is given back, and for what is not settled"
    pair.give_back()
    assert pair.pool.stats().lent == 0


def test_views_are_not_lost_where_the_device_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(views=True)
    now_s = [100.0]
    monkeypatch.setattr(device_links, "monotonic", lambda: now_s[0])
    pair.view()

    def fail(device: int) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as failing:
        failing.setattr(pair.api, "finish", fail)
        pair.give_back()
    assert "out of luck" in caplog.text
    assert "other" in caplog.text
    assert pair.pool.stats().lent == VIEWED_BYTES, "a stream may still use it"
    pair.receiver.settle_views()
    assert pair.later == [], "not at once: a device that failed is likely to fail again"
    now_s[0] += device_links.RETRY_S
    pair.give_back()
    assert pair.pool.stats().lent == 0


def test_a_tensor_that_is_larger_than_what_was_lent_is_refused_and_the_block_given_back() -> None:
    pair = Pair(views=False)
    with pytest.raises(SerializationError, match="lent 1024 bytes"):
        pair.receiver.take(tuple(pair.lend(1024)), DEVICE, ((1025,), torch.uint8))
    taken = pair.receiver.take(tuple(pair.lend(1024)), DEVICE, ((16, 16), torch.int32))
    assert taken.shape == (16, 16)
    pair.give_back()
    assert pair.pool.stats().lent == 0


def test_no_memory_is_taken_for_a_ticket_beyond_its_segment() -> None:
    pair = Pair(views=False)
    with pytest.raises(SerializationError, match="does not have"):
        pair.receiver.take(tuple(pair.lend(1024)._replace(size=1 << 60)), DEVICE)
    pair.give_back()
    assert pair.pool.stats().lent == 0


def test_small_blocks_wait_for_company_before_a_message_takes_them_along() -> None:
    pair = Pair(views=False)
    worth = []
    for _ in range(device_links.WORTH_RELEASING_BLOCKS):
        pair.receiver.take(tuple(pair.lend(1024)), DEVICE)
        worth.append(pair.receiver.is_worth_releasing)
    assert worth == [False] * (device_links.WORTH_RELEASING_BLOCKS - 1) + [True]
    assert not any(pair.wakes), "nor are they urgent"
    pair.give_back()
    assert not pair.receiver.is_worth_releasing
    pair.receiver.take(tuple(pair.lend(device_links.WORTH_RELEASING_BYTES)), DEVICE)
    assert pair.receiver.is_worth_releasing
    pair.receiver.take(tuple(pair.lend(device_links.URGENT_BYTES)), DEVICE)
    assert pair.wakes[-1], "nobody waits for a message with so much"


class Asked(RemotePeer):
    """A peer that notes what it is told."""

    def __init__(self) -> None:
        unused: Any = None
        Peer.__init__(self, WorkerInfo("other", 1), 1, 1, unused, unused)
        self.told: list[messages.Message] = []

    def control(self, message: messages.Message, more: bool = False) -> None:
        self.told.append(message)


@pytest.mark.parametrize(("visible", "is_shared"), [(True, True), (False, False)])
def test_a_way_is_tried_first_and_then_used_or_not(
    monkeypatch: pytest.MonkeyPatch, visible: bool, is_shared: bool
) -> None:
    pair = Pair(views=False)
    asked, answering = Asked(), Asked()
    pair.sender._peer, pair.receiver._peer = asked, answering
    monkeypatch.setattr(pair.api, "find", lambda name: 3 if visible else None)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    assert not pair.sender.shares(0)
    assert pair.sender._lend(source, source.nbytes, DEVICE, True) is None, "meanwhile through the host"
    (tried,) = asked.told
    assert isinstance(tried, messages.DeviceTried)
    pair.receiver._segments.devices.clear()
    pair.receiver.on_tried(tried)
    assert pair.receiver.here(0) == (3 if visible else None)
    assert pair.shared == ([(3, answering.info.name)] if visible else [])
    (answer,) = answering.told
    assert isinstance(answer, messages.DeviceOpened)
    pair.sender.on_opened(answer)
    assert pair.sender.shares(0) is is_shared
    assert (pair.sender._lend(source, source.nbytes, DEVICE, True) is not None) is is_shared
