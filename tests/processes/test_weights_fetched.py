"""Weights whose bytes travel, between nodes of one process that share no memory: whole versions, in any case."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.protocol.weights import fetching as machine
from farcall.protocol.weights.messages import Key
from farcall.serialize.allowance import Allowance
from farcall.serialize.functions import encode_function
from farcall.weights import fetching as driver
from farcall.weights.memory import Block
from farcall.weights.node import Weights
from farcall.weights.questions import borrow, find_route, read_chunk
from farcall.weights.subscription import NameVersions
from farcall.weights.subscriptions import Subscriptions

COUNT = 400_000
"""Elements of a tensor: several chunks, the last one not full."""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[farcall.Node]]:
    for module, name in ((machine, "STALL_S"), (driver, "ANSWER_S")):
        monkeypatch.setattr(module, name, 10 * LONG_S)  # a busy machine is not silent
    with team([None] * 4, size=4, transports=("tcp",)) as nodes:
        yield nodes


def weights_of(node: farcall.Node) -> Weights:
    return node._runtime.part(Weights)


def model(value: float) -> dict[str, torch.Tensor]:
    return {"first": torch.full((COUNT,), value), "second": torch.full((COUNT // 2,), -value), "last": torch.ones(3)}


def test_versions_travel_from_subscriber_to_subscriber(nodes: list[farcall.Node]) -> None:
    source = model(1.0)
    subscriptions = [node.subscribe("policy") for node in nodes[1:]]
    policy = nodes[0].publish("policy", source)
    size = 4 * (COUNT + COUNT // 2)
    version = None
    for value in (1.0, 2.0, 3.0):
        source["first"].fill_(value)
        source["second"].fill_(-value)
        version = policy.push(only=None if version is None else ["first", "second"])
        for subscription in subscriptions:
            assert subscription.wait(newer_than=version and version._replace(number=version.number - 1), timeout=LONG_S)
            mine = model(0.0)
            subscription.load_into(mine)
            assert torch.equal(mine["first"], source["first"])
            assert torch.equal(mine["second"], source["second"])
            assert torch.equal(subscription.get()["last"], torch.ones(3))
            subscription.verify()
    received = [weights_of(node).fetcher.received_bytes for node in nodes[1:]]
    assert all(3 * size <= one < 3 * size + 4096 for one in received), "each chunk once"


def test_no_version_is_torn_while_pushes_go_on(nodes: list[farcall.Node]) -> None:
    source = {"all": torch.zeros(COUNT)}
    subscriptions = [node.subscribe("policy") for node in nodes[1:]]
    policy = nodes[0].publish("policy", source)
    policy.push()
    seen: list[list[float]] = [[] for _ in subscriptions]
    failures: list[BaseException] = []

    def read(index: int) -> None:
        mine = {"all": torch.empty(COUNT)}
        version = None
        try:
            while not seen[index] or seen[index][-1] < 30:
                version = subscriptions[index].wait(newer_than=version, timeout=LONG_S)
                subscriptions[index].load_into(mine)
                low, high = float(mine["all"].min()), float(mine["all"].max())
                assert low == high, "torn"
                seen[index].append(low)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(subscriptions))]
    for thread in threads:
        thread.start()
    for value in range(1, 31):
        source["all"].fill_(value)
        policy.push()
    for thread in threads:
        thread.join(4 * LONG_S)
    assert not failures
    assert all(values == sorted(values) and values[-1] == 30 for values in seen)
    # Memory is bounded: versions that nobody reads are given up everywhere.
    wait_until(lambda: all(weights_of(node).blocks.total_bytes < 8 * 4 * COUNT for node in nodes))


def test_wrong_bytes_are_never_seen(nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Weights.read_content
    spoiled = threading.Event()

    def spoil(self: Weights, *args: object) -> bytearray | None:
        data = read(self, *args)  # type: ignore[arg-type]
        if data is not None and not spoiled.is_set():
            spoiled.set()
            data[100] ^= 1
        return data

    monkeypatch.setattr(Weights, "read_content", spoil)
    subscription = nodes[1].subscribe("policy")
    source = model(1.0)
    policy = nodes[0].publish("policy", source)
    policy.push()
    wait_until(spoiled.is_set)
    wait_until(lambda: policy.push() and subscription.version is not None)
    mine = model(0.0)
    subscription.load_into(mine)
    assert torch.equal(mine["first"], source["first"])


def test_a_fetch_that_nobody_wants_any_more_writes_nothing(
    nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    asked = threading.Event()
    read = Weights.read_content

    def late(self: Weights, *args: object) -> bytearray | None:
        asked.set()
        assert held.wait(LONG_S)
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Weights, "read_content", late)
    subscription = nodes[1].subscribe("policy")
    nodes[0].publish("policy", model(1.0)).push()
    wait_until(asked.is_set)
    fetcher = weights_of(nodes[1]).fetcher
    blocks: list[Block] = [block for fetch in fetcher._all() for block in fetch.arriving.missing.values()]
    subscription.close()
    wait_until(lambda: not fetcher._all())
    held.set()
    wait_until(lambda: not len(nodes[1]._runtime.calls))
    assert all(not any(bytes(block.view)) for block in blocks)


def test_a_version_that_is_dropped_while_its_fetch_begins(
    nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block is written to that may hold other bytes by then."""
    dropping = threading.Event()
    fetch = Subscriptions._fetch

    def late(self: Subscriptions, versions: NameVersions, key: Key) -> None:
        subscription.close()  # as another thread might, between the machine's word and this
        fetch(self, versions, key)
        dropping.set()

    monkeypatch.setattr(Subscriptions, "_fetch", late)
    subscription = nodes[1].subscribe("policy")
    nodes[0].publish("policy", model(1.0)).push()
    wait_until(dropping.is_set)
    assert weights_of(nodes[1]).fetcher._all() == []
    wait_until(lambda: weights_of(nodes[1]).blocks.total_bytes == 0)


def test_least_privilege_leaves_weights_alone() -> None:
    for function in (find_route, read_chunk, borrow):
        Allowance([], []).check_function(encode_function(function) or b"")


def test_a_subscriber_without_room_gets_the_next_version(
    nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = nodes[1].subscribe("policy")
    policy = nodes[0].publish("policy", model(1.0))
    refused = threading.Event()

    def full(size: int) -> Block:
        refused.set()
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(weights_of(nodes[1]).blocks, "take", full)
        first = policy.push()
        assert refused.wait(LONG_S)
    wait_until(lambda: not subscription._versions.machine.arriving)
    second = policy.push()
    assert subscription.wait(timeout=LONG_S) == second > first
    subscription.verify()
