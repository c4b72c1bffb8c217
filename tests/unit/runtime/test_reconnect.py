"""Who is let in that speaks of a session: `Reconnecting.admit`, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import HandshakeRefused
from farcall.protocol.hello import Hello, Remind, Resume
from farcall.protocol.member import Member
from farcall.runtime.link.reconnect import Reconnecting

ME = Hello(Member("w0", 0, 0x1F), "cluster")
OTHER = Hello(Member("w1", 1, 0x2F), "cluster")


def reconnecting() -> Reconnecting:
    unused: Any = None
    return Reconnecting(ME, b"", 10.0, unused, unused, unused)


def test_who_starts_refuses_nobody_that_asks_for_a_connection_it_is_about_to_make() -> None:
    mine = reconnecting()
    assert mine.admit(OTHER.wanting(Remind("s")), 0.0) == b""
    mine.starting = False
    with pytest.raises(HandshakeRefused, match="has ended"):
        mine.admit(OTHER.wanting(Remind("s")), 0.0)


def test_nor_does_who_is_dialling_that_very_life() -> None:
    mine = reconnecting()
    mine.starting = False
    mine.is_dialling = lambda incarnation: incarnation == OTHER.member.incarnation
    assert mine.admit(OTHER.wanting(Remind("s")), 0.0) == b""
    mine.is_dialling = lambda incarnation: False
    with pytest.raises(HandshakeRefused):
        mine.admit(OTHER.wanting(Remind("s")), 0.0)


def test_who_comes_back_to_a_session_that_never_was_is_refused() -> None:
    with pytest.raises(HandshakeRefused):
        reconnecting().admit(OTHER.wanting(Resume("s", 3)), 0.0)
