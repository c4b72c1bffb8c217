"""Which transport an address asks for: ``tcp://``, ``unix:`` or ``memory:``, one row each.

This is the only place that knows all of them. It opens connections and says nothing about who may use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from farcall.transport.interface import Listener, Transport
from farcall.transport.memory import MemoryListener, dial_memory
from farcall.transport.tcp import TcpListener, dial_tcp, parse_tcp
from farcall.transport.tls import Tls
from farcall.transport.unix import UnixListener, dial_unix


class _Way(NamedTuple):
    dial: Callable[[str, float], Transport]
    listen: Callable[[str], Listener]


_WAYS = {
    "tcp": _Way(dial_tcp, TcpListener),
    "unix": _Way(dial_unix, UnixListener),
    "memory": _Way(dial_memory, MemoryListener),
}


def _way(address: str) -> _Way:
    scheme, colon, _ = address.partition(":")
    way = _WAYS.get(scheme) if colon else None
    if way is None:
        raise ValueError(f"{address!r} is not an address: write tcp://host:port, unix:@name, unix:/path or memory:name")
    return way


def dial(address: str, timeout_s: float, tls: Tls | None = None) -> Transport:
    """Connect to ``address`` within ``timeout_s``, or raise ``DialFailed``; with ``tls`` where a network is between."""
    transport = _way(address).dial(address, timeout_s)
    if tls is None or not transport.needs_sealing:
        return transport
    return tls.dialled(transport, parse_tcp(address)[0])


def listen(address: str) -> Listener:
    """Listen on ``address``, or raise ``ListenFailed``; the listener's ``address`` is what others dial."""
    return _way(address).listen(address)
