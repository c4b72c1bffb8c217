"""TCP: between hosts, and within one host where unix sockets cannot reach.

Addresses: ``tcp://host:port``, ``tcp://[v6]:port``; to listen also ``tcp://*:port`` (every interface, IPv4
and IPv6 through one socket where the system can) and port 0 (any free one). Small frames leave at once (no
Nagle), and a vanished host is noticed, by keepalive or by ``silent_s``. Knows nothing of frames.

Whether the other host is there, its kernel tells, in what it acknowledges (``TCP_INFO``): it does that for a process
that is busy or stopped, too. ``TCP_USER_TIMEOUT`` would not do: it also ends connections whose other end
acknowledges all, but has no room, as a busy process has none.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from farcall.transport.interface import DialFailed, DialRefused, DialUnanswered, ListenFailed
from farcall.transport.stream_socket import SocketListener, SocketTransport, connect

_BACKLOG = 1024
_NOT_SENT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)
_MOST_NOT_SENT_BYTES = 128 * 1024
_LOOK_UP_S = 1.0

# An idle peer whose host vanished is noticed after 30 + 3 * 10 s; the probes of the membership protocol are quicker,
# this is the net below them.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


# Of struct tcp_info, in linux/tcp.h: tcpi_probes, tcpi_unacked, tcpi_last_ack_recv.
_INFO = struct.Struct("=3xB20xI28xI")
_HAS_INFO = sys.platform.startswith("linux") and hasattr(socket, "TCP_INFO")


def parse_tcp(address: str) -> tuple[str, int]:
    """``tcp://host:port`` as (host, port); ``*`` comes back as the empty host."""
    rest = address.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    if rest == address or not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not a TCP address: write tcp://host:port or tcp://[v6]:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: an IPv6 host goes into brackets, as in tcp://[{host}]:{port}")
    if not host:
        raise ValueError(f"{address!r} names no host")
    return ("" if host == "*" else host), int(port)


def format_tcp(host: str, port: int) -> str:
    """The address of ``host`` and ``port``, with brackets where needed."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _plain(host: object) -> str:
    """A numeric address as it is usually written: IPv4 even where an IPv6 socket carries it."""
    return str(host).removeprefix("::ffff:")


_Targets: TypeAlias = Sequence[tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]]


class _LookUp:
    """A question to the resolver of the system, which may leave it unanswered for as long as it likes."""

    def __init__(self) -> None:
        self.done: threading.Event = threading.Event()
        self.found: _Targets = []
        self.error: OSError | None = None


_look_ups: dict[tuple[int, str, int], _LookUp] = {}
"""Under way, by process (a forked child has no such threads), host and port."""


def _resolve(host: str, port: int, flags: int = 0) -> _Targets:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, *_, target in found]


def _look_up(host: str, port: int, timeout_s: float) -> _Targets:
    """What ``host`` means, asked within ``timeout_s``; raises ``OSError``. Who asks again waits for the same answer."""
    try:
        return _resolve(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass  # a name
    question, mine = (os.getpid(), host, port), _LookUp()

    def ask() -> None:
        try:
            mine.found = _resolve(host, port)
        except OSError as error:
            mine.error = error
        finally:
            del _look_ups[question]
            mine.done.set()

    asked = _look_ups.setdefault(question, mine)
    if asked is mine:
        try:
            threading.Thread(target=ask, name="farcall-look-up", daemon=True).start()
        except RuntimeError as error:  # there can be no more threads
            del _look_ups[question]
            mine.error = OSError(str(error))
            mine.done.set()
    if not asked.done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
        raise TimeoutError(f"no name service answered within {timeout_s:.3g} s")
    if asked.error is not None:
        raise asked.error
    return asked.found


def leads_to(address: str, host: str) -> bool:
    """Is ``host``, a numeric address, one of those that ``address`` means from here?"""
    name, port = parse_tcp(address)
    try:
        return any(_plain(target[0]) == host for _, target in _look_up(name or "localhost", port, _LOOK_UP_S))
    except OSError:
        return False


class TcpTransport(SocketTransport):
    """A TCP connection."""

    __slots__ = ("_asked_at", "peer_host")

    kind = "tcp"
    needs_sealing = True

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.peer_host: str = _plain(stream.getpeername()[0])
        self._asked_at: float | None = None  # since when something was seen to be unanswered
        # Buffer sizes are left to the kernel, which adapts them: fixed ones were no quicker on loopback (0.25
        # to 4 MiB tried) and would be wrong for a long way. But small messages wait behind its unsent bytes.
        if _NOT_SENT is not None:
            stream.setsockopt(socket.IPPROTO_TCP, _NOT_SENT, _MOST_NOT_SENT_BYTES)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            option = getattr(socket, name, None)
            if option is not None:
                stream.setsockopt(socket.IPPROTO_TCP, option, value)

    def silent_s(self) -> float:
        if not _HAS_INFO:
            return 0.0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:
            return 0.0  # closed, or about to say why it is broken
        if len(info) < _INFO.size:
            return 0.0
        window_probes, unacknowledged, since_answer_ms = _INFO.unpack(info)
        now = time.monotonic()
        # Of probes of a full window, one may be on its way; two in a row have not been answered.
        if not unacknowledged and window_probes < 2:
            self._asked_at = None
            return 0.0
        if self._asked_at is None or self._asked_at < now - since_answer_ms / 1000.0:
            self._asked_at = now  # what is unanswered may just have been sent
        return now - self._asked_at

    @staticmethod
    def _name(address: object) -> str:
        if not isinstance(address, tuple):
            return str(address)
        return format_tcp(_plain(address[0]), address[1]).removeprefix("tcp://")


class TcpListener(SocketListener):
    """A listening TCP port."""

    __slots__ = ()

    transport_class: ClassVar[type[SocketTransport]] = TcpTransport

    def __init__(self, address: str) -> None:
        host, port = parse_tcp(address)
        try:
            listening = _bind(host, port)
        except OSError as error:
            raise ListenFailed(f"cannot listen on {address}: {error}") from error
        bound_port = listening.getsockname()[1]
        super().__init__(listening, format_tcp(host or "*", bound_port))

    @property
    def port(self) -> int:
        """The port really bound."""
        return parse_tcp(self.address)[1]


def _bind(host: str, port: int) -> socket.socket:
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            return _listening(family, ("", port), dual=dual)
        except OSError as error:
            # IPv6 compiled in but switched off: every IPv4 interface is what is left of "every interface".
            if not dual or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
            return _listening(socket.AF_INET, ("", port), dual=False)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    last: OSError = OSError(f"{host!r} has no address")
    for family, _, _, _, target in found:
        try:
            return _listening(family, target, dual=False)
        except OSError as error:
            last = error
    raise last


def _listening(family: int, target: object, dual: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        listening.bind(target)  # type: ignore[arg-type]
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def dial_tcp(address: str, timeout_s: float) -> TcpTransport:
    """Connect to ``address``, trying each of its IP addresses in turn until ``timeout_s`` is over."""
    host, port = parse_tcp(address)
    deadline = time.monotonic() + timeout_s
    try:
        found = _look_up(host or "localhost", port, timeout_s)
    except OSError as error:
        raise DialFailed(f"cannot resolve {host!r} of {address}: {error}") from error
    failures: list[str] = []
    refused = unanswered = 0
    for position, (family, target) in enumerate(found):
        # What is left is shared among the addresses still to try: one black hole must not eat it all.
        left_s = (deadline - time.monotonic()) / (len(found) - position)
        try:
            stream = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            failures.append(str(error))
            continue
        try:
            connect(stream, target, left_s, f"{target[0]}")
            if stream.getsockname() == stream.getpeername():
                # Nobody listens, and the kernel picked the very port dialled as our own: TCP lets a socket
                # meet itself.
                raise DialRefused(f"cannot connect to {target[0]}: nobody listens on port {port}")
            return TcpTransport(stream)
        except OSError as error:
            stream.close()
            failures.append(str(error))
            refused += isinstance(error, DialRefused)
            unanswered += isinstance(error, DialUnanswered)
    kind: type[DialFailed] = DialFailed
    if refused == len(found):
        kind = DialRefused
    elif unanswered and refused + unanswered == len(found):
        kind = DialUnanswered
    raise kind(f"cannot connect to {address}: {'; '.join(failures)}")
