"""From addresses to transports: one table row per scheme. Opens connections; authentication is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from farcall.transport.interface import Listener, Transport
from farcall.transport.tcp import TcpListener, dial_tcp, parse_tcp
from farcall.transport.tls import Tls
from farcall.transport.unix import UnixListener, dial_unix


class Scheme(NamedTuple):
    """The two functions that open connections of one kind."""

    dial: Callable[[str, float], Transport]
    listen: Callable[[str], Listener]


SCHEMES = {"tcp": Scheme(dial_tcp, TcpListener), "unix": Scheme(dial_unix, UnixListener)}


def _scheme(address: str) -> Scheme:
    name, colon, _ = address.partition(":")
    if not colon or name not in SCHEMES:
        raise ValueError(f"{address!r} is not an address: write tcp://host:port, unix:@name or unix:/path")
    return SCHEMES[name]


def dial(address: str, timeout_s: float, tls: Tls | None = None) -> Transport:
    """Connect to ``address`` within ``timeout_s``, or raise ``DialFailed``; use ``tls`` if a network lies between."""
    transport = _scheme(address).dial(address, timeout_s)
    if tls is None or not transport.needs_encryption:
        return transport
    try:
        return tls.dialled(transport, parse_tcp(address)[0])
    except BaseException:
        transport.close()
        raise


def listen(address: str) -> Listener:
    """Listen on ``address``, or raise ``ListenFailed``; peers dial the listener's ``address``."""
    return _scheme(address).listen(address)
