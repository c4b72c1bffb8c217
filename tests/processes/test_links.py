"""Links on demand: pairs that are no neighbours are joined at their first message, part when idle, and nobody notices.

A small ring stands for a large group: each member has two neighbours, the two next to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.team import team, together
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import PeerDead, ReferenceLost
from farcall.protocol.membership import neighbours
from farcall.runtime.link import parting
from farcall.runtime.membership.events import MemberChanges
from farcall.runtime.peers.peer import Peer, RemotePeer

SIZE = 6
served: list[object] = []


def note(what: object) -> object:
    served.append(what)
    return what


def length(tensor: torch.Tensor) -> int:
    return tensor.numel()


go_on = threading.Event()
holds = threading.Event()


def hold() -> str:
    holds.set()
    go_on.wait(LONG_S)
    return "held"


@pytest.fixture(autouse=True)
def _ring(monkeypatch: pytest.MonkeyPatch) -> None:
    served.clear()
    monkeypatch.setattr(neighbours, "ORDERS", 1)


@contextmanager
def ring(size: int = SIZE, **options: object) -> Iterator[list[farcall.Node]]:
    membership = replace(PATIENT, full_mesh=3)
    with team([None] * size, size, membership=membership, rpc_timeout=LONG_S, **options) as nodes:
        yield nodes


def peers_of(node: farcall.Node) -> list[RemotePeer]:
    return node._runtime.others()


def is_neighbour(node: farcall.Node, peer: RemotePeer) -> bool:
    return node._runtime.watch.is_neighbour(peer.incarnation)


def strangers_of(node: farcall.Node) -> list[RemotePeer]:
    return [peer for peer in peers_of(node) if not is_neighbour(node, peer)]


def one_pair(nodes: list[farcall.Node]) -> tuple[farcall.Node, farcall.Node, RemotePeer]:
    """Two members that are no neighbours, nor rank 0, and the second as the first sees it."""
    node = nodes[1]
    peer = next(peer for peer in strangers_of(node) if peer.info.id)
    return node, nodes[peer.info.id], peer


def test_only_neighbours_are_connected_at_the_start_and_all_to_rank_0_which_served_the_store() -> None:
    with ring() as nodes:
        assert all(peer.link.up for peer in peers_of(nodes[0]))
        for node in nodes:
            near = [peer for peer in peers_of(node) if is_neighbour(node, peer)]
            assert len(near) == 2
            assert all(peer.link.up for peer in near)
            others = [peer for peer in strangers_of(node) if node._rank and peer.info.id]
            assert all(not peer.linked for peer in others)
            assert [info.name for info in node.workers()] == [other._lifecycle.name for other in nodes]


def test_the_first_call_joins_and_all_calls_come_in_their_order() -> None:
    with ring() as nodes:
        node, other, peer = one_pair(nodes)
        futures = [node.rpc_async(other._lifecycle.name, note, args=(number,)) for number in range(200)]
        assert [future.result() for future in futures] == list(range(200))
        assert sorted(served) == list(range(200))  # type: ignore[type-var]
        assert peer.link.up
        assert node._runtime.connector.joined == 1
        assert node.rpc_sync(other._lifecycle.name, length, args=(torch.zeros(1 << 20),)) == 1 << 20


def test_a_large_message_can_be_the_first() -> None:
    with ring() as nodes:
        node, other, _ = one_pair(nodes)
        assert node.rpc_sync(other._lifecycle.name, length, args=(torch.zeros(1 << 22),)) == 1 << 22


@pytest.mark.parametrize("transports", [["unix"], ["tcp"]])
def test_all_dial_each_other_at_once_and_each_pair_has_one_link(transports: list[str]) -> None:
    with ring(transports=transports) as nodes:
        ready = threading.Barrier(SIZE * (SIZE - 1))

        def call(caller: farcall.Node, callee: farcall.Node) -> None:
            ready.wait(LONG_S)
            for number in range(5):
                what = (caller._lifecycle.name, callee._lifecycle.name, number)
                assert caller.rpc_sync(callee._lifecycle.name, note, args=(what,)) == what

        together([lambda pair=pair: call(*pair) for pair in permutations(nodes, 2)])  # type: ignore[misc]
        expected = [
            (one._lifecycle.name, other._lifecycle.name, number)
            for one, other in permutations(nodes, 2)
            for number in range(5)
        ]
        assert sorted(served) == sorted(expected)  # type: ignore[type-var]
        for node in nodes:
            assert all(peer.link.up for peer in peers_of(node))
            assert not node._runtime.peers_lost
            # One of both ends dialled, and both know which.
            for peer in peers_of(node):
                back = next(one for one in peers_of(nodes[peer.info.id]) if one.info.id == node._rank)
                dialled = [
                    node._runtime.connector.dialled(peer),
                    nodes[peer.info.id]._runtime.connector.dialled(back),
                ]
                assert sorted(dialled) == [False, True]


def test_an_idle_pair_parts_and_is_joined_again_from_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parting, "PART_AFTER_S", 0.05)
    with ring() as nodes:
        node, other, peer = one_pair(nodes)
        back = next(one for one in peers_of(other) if one.info.id == node._rank)
        for caller, callee in [(node, other), (other, node)] * 3:
            assert caller.rpc_sync(callee._lifecycle.name, length, args=(torch.zeros(1 << 18),)) == 1 << 18
            wait_until(lambda: peer.link.asleep and back.link.asleep, "the parting")
        for one in nodes:
            near = [peer for peer in peers_of(one) if is_neighbour(one, peer)]
            assert all(peer.link.up for peer in near)
            assert not [
                event for event in one._runtime.event_log.latest() if event.kind in ("interrupted", "reconnected")
            ]


def test_nothing_is_lost_or_repeated_where_pairs_part_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parting, "PART_AFTER_S", 0.004)
    rounds = 60
    with ring() as nodes:

        def call(caller: farcall.Node, callee: farcall.Node, number: int) -> None:
            pause = threading.Event()
            for turn in range(rounds):
                what = (caller._lifecycle.name, callee._lifecycle.name, number, turn)
                assert caller.rpc_sync(callee._lifecycle.name, note, args=(what,)) == what
                if turn % 7 == 0:
                    tensor = torch.zeros(1 << 17, dtype=torch.float64)
                    assert caller.rpc_sync(callee._lifecycle.name, length, args=(tensor,)) == 1 << 17
                pause.wait(0.001 * (hash(what) % 12))

        node, other, _ = one_pair(nodes)
        pairs = [(node, other, 0), (other, node, 1), (node, other, 2)]
        together([lambda one=one: call(*one) for one in pairs])  # type: ignore[misc]
        expected = [
            (one._lifecycle.name, two._lifecycle.name, number, turn)
            for one, two, number in pairs
            for turn in range(rounds)
        ]
        assert sorted(served) == sorted(expected)  # type: ignore[type-var]
        assert not node._runtime.peers_lost
        assert not other._runtime.peers_lost


def test_a_pair_stays_joined_while_an_answer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parting, "PART_AFTER_S", 0.01)
    looks: list[MemberChanges] = []
    awaited = MemberChanges.awaited

    def counted(self: MemberChanges) -> set[Peer]:
        looks.append(self)
        return awaited(self)

    monkeypatch.setattr(MemberChanges, "awaited", counted)
    with ring() as nodes:
        for node, other in permutations(nodes, 2):
            peer = next(one for one in peers_of(node) if one.info.id == other._rank)
            if is_neighbour(node, peer):
                continue
            go_on.clear()
            holds.clear()
            future = node.rpc_async(other._lifecycle.name, hold)
            assert holds.wait(LONG_S)
            looks.clear()
            wait_until(lambda: len(looks) > 20, "several looks at idle links")
            assert peer.link.up
            go_on.set()
            assert future.result() == "held"
            break


def test_who_ends_without_a_link_is_known_to_be_gone_by_those_who_hold_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parting, "PART_AFTER_S", 0.05)
    with ring() as nodes:
        node, other, peer = one_pair(nodes)
        held = node.remote(other._lifecycle.name, length, args=(torch.zeros(3),))
        assert held.to_here() == 3
        wait_until(lambda: peer.link.asleep, "the parting")
        other.shutdown(graceful=False)
        wait_until(lambda: peer.broken, "the news")
        with pytest.raises(ReferenceLost):
            held.to_here()
        with pytest.raises(PeerDead):
            node.rpc_sync(other._lifecycle.name, length, args=(torch.zeros(3),))


def test_a_group_that_grows_beyond_a_full_mesh_and_shrinks_again() -> None:
    """In a small one the later of two dials, in a large one whoever has something to say."""
    options = farcall.RpcBackendOptions(
        init_method=tcp_url(), membership=replace(PATIENT, full_mesh=3), rpc_timeout=LONG_S
    )
    nodes: list[farcall.Node] = []

    def all_call_all() -> None:
        wait_until(lambda: all(len(node.workers()) == len(nodes) for node in nodes), "the news")
        pairs = list(permutations(nodes, 2))
        together([lambda pair=pair: call(*pair) for pair in pairs])  # type: ignore[misc]

    def call(caller: farcall.Node, callee: farcall.Node) -> None:
        assert caller.rpc_sync(callee._lifecycle.name, length, args=(torch.zeros(3),)) == 3

    try:
        for rank in range(SIZE):
            nodes.append(farcall.Node(f"w{rank}", rank, options=options))
            nodes[-1].start()
            all_call_all()
        while len(nodes) > 1:
            nodes.pop().shutdown()
            all_call_all()
        assert not nodes[0]._runtime.peers_lost
    finally:
        for node in nodes:
            node.shutdown(graceful=False)


def test_members_that_join_a_large_group_at_the_same_time_reach_all_others() -> None:
    options = farcall.RpcBackendOptions(
        init_method=tcp_url(), membership=replace(PATIENT, full_mesh=3), rpc_timeout=LONG_S
    )
    nodes = [farcall.Node(f"w{rank}", rank, options=options) for rank in range(SIZE)]

    def live(node: farcall.Node) -> None:
        node.start()
        wait_until(lambda: len(node.workers()) == SIZE, "the others")
        for other in nodes:
            if other is not node:
                assert node.rpc_sync(other._lifecycle.name, length, args=(torch.zeros(3),)) == 3

    try:
        together([lambda node=node: live(node) for node in nodes])  # type: ignore[misc]
        assert not any(node._runtime.peers_lost for node in nodes)
    finally:
        for node in nodes:
            node.shutdown(graceful=False)
