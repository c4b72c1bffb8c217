"""First connections: what has begun is found by who stops it."""

from __future__ import annotations

import threading

from farcall.protocol.hello import Hello
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.dialling import Dialling

NOWHERE = Member("nowhere", 1, 1 << 62)


def test_what_begins_while_the_node_ends_is_stopped_too() -> None:
    loop = Loop("test")
    stopping: list[threading.Thread] = []

    def me() -> Hello:
        """The node ends at this very moment."""
        stopping.append(threading.Thread(target=dialling.stop))
        stopping[0].start()
        stopping[0].join(0.1)
        return Hello(Member("me", 0, 0x4F), "cluster")

    dialling = Dialling(
        ("tcp",), b"secret", loop, me, lambda *_: None, lambda incarnation: None, lambda incarnation: True
    )
    try:
        dialling.dial(NOWHERE)
        stopping[0].join(10.0)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("farcall-redial-me")]
        dialling.dial(NOWHERE)
        assert len(stopping) == 1
    finally:
        loop.stop()
