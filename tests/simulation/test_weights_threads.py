"""What two threads, or a member that misbehaves, can do between two steps of the drivers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.simulation.weights_cluster import NAME, Cluster, Member

from farcall.errors import CorruptWeights, NotInitialized
from farcall.protocol.messages import decode_message, encode_message
from farcall.protocol.weights import subscriber
from farcall.protocol.weights.messages import BlockOffered, Claim, VersionPushed, VersionTaken
from farcall.weights import publication as module
from farcall.weights.manifest import decode_manifest, encode_manifest


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(0)
    for _ in range(2):
        made.join()
    yield made
    made.close()


def subscribed(cluster: Cluster) -> tuple[Member, Member]:
    publisher, reader = cluster.members
    cluster.publish(publisher)
    cluster.subscribe(reader)
    cluster.settle()
    return publisher, reader


def deliver(cluster: Cluster, kind: type[Any]) -> None:
    """The message of that kind that is on its way."""
    [index] = [at for at, packet in enumerate(cluster.packets) if isinstance(decode_message(packet[2]), kind)]
    cluster.deliver(index)


class Interrupted:
    """A lock; ``act`` runs, as if on another thread, when it has been released for the first time."""

    def __init__(self, lock: Any, act: Callable[[], None]) -> None:
        self._lock = lock
        self._acts = [act]
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._depth -= 1
        if not self._depth and self._acts:
            self._acts.pop()()


def test_a_block_that_is_mapped_while_its_version_arrives(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    publisher.later.pop(0)()  # the offer of the block leaves
    weights = reader.weights
    weights.lock = Interrupted(weights.lock, lambda: deliver(cluster, BlockOffered))  # type: ignore[assignment]
    deliver(cluster, VersionPushed)
    cluster.settle()
    assert reader.subscription is not None
    assert reader.subscription.version == publisher.publication.version  # type: ignore[union-attr]


def test_the_program_gets_a_version_before_its_lender_hears_of_it(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    for _ in range(3):
        cluster.push(publisher)
        while publisher.later:
            publisher.later.pop(0)()
        while cluster.packets:
            cluster.deliver(0)
        assert publisher.publication is not None
        assert reader.subscription is not None
        assert reader.subscription.version == publisher.publication.version
        assert publisher.publication.subscribers[reader.name] != publisher.publication.version
        cluster.settle()
        assert publisher.publication.subscribers[reader.name] == publisher.publication.version


def test_a_subscription_that_is_made_while_another_ends(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    weights = reader.weights
    ending, reader.subscription = reader.subscription, None
    assert ending is not None
    weights.lock = Interrupted(weights.lock, lambda: cluster.subscribe(reader))  # type: ignore[assignment]
    ending.close()
    cluster.settle()
    cluster.push(publisher)
    cluster.settle()
    assert reader.subscription is not None
    assert reader.subscription.version is not None


def test_a_publisher_without_a_free_descriptor_sends_bytes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, reader = subscribed(cluster)

    def refuse(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    fetched: list[object] = []
    monkeypatch.setattr(reader.weights.subscriptions, "_fetch", lambda versions, key: fetched.append(key))
    with monkeypatch.context() as short:
        short.setattr("farcall.weights.offers.os.dup", refuse)
        cluster.push(publisher)
        cluster.settle()
    assert len(fetched) == 1


def test_a_block_that_cannot_be_mapped_is_not_waited_for_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, reader = subscribed(cluster)
    fetched: list[object] = []
    monkeypatch.setattr(reader.weights.subscriptions, "_fetch", lambda versions, key: fetched.append(key))

    def refuse(descriptor: int, size: int) -> None:
        os.close(descriptor)
        raise OSError("no room")

    monkeypatch.setattr("farcall.weights.subscriptions.BorrowedBlock", refuse)
    cluster.push(publisher)
    cluster.settle()
    assert len(fetched) == 1
    versions = reader.weights.subscriptions.by_name[NAME]
    for number in range(2, 6):  # the same blocks, filled again
        reader.weights.subscriptions.event(versions, subscriber.Failed(fetched[-1]))  # type: ignore[arg-type]
        cluster.settle()
        cluster.push(publisher)
        cluster.settle()
        assert len(fetched) == number


def test_a_block_of_a_dead_member_is_not_kept(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    publisher.later.pop(0)()
    [packet] = [packet for packet in cluster.packets if packet[3] is not None]
    cluster.packets.remove(packet)
    cluster.kill(publisher)
    reader.hear_of_death(publisher)
    reader.receive(publisher, packet[2], packet[3])
    assert not reader.weights.subscriptions.borrowed


def altered(cluster: Cluster, **changes: Any) -> VersionPushed:
    """The version on its way, taken off the network and changed."""
    [packet] = [packet for packet in cluster.packets if isinstance(decode_message(packet[2]), VersionPushed)]
    cluster.packets.remove(packet)
    message = decode_message(packet[2])
    assert isinstance(message, VersionPushed)
    return msgspec.structs.replace(message, **changes)


def test_a_version_in_the_name_of_another_is_refused(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    wrong = altered(cluster, claim=Claim(2**60, reader.incarnation))
    reader.receive(publisher, encode_message(wrong), None)
    assert reader.subscription is not None
    assert reader.subscription.version is None
    assert not reader.subscription._versions.versions


def test_a_version_that_is_larger_than_its_block_harms_only_its_readers(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    message = altered(cluster)
    manifest = decode_manifest(message.manifest)
    larger = [msgspec.structs.replace(content, size_bytes=1 << 40) for content in manifest.contents]
    wrong = msgspec.structs.replace(
        message, manifest=encode_manifest(msgspec.structs.replace(manifest, contents=larger))
    )
    reader.receive(publisher, encode_message(wrong), None)
    cluster.settle()
    assert reader.subscription is not None
    with pytest.raises(CorruptWeights, match="too little"):
        reader.subscription.get()
    cluster.push(publisher)
    cluster.settle()
    cluster.read(reader)


def test_more_than_a_host_can_hold_is_not_fetched(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    message = altered(cluster, offered=False)
    manifest = decode_manifest(message.manifest)
    larger = [msgspec.structs.replace(content, size_bytes=1 << 62) for content in manifest.contents]
    wrong = msgspec.structs.replace(
        message, manifest=encode_manifest(msgspec.structs.replace(manifest, contents=larger))
    )
    reader.receive(publisher, encode_message(wrong), None)
    answers = [decode_message(packet[2]) for packet in cluster.packets]
    assert VersionTaken(NAME, wrong.claim, wrong.number, "dropped") in answers
    assert reader.subscription is not None
    assert "more than this host has" in str(reader.subscription._too_late(None, 1.0))


def test_memory_is_given_up_when_the_publisher_ends(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    for _ in range(4):
        cluster.push(publisher)
        cluster.settle()
    assert publisher.weights.blocks.total_bytes > 0
    cluster.close_publication(publisher)
    cluster.unsubscribe(reader)
    cluster.settle()
    assert publisher.weights.blocks.total_bytes == 0
    assert not reader.weights.subscriptions.borrowed


def test_a_block_that_is_given_up_while_it_is_offered_is_not_kept(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    cluster.push(publisher)
    cluster.unsubscribe(reader)
    deliver(cluster, VersionPushed)
    deliver(cluster, VersionTaken)
    weights, lock = publisher.weights, publisher.weights.lock

    def give_up() -> None:
        weights.lock = lock
        cluster.close_publication(publisher)
        assert weights.blocks.total_bytes == 0

    weights.lock = Interrupted(lock, give_up)  # type: ignore[assignment]
    publisher.later.pop(0)()  # the offer of the block leaves
    while cluster.packets:
        cluster.deliver(0)  # as a link does, in their order
    cluster.settle()
    assert not reader.weights.subscriptions.borrowed


@pytest.mark.parametrize("when", ["before it has memory", "while it copies"])
def test_a_push_in_a_node_that_ends_keeps_no_memory(
    cluster: Cluster, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, _ = subscribed(cluster)
    publication, blocks = publisher.publication, publisher.weights.blocks
    publisher.values = {"x": torch.zeros(300, 200)[::2]}  # not plain: torch copies it, and asks for the block's memory
    assert publication is not None
    publication._source = publisher.values

    def end_first(function: Any) -> Any:
        def ended(*args: Any) -> Any:
            publisher.die()
            return function(*args)

        return ended

    if when == "while it copies":
        monkeypatch.setattr(module, "fill", end_first(module.fill))
    else:
        monkeypatch.setattr(publication, "_plan", end_first(publication._plan))
    with pytest.raises(NotInitialized, match="dead"):
        publication.push()
    assert blocks.total_bytes == 0
    assert all(block.descriptor < 0 for block in blocks._free)


def test_a_small_name_leaves_the_memory_of_a_large_one_alone(cluster: Cluster) -> None:
    publisher, _ = subscribed(cluster)
    small = publisher.weights.claim("small", {"x": torch.zeros(1)}, keep=2)
    cluster.settle()
    for _ in range(6):
        cluster.push(publisher)
        small.push()
        cluster.settle()
    before = set(publisher.weights.blocks._blocks)
    for _ in range(6):
        cluster.push(publisher)
        small.push()
        cluster.settle()
    assert set(publisher.weights.blocks._blocks) == before


def test_empty_tensors_that_have_not_changed_need_no_memory(cluster: Cluster) -> None:
    publisher, reader = subscribed(cluster)
    empty = publisher.weights.claim("empty", {"x": torch.zeros(0, 3)}, keep=2)
    subscription = reader.weights.subscribe("empty")
    cluster.settle()
    empty.push()
    version = empty.push(only=[])
    cluster.settle()
    assert subscription.version == version
    assert subscription.get()["x"].shape == (0, 3)
    subscription.close()
