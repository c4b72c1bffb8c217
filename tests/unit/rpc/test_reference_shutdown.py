"""The last messages about references, without sockets: who says Farewell to whom, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farcall.protocol.references.messages import Farewell
from farcall.rpc.reference_shutdown import ReferenceShutdown
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node.hooks import Hooks


class Peer:
    number = 1
    was_connected = True

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.link = SimpleNamespace(asleep=True)

    def control(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def shutdown(peer: Peer) -> ReferenceShutdown:
    node = SimpleNamespace(hooks=Hooks(), other=lambda number: peer)
    references: Any = SimpleNamespace(node=node, others=lambda: [peer.number], drop_all=lambda timeout_s: None)
    return ReferenceShutdown(references)


def test_who_does_not_look_for_leaks_wakes_nobody_and_answers_who_does(shutdown: Any, peer: Peer) -> None:
    shutdown._on_agreed(NEVER)
    assert not peer.sent
    for _ in range(2):
        shutdown._on_farewell(peer, Farewell())
    assert peer.sent == [Farewell()]


def test_a_farewell_waits_until_all_references_are_given_up(shutdown: Any, peer: Peer) -> None:
    """Its receiver takes what is listed then for leaks."""
    peer.link.asleep = False

    def give_up() -> None:
        shutdown._on_farewell(peer, Farewell())
        assert not peer.sent

    shutdown.give_up = give_up
    shutdown._on_agreed(NEVER)
    assert peer.sent == [Farewell()]
