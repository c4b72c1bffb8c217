"""TCP ports that stay ours until they are used.

A port that was only looked up may be somebody else's by the time a test's store binds it. These are bound: the system
gives them to nobody else. A server that sets SO_REUSEADDR, as every torch store does, may listen on them nevertheless.
"""

from __future__ import annotations

from farcall.testing.cluster import Port

_held: list[Port] = []


def held_port() -> int:
    """A port of loopback that nobody else gets before the end of this test."""
    _held.append(Port())
    return _held[-1].number


def tcp_url() -> str:
    """Where a cluster may meet."""
    return f"tcp://127.0.0.1:{held_port()}"


def let_ports_go() -> None:
    """Called after every test."""
    while _held:
        _held.pop().close()
