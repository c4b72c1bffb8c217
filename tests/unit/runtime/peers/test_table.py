"""The table of peers without sockets: links are there in time, nothing is kept, and nobody dies of one dial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace as replaced
from tests.kit.times import PATIENT
from tests.kit.unlinked import quiet_core
from tests.kit.waiting import wait_until

from farcall.core.contract import Core
from farcall.errors import Delivery
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol.connector import Ended, Outcome, Step
from farcall.protocol.hello import Connect, Hello
from farcall.protocol.member import Member
from farcall.protocol.membership.events import Admitted, LocalLeave, MemberJoined
from farcall.protocol.membership.messages import Ack, Gossip, Status, Update
from farcall.protocol.messages import LEFT, GoodbyeReason, Ping
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.connector import Connector
from farcall.runtime.link.dialler import Dialler, Found
from farcall.runtime.link.link import Link
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.peers import table as tables
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import RemotePeer
from farcall.runtime.peers.table import AWAITED_S, PeerTable
from farcall.runtime.rendezvous.agreement import Membership
from farcall.secret import Secret

ME, *OTHERS = (Member(f"w{rank}", rank, 0x1000 + rank) for rank in range(6))
PATIENCE_S = 60.0


class Tables:
    """Makes tables whose members are known by name only, and ends them."""

    def __init__(self) -> None:
        self.loop = Loop("test")
        self.watcher = Mock(awaited=set)
        self.made: list[PeerTable] = []
        self.cores: list[Core] = []

    def make(self, *others: Member, full_mesh: int = 32) -> PeerTable:
        core = quiet_core()
        self.cores.append(core)
        myself = LoopbackPeer(WorkerInfo(ME.name, ME.rank), ME.incarnation, ME.incarnation, core, self.loop, Mock())
        made = PeerTable(
            myself,
            Membership(ME, [ME, *others], "cluster", Secret(b"secret")),
            RpcBackendOptions(transports=["tcp"], membership=replace(PATIENT, full_mesh=full_mesh)),
            SimpleNamespace(loop=self.loop, pool=None, core=core),  # type: ignore[arg-type]
            is_static=False,
            is_founder=True,
            host=Mock(),
            watcher=self.watcher,
            dispatcher=Mock(),
        )
        made.expect(others)
        self.made.append(made)
        return made

    def on_loop(self, action: Callable[[], object]) -> None:
        """Run ``action`` on the I/O thread, and wait for it."""
        done = threading.Event()
        self.loop.call_soon(lambda: (action(), done.set()))
        assert done.wait(PATIENCE_S)


@pytest.fixture
def make() -> Iterator[Tables]:
    found = Tables()
    found.loop.start()
    yield found
    for made in found.made:
        made.connector.stop()
        for peer in made.everyone():
            peer.link.close()
    found.loop.stop()
    for core in found.cores:
        core.stop()


def remote(table: PeerTable, member: Member) -> RemotePeer:
    peer = table.named[member.name]
    assert isinstance(peer, RemotePeer)
    return peer


def test_whoever_is_told_of_a_newcomer_to_a_small_group_finds_a_link_that_waits_for_it(make: Tables) -> None:
    """A link that is made because it is needed sleeps: the first word over it would have both dial."""
    found: list[tuple[bool, bool]] = []
    make.watcher.on_entered = lambda peer: found.append((peer.linked, peer.link.asleep))
    table = make.make()
    make.on_loop(lambda: table.on_joined(OTHERS[0]))
    assert found == [(True, False)]


def test_a_newcomer_dials_those_who_were_there(make: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one with a later number, which may not know of the newcomer yet, and would not dial."""
    monkeypatch.setattr(Dialler, "start", lambda _: None)
    table = make.make()
    monkeypatch.setattr(table.watch, "is_neighbour", lambda incarnation: True)
    early, late = (replaced(member, admission=9) for member in OTHERS[:2])
    make.on_loop(lambda: table.watch._carry_out([Admitted((early,)), MemberJoined(late)]))
    assert table.connector.is_dialling(early.incarnation)
    assert not table.connector.is_dialling(late.incarnation)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7"])
def test_why_a_member_is_not_connected(make: Tables, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(Dialler, "start", lambda _: None)
    member = replaced(OTHERS[0], addresses=(f"tcp://{host}:7",))
    table = make.make(member)
    peer = remote(table, member)
    make.on_loop(lambda: table.connector.dial(member))
    dialler = table.connector._firsts[member.incarnation].dialler
    assert dialler is not None
    first, loopback = "w0 has no connection to w1", "; w1 has told the others an address that leads to no other host"
    told = table.why_unreached(peer)
    assert told.startswith(first)
    assert (loopback in told) is (host == "127.0.0.1")
    dialler.why = "no route"
    assert table.why_unreached(peer).startswith(f"{first} (no route)")
    refused = Ended(Step.REFUSED, "refused"), Found(Outcome.REFUSED)
    make.on_loop(
        lambda: table.connector._on_first(table.connector._firsts[member.incarnation], member, dialler, *refused)
    )
    assert table.why_unreached(peer).startswith(f"{first} (refused)")
    peer.link.up = True
    assert table.why_unreached(peer) == ""


def test_who_connects_and_introduces_itself_is_not_dialled(make: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node has let it in: of two connections, the other end would keep the one that this node drops."""
    monkeypatch.setattr(Dialler, "start", lambda _: None)
    connected: list[Link] = []
    monkeypatch.setattr(Link, "connect", lambda link, *_: connected.append(link))
    table = make.make()
    monkeypatch.setattr(FailureDetector, "me", replaced(ME, admission=9))  # this node is the later one
    member = replaced(OTHERS[0], admission=1)
    established = Mock(peer=Hello(member, "cluster", Connect(is_first=True)), leftover=b"")
    make.on_loop(lambda: table.connected(Mock(), established, False))
    assert connected == [remote(table, member).link]
    assert not table.connector.is_dialling(member.incarnation)


def test_nothing_is_kept_of_strangers_that_make_room(make: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_STRANGERS", 1)
    table = make.make()
    for member in OTHERS:
        peer = Mock(incarnation=member.incarnation)
        make.on_loop(lambda member=member, peer=peer: table._add_stranger(member, peer))  # type: ignore[misc]
    assert list(table._records) == list(table._strangers) == [OTHERS[-1].incarnation]


def test_nothing_is_kept_of_those_who_came_and_went(make: Tables) -> None:
    table = make.make()
    for member in OTHERS:
        make.on_loop(lambda member=member: table.on_joined(member))  # type: ignore[misc]
        make.on_loop(lambda member=member: table.on_died(member, "the test says so"))  # type: ignore[misc]
    wait_until(lambda: not table._by_incarnation, "their ends")
    assert not table._awaited


@pytest.mark.parametrize("heard", ["before", "meanwhile"])
def test_who_leaves_dials_a_newcomer(make: Tables, monkeypatch: pytest.MonkeyPatch, heard: str) -> None:
    """The newcomer does not dial if it has heard of the leave, or leaves: to wait for its word would be in vain."""
    member, newcomer = OTHERS[:2]
    told: list[tuple[Member, Any]] = []
    monkeypatch.setattr(Dialler, "start", lambda _: None)
    table = make.make(member)
    left, joined = Update(ME.incarnation, Status.LEFT, 0), Update(newcomer.incarnation, Status.ALIVE, 0, newcomer)
    if heard == "before":
        make.on_loop(lambda: table.watch.on_message(member.incarnation, Gossip((joined,))))
    assert not table.connector.is_dialling(newcomer.incarnation)
    dial = table.connector.dial
    monkeypatch.setattr(table.connector, "dial", lambda to, news=None: (told.append((to, news)), dial(to, news)))
    make.on_loop(lambda: table.watch.feed(LocalLeave()))
    make.on_loop(lambda: table.watch.on_message(member.incarnation, Ack((joined, left))))
    (news,) = (news for to, news in told if to == newcomer)
    assert left in news.updates


def test_who_does_not_dial_as_it_should_is_dialled_when_there_is_need(make: Tables) -> None:
    """It may see a large group where this node sees a small one."""
    table = make.make()
    make.on_loop(lambda: table.on_joined(OTHERS[0]))
    link = remote(table, OTHERS[0]).link
    make.on_loop(lambda: table._look_after_links(monotonic()))
    assert not link.asleep
    make.on_loop(lambda: table._look_after_links(monotonic() + AWAITED_S))
    assert link.asleep
    assert not table._awaited


def test_a_member_that_only_this_node_cannot_dial_lives(make: Tables) -> None:
    """It may be there for all others: they decide."""
    table = make.make(*OTHERS, full_mesh=3)
    target = OTHERS[0]
    peer, connector = remote(table, target), table.connector
    assert peer.link.broken is None
    make.on_loop(lambda: connector.dial(target))
    refuse(make, connector, target)
    assert peer.link.broken is None
    assert connector.is_dialling(target.incarnation)


def test_one_that_is_not_there_is_dialled_once_for_the_sake_of_news_and_again_where_there_is_need(make: Tables) -> None:
    table = make.make(*OTHERS, full_mesh=3)
    table.watch.is_neighbour = lambda incarnation: False  # type: ignore[method-assign]
    target, connector = OTHERS[0], table.connector
    make.on_loop(lambda: table.send_news(target.incarnation, Gossip(())))
    assert not remote(table, target).linked
    refuse(make, connector, target)
    assert not connector.is_dialling(target.incarnation)
    make.on_loop(lambda: table.send_news(target.incarnation, Gossip(())))
    remote(table, target).control(Ping(0))
    refuse(make, connector, target)
    assert connector.is_dialling(target.incarnation)


def refuse(make: Tables, connector: Connector, target: Member) -> None:
    """The host of ``target`` refuses this node."""
    first = connector._firsts[target.incarnation]
    refused = Found(Outcome.REFUSED, "its host refuses the port")
    ended = Ended(Step.REFUSED, refused.why)
    make.on_loop(lambda: connector._on_first(first, target, first.dialler, ended, refused))  # type: ignore[arg-type]


def test_two_links_are_made_at_once_by_one_thread(make: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection in the middle of one may run a user's ``__del__``, which calls another member."""
    table = make.make(*OTHERS[:2], full_mesh=1)
    one, other = (remote(table, member) for member in OTHERS[:2])
    link, within = tables.Link, []

    def link_with_a_collection(*args: Any, **options: Any) -> Any:
        if not within:
            within.append(True)
            other.control(Ping(0))
        return link(*args, **options)

    monkeypatch.setattr(tables, "Link", link_with_a_collection)
    thread = threading.Thread(target=lambda: one.link, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert one.linked
    assert other.linked


@pytest.mark.parametrize(("why", "farewell"), [("", LEFT), (GoodbyeReason.FORGOT_SHUTDOWN.text,) * 2])
def test_how_a_member_left_is_known_without_a_connection_to_it(make: Tables, why: str, farewell: str) -> None:
    table = make.make(*OTHERS, full_mesh=3)
    peer = remote(table, OTHERS[0])
    make.on_loop(lambda: table.on_left(OTHERS[0], why))
    assert peer.farewell == farewell


def test_a_member_that_never_had_a_link_gets_none_when_it_is_gone_and_who_calls_it_learns_why(make: Tables) -> None:
    table = make.make(*OTHERS, full_mesh=3)
    dead, left = remote(table, OTHERS[0]), remote(table, OTHERS[1])
    for _ in range(2):
        make.on_loop(lambda: table.on_died(OTHERS[0], "the test says so"))
        make.on_loop(lambda: table.on_left(OTHERS[1], ""))
    assert [call.args for call in make.watcher.on_gone.call_args_list] == [
        (dead, "the test says so"),
        (left, "it has left"),
    ]
    assert dead.broken
    assert not dead.linked
    assert "the test says so" in str(dead.lost(Delivery.NOT_SENT))
    assert dead.linked
    make.on_loop(lambda: table.on_died(OTHERS[0], "again"))
    assert len(make.watcher.on_gone.call_args_list) == 2
