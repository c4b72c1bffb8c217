"""The connector without sockets: who is let in that speaks of a session, and what has begun is found by `stop`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.kit.waiting import wait_until

from farcall.errors import HandshakeRefused
from farcall.options import RpcBackendOptions
from farcall.protocol.hello import Hello, Remind, Resume
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.connector import Connector
from farcall.secret import Secret

ME = Hello(Member("w0", 0, 0x1F), "cluster")
OTHER = Hello(Member("w1", 1, 0x2F), "cluster")
NOWHERE = Member("nowhere", 1, 1 << 62)


class Owner:
    """A table of peers in which nobody is."""

    def hello(self) -> Hello:
        return ME

    def is_wanted(self, incarnation: int) -> bool:
        return True


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
