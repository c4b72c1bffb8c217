"""TCP: between hosts, and within one host if unix sockets are not available.

Addresses: ``tcp://host:port``, ``tcp://[v6]:port``; to listen also ``tcp://*:port`` (every interface, IPv4
and IPv6 through one socket where the system can) and port 0 (any free one). Small frames leave at once (no
Nagle), and a vanished host is noticed, by keepalive or by ``silent_s``. Knows nothing of frames.

The other host is alive as long as its kernel acknowledges bytes (``TCP_INFO``), which it does even for a busy or
stopped process. ``TCP_USER_TIMEOUT`` was rejected: it also ends connections to a busy process whose kernel acknowledges
everything but has no room for more.
"""

from __future__ import annotations

import errno
import math
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
_ANSWER_KEPT_S = 10.0  # for an answer that came after all callers had given up

# A fallback for the membership protocol, whose probes are quicker: a vanished host is noticed after 30 + 3 * 10 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # number, local address, remote address, state, ...
_LISTENS = "0A"

# Three fields of struct tcp_info, in linux/tcp.h: tcpi_probes, tcpi_unacked, tcpi_last_ack_recv.
_INFO = struct.Struct("=3xB20xI28xI")
_HAS_INFO = sys.platform.startswith("linux") and hasattr(socket, "TCP_INFO")


def parse_tcp(address: str) -> tuple[str, int]:
    """Parse ``tcp://host:port`` into (host, port); ``*`` becomes the empty host."""
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
    """The address of ``host`` and ``port``, with brackets if needed."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _plain(host: object) -> str:
    """A numeric address as it is usually written: plain IPv4 even if an IPv6 socket carries it."""
    return str(host).removeprefix("::ffff:")


_Targets: TypeAlias = Sequence[tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]]


class _LookUp:
    """A query to the system's resolver, which has no timeout of its own. Mutable: the answer, set by its thread."""

    def __init__(self) -> None:
        self.done: threading.Event = threading.Event()
        self.found: _Targets = []
        self.error: OSError | None = None
        self.answered_at: float = math.inf

    @property
    def is_stale(self) -> bool:
        """Is the answer too old to be used?"""
        return time.monotonic() - self.answered_at > _ANSWER_KEPT_S


_look_ups: dict[tuple[int, str, int], _LookUp] = {}
"""Look-ups in progress, and unused answers; by process (a forked child lacks these threads), host, port."""


def _resolve(host: str, port: int, flags: int = 0) -> _Targets:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, *_, target in found]


def _look_up(host: str, port: int, timeout_s: float) -> _Targets:
    """Look up the addresses of ``host`` within ``timeout_s``; raise ``OSError`` on failure.

    A second caller waits for the same look-up, or gets the answer that came too late for the first caller.
    """
    try:
        return _resolve(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass  # a name, not a numeric address
    question, mine = (os.getpid(), host, port), _LookUp()

    def ask() -> None:
        try:
            mine.found = _resolve(host, port)
        except OSError as error:
            mine.error = error
        finally:
            mine.answered_at = time.monotonic()
            mine.done.set()

    for old in [one for one, look_up in _look_ups.copy().items() if look_up.is_stale]:
        _look_ups.pop(old, None)
    asked = _look_ups.setdefault(question, mine)
    if asked is mine:
        try:
            threading.Thread(target=ask, name="farcall-look-up", daemon=True).start()
        except RuntimeError as error:  # the process cannot start more threads
            mine.error = OSError(str(error))
            mine.done.set()
    if not asked.done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
        raise TimeoutError(f"no name service answered within {timeout_s:.3g} s")
    if _look_ups.get(question) is asked:
        _look_ups.pop(question, None)  # another thread that waited for it may have removed it first
    if asked.error is not None:
        raise asked.error
    return asked.found


def port_is_open(address: str) -> bool:
    """Does anybody in this network namespace listen on the port of ``address``? True where the kernel does not tell."""
    port = f":{parse_tcp(address)[1]:04X}"
    try:
        for table in _TABLES:
            if os.path.exists(table):
                with open(table, encoding="ascii") as file:
                    if any(words[1].endswith(port) and words[3] == _LISTENS for words in map(str.split, file)):
                        return True
    except OSError:
        return True
    return not os.path.exists(_TABLES[0])


def leads_to(address: str, host: str) -> bool:
    """Does ``address``, resolved on this host, include the numeric address ``host``?"""
    name, port = parse_tcp(address)
    try:
        return any(_plain(target[0]) == host for _, target in _look_up(name or "localhost", port, _LOOK_UP_S))
    except OSError:
        return False


class TcpTransport(SocketTransport):
    """A TCP connection. Mutable: ``_asked_at``, the start of the present silence."""

    __slots__ = ("_asked_at", "peer_host")

    kind = "tcp"
    needs_encryption = True

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.peer_host: str = _plain(stream.getpeername()[0])
        self._asked_at: float | None = None  # when bytes were first seen unacknowledged
        # Let the kernel adapt its buffer sizes: fixed ones were no quicker on loopback (0.25 to 4 MiB tried) and would
        # be wrong for a long path. But limit unsent bytes, since small messages wait behind them.
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
            return 0.0  # closed, or broken: the next operation reports why
        if len(info) < _INFO.size:
            return 0.0
        window_probes, unacknowledged, since_answer_ms = _INFO.unpack(info)
        now = time.monotonic()
        # One probe of a full window may still be in transit; two in a row are unanswered.
        if not unacknowledged and window_probes < 2:
            self._asked_at = None
            return 0.0
        if self._asked_at is None or self._asked_at < now - since_answer_ms / 1000.0:
            self._asked_at = now  # an answer came since; the unacknowledged bytes may have been sent just now
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


def _bind(host: str, port: int) -> socket.socket:
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            return _listening(family, ("", port), dual=dual)
        except OSError as error:
            # IPv6 is compiled in but disabled: "every interface" then means every IPv4 interface.
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
    """Connect to ``address``: try each of its IP addresses in turn, within ``timeout_s`` in all."""
    host, port = parse_tcp(address)
    deadline = time.monotonic() + timeout_s
    try:
        found = _look_up(host or "localhost", port, timeout_s)
    except OSError as error:
        raise DialFailed(f"cannot resolve {host!r} of {address}: {error}") from error
    errors: list[OSError] = []
    for position, (family, target) in enumerate(found):
        # The remaining addresses share the remaining time: one black hole must not use it up.
        left_s = (deadline - time.monotonic()) / (len(found) - position)
        stream = None
        try:
            stream = socket.socket(family, socket.SOCK_STREAM)
            connect(stream, target, left_s, f"{target[0]}")
            if stream.getsockname() == stream.getpeername():
                # Nobody listens, and the kernel chose the dialled port as our own: TCP lets a socket connect to itself.
                raise DialRefused(f"cannot connect to {target[0]}: nobody listens on port {port}")
            return TcpTransport(stream)
        except OSError as error:
            if stream is not None:
                stream.close()
            errors.append(error)
    kind: type[DialFailed] = DialFailed
    if all(isinstance(error, DialRefused) for error in errors):
        kind = DialRefused
    elif all(isinstance(error, DialRefused | DialUnanswered) for error in errors):
        kind = DialUnanswered
    raise kind(f"cannot connect to {address}: {'; '.join(map(str, errors))}")
