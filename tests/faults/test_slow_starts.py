"""A member that is slow to connect while its group starts, on a loaded machine: it gets in all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.protocol.membership.messages import Gossip, Status, Update
from farcall.runtime.link import dialler
from farcall.runtime.link.connector import Connector
from farcall.runtime.peers import table
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous import dynamic
from farcall.testing.cluster import temporary_file_url
from farcall.transport.interface import DialFailed


class ImpatientDialler:
    """A transport whose owner gives up, once it has sent its proof, on the proof of the other side."""

    def __init__(self, transport: Any, until: Callable[[], bool]) -> None:
        self._transport = transport
        self._until = until
        self._heard = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def wait_readable(self, timeout_s: float) -> bool:
        if not self._heard:  # the greeting that our proof answers; waits for one who is late end before it is there
            self._heard = bool(self._transport.wait_readable(timeout_s))
            return self._heard
        wait_until(self._until)
        raise DialFailed("it took too long")


@pytest.mark.parametrize("asked_first", [False, True])
def test_who_gave_up_waiting_for_a_proof_that_was_sent_gets_in_all_the_same(
    asked_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start: the one that was dialled believes to be connected, and is complete, when the other dials again.

    ``asked_first``: it has lost that connection, and has asked for another one, even before.
    """
    options = farcall.RpcBackendOptions(init_method=temporary_file_url(), start_timeout_s=2 * LONG_S)
    nodes = [farcall.Node(f"w{rank}", rank=rank, world_size=2, options=options) for rank in range(2)]
    prove, admit = dialler.prove, Connector.admit
    attempts: list[Any] = []
    asked = threading.Event()

    def impatient(transport: Any, name: Any, me: Any, *args: Any) -> Any:
        if me.member.name == "w1":
            attempts.append(transport)
            if len(attempts) == 1:
                transport = ImpatientDialler(transport, lambda: "running" in repr(nodes[0]))
            elif asked_first:
                assert asked.wait(LONG_S)
        return prove(transport, name, me, *args)

    def admitting(self: Connector, peer: Any, arrived_at: float) -> int | None:
        try:
            return admit(self, peer, arrived_at)
        finally:
            asked.set()

    monkeypatch.setattr(dialler, "prove", impatient)
    monkeypatch.setattr(Connector, "admit", admitting)
    first = threading.Thread(target=nodes[0].start)
    first.start()
    try:
        nodes[1].start()
        first.join()
        assert len(attempts) > 1
        assert nodes[0].rpc_sync("w1", pow, (2, 5)) == nodes[1].rpc_sync("w0", pow, (2, 5)) == 32
    finally:
        first.join()
        for node in nodes:
            node.shutdown(graceful=False)


def test_a_member_that_dials_a_newcomer_which_asks_it_to_be_let_in_keeps_that_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one has let it in, and its answer is late: so it asks a second member, which knows it already."""
    options = farcall.RpcBackendOptions(init_method=temporary_file_url(), rpc_timeout=LONG_S)
    first, second, late = (farcall.Node(f"w{rank}", rank, options=options) for rank in range(3))
    look = dynamic.Search._look
    looked: list[str] = []
    looks_at_strangers: list[str] = []
    look_after_links = PeerTable._look_after_links

    def counted(self: Any, now: float) -> float:
        looks_at_strangers.append(self._me.info.name)
        return look_after_links(self, now)

    def look_late(self: Any, target: Any, deadline: float) -> bool | None:
        if target.name != "w1":
            return False  # it was asked before, and has let us in
        if not looked:
            looked.append(target.name)
            member = msgspec.structs.replace(self._me, admission=7)
            news = Gossip((Update(member.incarnation, Status.ALIVE, 0, member),))
            runtime = second._runtime
            runtime.loop.call_soon(lambda: runtime.watch.on_message(first._runtime.me.incarnation, news))
            runtime.loop.call_soon(lambda: runtime.connector.dial(member))
            wait_until(lambda: "w2" in runtime.links.peers.named and runtime.links.peers.named["w2"].link.up)
            # However long that takes, who waits to be let in keeps the connections of those who know it.
            wait_until(lambda: looks_at_strangers.count("w2") > 3)
            monkeypatch.setattr(table, "STRANGER_S", LONG_S)
        return look(self, target, deadline)

    try:
        first.start()
        second.start()
        monkeypatch.setattr(dynamic.Search, "_look", look_late)
        monkeypatch.setattr(PeerTable, "_look_after_links", counted)
        monkeypatch.setattr(table, "STRANGER_S", 0.01)
        late.start()
        for one, other in [(second, "w2"), (late, "w1"), (late, "w0"), (first, "w2")]:
            wait_until(lambda one=one: len(one.workers()) == 3)  # type: ignore[misc]
            assert one.rpc_sync(other, abs, args=(-1,)) == 1
        assert not second._runtime.peers_lost
        assert not late._runtime.peers_lost
    finally:
        for node in (late, second, first):
            node.shutdown(graceful=False)
