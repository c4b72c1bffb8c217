"""The connector without sockets: who is let in that speaks of a session, and what has begun is found by `stop`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.kit.unlinked import quiet_core
from tests.kit.waiting import wait_until

from farcall.core.contract import WANTED
from farcall.errors import HandshakeRefused
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol.connector import Ended, Outcome, Parting, Step
from farcall.protocol.frames import REQUEST, encode_small
from farcall.protocol.hello import Hello, Remind, Resume
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.connector import Connector, _First
from farcall.runtime.link.dialler import Dialler, Found
from farcall.runtime.link.link import Link
from farcall.secret import Secret
from farcall.transport.unix import UnixTransport

ME = Hello(Member("w0", 0, 0x1F), "cluster")
OTHER = Hello(Member("w1", 1, 0x2F), "cluster")
NOWHERE = Member("nowhere", 1, 1 << 62)


class Owner:
    """A table of peers in which nobody is."""

    def hello(self) -> Hello:
        return ME

    def is_wanted(self, incarnation: int) -> bool:
        return True

    def look_later(self, incarnation: int) -> None:
        """Nobody looks."""

    def ways_to(self, incarnation: int) -> list[str]:
        return []

    def member_of(self, incarnation: int) -> Member | None:
        return None


class Watch:
    def feed(self, event: object) -> None:
        """Nobody is told of anything."""

    def is_member(self, incarnation: int) -> bool:
        return False


def connector(owner: Any = None, loop: Any = None) -> Connector:
    return Connector(owner or Owner(), Watch(), loop, RpcBackendOptions(transports=["tcp"]), secret=Secret(b"secret"))


def test_who_starts_refuses_nobody_that_asks_for_a_connection_it_is_about_to_make() -> None:
    mine = connector()
    assert mine.admit(OTHER.wanting(Remind("s")), 0.0) is None
    mine.starting = False
    with pytest.raises(HandshakeRefused, match="has ended"):
        mine.admit(OTHER.wanting(Remind("s")), 0.0)


def test_nor_does_who_is_dialling_that_very_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = connector()
    mine.starting = False
    dialled = {OTHER.member.incarnation}
    monkeypatch.setattr(mine, "is_dialling", lambda incarnation: incarnation in dialled)
    assert mine.admit(OTHER.wanting(Remind("s")), 0.0) is None
    dialled.clear()
    with pytest.raises(HandshakeRefused):
        mine.admit(OTHER.wanting(Remind("s")), 0.0)


def test_who_comes_back_to_a_session_that_never_was_is_refused() -> None:
    with pytest.raises(HandshakeRefused):
        connector().admit(OTHER.wanting(Resume("s", 3)), 0.0)


def test_a_link_is_woken_only_after_all_that_came_over_its_last_connection_was_counted() -> None:
    """A wish to send may come late, when both have parted again: what is read meanwhile would be sent once more."""
    mine, slept = connector(), []
    link = SimpleNamespace(up=True, broken=None, sleep=lambda: slept.append(True))
    peer: Any = SimpleNamespace(incarnation=OTHER.member.incarnation, info=None, link=link, leaving=False)
    established: Any = SimpleNamespace(session_id="s")
    mine.begin(peer, established, True)
    bond = mine.bond_of(peer)
    assert bond is not None
    bond.part(Parting.AGREED)
    link.up = False  # the connection has ended; what came over it is still being read
    mine.wake(peer)
    assert not mine.joined
    assert mine.on_interrupted(peer, "both had nothing to say")
    assert slept == [True]
    assert not mine.awake


@pytest.fixture
def parted() -> Iterator[tuple[Connector, Any]]:
    """A connector, and a member that it has parted from."""
    loop = Loop("test")
    core = quiet_core()
    near, far = map(UnixTransport, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    link = Link(core, WorkerInfo("w1", 1), near, loop, lambda reason: None, instead=lambda head: None)
    peer: Any = SimpleNamespace(
        incarnation=OTHER.member.incarnation, info=link.peer, link=link, leaving=False, broken=False
    )
    mine = connector(loop=loop)
    established: Any = SimpleNamespace(session_id="s")
    mine.begin(peer, established, True)
    link.start()
    bond = mine.bond_of(peer)
    assert bond is not None
    bond.part(Parting.AGREED)
    link.break_off("both had nothing to say")
    assert mine.on_interrupted(peer, "both had nothing to say")
    assert link.asleep
    yield mine, peer
    mine.stop()
    link.close()
    far.close()
    loop.stop()
    core.stop()


def test_a_link_wakes_though_somebody_was_let_in_and_did_not_come(parted: tuple[Connector, Any]) -> None:
    """Our count was told it in vain: the session waits for somebody who has given up."""
    mine, peer = parted
    assert mine.admit(OTHER.wanting(Resume("s", 0)), 0.0) == 0
    mine.wake(peer)
    assert mine._ties[peer.incarnation].dialler is not None
    assert mine.joined == 1


def test_who_yields_to_a_member_that_does_not_come_dials_again(parted: tuple[Connector, Any]) -> None:
    mine, peer = parted
    mine.wake(peer)
    tie = mine._ties[peer.incarnation]
    withdrawn = tie.dialler
    assert withdrawn is not None
    assert mine.admit(OTHER.wanting(Resume("s", 0)), 0.0) == 0
    assert not withdrawn.is_wanted()
    mine.wake(peer)
    assert tie.dialler is withdrawn  # the other end is about to come
    mine.look_after(peer)
    assert tie.dialler is not withdrawn


def test_who_comes_back_while_it_is_being_reminded_is_let_in_whatever_was_proposed(
    parted: tuple[Connector, Any],
) -> None:
    """A proposal was lost with its connection, and the end that dials knows it already: that is no crossing."""
    mine, peer = parted
    tie = mine._ties[peer.incarnation]
    tie.bond.part(Parting.PROPOSED)
    tie.bond.dialled = tie.sleeps = False
    tie.dialler = reminder = Mock(is_wanted=lambda: True, withdraw=lambda even_if_proving: False)
    assert mine.admit(OTHER.wanting(Resume("s", 0)), 0.0) == 0
    assert tie.dialler is reminder


def test_who_sleeps_dials_if_asked_to_whichever_end_dialled_before(parted: tuple[Connector, Any]) -> None:
    mine, peer = parted
    tie = mine._ties[peer.incarnation]
    tie.bond.dialled = False
    assert mine.admit(OTHER.wanting(Remind("s")), 0.0) is None
    assert tie.dialler is not None


def test_a_link_that_wakes_is_no_sign_of_life(parted: tuple[Connector, Any]) -> None:
    mine, peer = parted
    mine.wake(peer)
    assert not mine.awake


@pytest.mark.parametrize("dialled", [False, True])
def test_who_was_only_ever_dialled_knows_no_way_for_certain(parted: tuple[Connector, Any], dialled: bool) -> None:
    mine, peer = parted
    established: Any = SimpleNamespace(session_id="s")
    mine.begin(peer, established, dialled)
    tie = mine._ties[peer.incarnation]
    tie.bond.part(Parting.AGREED)
    tie.sleeps = True
    mine.wake(peer)
    assert tie.dialler is not None
    assert tie.dialler._target.was_reached is dialled


def test_where_no_thread_can_be_had_it_is_tried_again_later(
    parted: tuple[Connector, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, peer = parted
    later: list[int] = []
    monkeypatch.setattr(mine._owner, "look_later", later.append)

    def is_wanted() -> bool:
        return WANTED in {news.kind for news in peer.link._core.events()}

    peer.link.post(encode_small(REQUEST, 0, 1, b"", b"", b""))
    assert is_wanted()
    with monkeypatch.context() as patch:
        patch.setattr(Dialler, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        mine.wake(peer)
    assert later == [peer.incarnation]
    assert not mine._diallers
    mine.look_after(peer)
    assert is_wanted()
    mine.wake(peer)
    assert mine._ties[peer.incarnation].dialler is not None


def test_nor_is_a_first_connection_given_up_for_want_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, later = connector(), []
    monkeypatch.setattr(mine._owner, "look_later", later.append)
    monkeypatch.setattr(Dialler, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    mine.dial(NOWHERE)
    dialler: Any = Mock()
    first = mine._firsts[NOWHERE.incarnation] = _First([], dialler)
    mine._on_first(first, NOWHERE, dialler, Ended(Step.GIVEN_UP, "it refused us"), Found(Outcome.REJECTED))
    assert later == [NOWHERE.incarnation] * 2
    assert not mine.is_dialling(NOWHERE.incarnation)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_link_whose_node_ends_while_its_connection_is_replaced_stays_closed(
    dialled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ends the node closes the links, and the I/O thread is in the middle of this."""
    loop, mine = Loop("test"), connector()
    core = quiet_core()
    near, far = map(UnixTransport, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    link = Link(core, WorkerInfo("w1", 1), near, loop, lambda reason: None, instead=lambda head: None)
    peer: Any = SimpleNamespace(
        incarnation=OTHER.member.incarnation, info=link.peer, link=link, leaving=False, broken=False
    )
    established: Any = SimpleNamespace(session_id="s")
    mine.begin(peer, established, dialled)
    link.start()
    break_off = Link.break_off

    def end_meanwhile(self: Link, reason: str) -> None:
        break_off(self, reason)
        mine.stop()
        self.close()

    monkeypatch.setattr(Link, "break_off", end_meanwhile)
    try:
        if dialled:
            assert not mine.on_interrupted(peer, "it is silent")
        else:
            with pytest.raises(HandshakeRefused, match="has ended"):
                mine.admit(OTHER.wanting(Resume("s", 0)), 0.0)
        assert link.broken
    finally:
        far.close()
        loop.stop()
        core.stop()


def test_what_begins_while_the_node_ends_is_stopped_too() -> None:
    loop = Loop("test")
    stopping: list[threading.Thread] = []

    class EndingOwner(Owner):
        def hello(self) -> Hello:
            """The node ends at this very moment."""
            stopping.append(threading.Thread(target=mine.stop))
            stopping[0].start()
            stopping[0].join(0.1)
            return ME

    mine = connector(EndingOwner(), loop)
    try:
        mine.dial(NOWHERE)
        stopping[0].join(60.0)
        wait_until(lambda: not any(thread.name.startswith("farcall-dial-w0") for thread in threading.enumerate()))
        mine.dial(NOWHERE)
        assert len(stopping) == 1
    finally:
        loop.stop()
