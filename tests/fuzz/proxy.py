"""Somebody on the way between two hosts: relays every connection, and reads, alters, drops, repeats, injects, replays.

The way is real where root may make network namespaces: between the two hosts are two more, each with the address of the
other host, and the proxy holds both. Members dial what they were told, and nothing in them is changed. Elsewhere
members on loopback are made to dial the proxy (`divert`), and tell it first where they wanted to go.

    10.199.1.1, host 0  ====  10.199.1.2, the proxy's  ....  10.199.1.1, the proxy's  ====  10.199.1.2, host 1
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import selectors
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from tests.faults.namespaces import enter, ip
from tests.fuzz.mutations import mutate
from tests.kit.ports import held_port
from tests.kit.times import LONG_S

from farcall.runtime.link import dialler
from farcall.transport.interface import Transport
from farcall.transport.tcp import parse_tcp
from farcall.transport.tls import Tls

__all__ = ["Place", "Proxy", "divert", "places"]

PORTS = range(40000, 40256)
"""Those that the hosts choose from: the proxy listens on each of them."""
STORE_PORT = 29500
KEPT = 500
FIRST_PIECES = 8
"""Of a connection, which cannot be read, so many belong to handshakes."""
CONNECT_S = 5.0
_numbers = itertools.count()

Connect: TypeAlias = Callable[[], socket.socket]
Way: TypeAlias = Callable[[socket.socket], Connect]


class Place(NamedTuple):
    """Where a member lives."""

    host: str
    store: str
    """The url at which it meets the other."""
    space: str = ""
    """Its network namespace."""
    proxy_port: int = 0
    """Where there are none: the port to dial instead of any other."""


class _Session(NamedTuple):
    """A connection of the past: where it led, and what its dialer said."""

    connect: Connect
    said: list[bytes]


class Proxy:
    """Relays for any number of connections.

    Mutable: what it is to do, what it has done, what it has seen.
    """

    def __init__(self, seed: int, forged: bytes, wanted: Sequence[bytes]) -> None:
        """``forged``: what it would have its victims do. ``wanted``: what it looks for in all that passes."""
        self.chances: dict[str, float] = {}
        """How probable it is that a piece is altered, by phase."""
        self.alterations: Counter[str] = Counter()
        self.found: set[bytes] = set()
        self._chance = random.Random(seed)
        self._forged = forged
        self._wanted = wanted
        self._seen: list[bytes] = []
        self._sessions: list[_Session] = []
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._accept)

    def serve(self, listening: socket.socket, way: Way, *, is_store: bool = False) -> None:
        """Relay what comes to ``listening``; ``way`` says how to connect to where it was meant for."""
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, (way, is_store))

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._waking.close()
        self._thread.join(LONG_S)
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    # ------------------------------------------------------------------ relaying

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                try:
                    near, _ = key.fileobj.accept()  # type: ignore[union-attr]
                except OSError:
                    continue  # it is gone already
                thread = threading.Thread(target=self._serve, args=(near, *key.data))
                self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]
                thread.start()

    def _serve(self, near: socket.socket, way: Way, is_store: bool) -> None:
        with near, contextlib.suppress(OSError, ValueError):
            near.settimeout(CONNECT_S)
            connect = way(near)
            with connect() as far:
                near.settimeout(None)
                far.settimeout(None)
                self._relay(near, far, None if is_store else connect)

    def _relay(self, near: socket.socket, far: socket.socket, connect: Connect | None) -> None:
        said: list[bytes] = []
        with self._lock:
            self._ends |= {near, far}
        try:
            for number in itertools.count():
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if end is near and len(said) < 50:
                        said.append(data)
                    phase = "meeting" if connect is None else "handshake" if number < FIRST_PIECES else "calls"
                    for piece in self._altered(data, phase):
                        (far if end is near else near).sendall(piece)
        finally:
            with self._lock:
                self._ends -= {near, far}
                if connect is not None:
                    self._sessions = [*self._sessions[-20:], _Session(connect, said)]

    def _altered(self, data: bytes, phase: str) -> list[bytes]:
        with self._lock:
            chance, others = self._chance, (*self._seen, self._forged)
            self.found.update(wanted for wanted in self._wanted if wanted in data)
            self._seen.append(data)
            del self._seen[:-KEPT]
            if chance.random() >= self.chances.get(phase, 0.0):
                return [data]
            self.alterations[phase] += 1
            match chance.randrange(6):
                case 0:  # drop
                    return []
                case 1:  # repeat
                    return [data, data]
                case 2:  # inject what was seen once
                    return [data, chance.choice(others)]
                case 3:  # put something else in its place
                    return [chance.choice(others)]
                case 4:  # reorder
                    at = chance.randrange(len(data))
                    return [data[at:], data[:at]]
                case _:
                    return [mutate(chance, data, self._seen[-10:])]

    # ------------------------------------------------------------------ connections of its own

    def replay(self) -> None:
        """Connect as an earlier dialer did and say what it said, or part of that, and then what is forged."""
        with self._lock:
            if not self._sessions:
                return
            chance = self._chance
            session = chance.choice(self._sessions)
            said = session.said[: chance.randrange(1, 9)]
            if chance.random() < 0.5:
                said = [mutate(chance, piece, self._seen[-10:]) for piece in said]
        with contextlib.suppress(OSError), session.connect() as stranger:
            stranger.settimeout(CONNECT_S)
            for piece in (*said, self._forged):
                stranger.sendall(piece)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
        with self._lock:
            self.alterations["replay"] += 1


# ---------------------------------------------------------------------- the way


@contextmanager
def places(proxy: Proxy) -> Iterator[list[Place]]:
    """The places of two members, with ``proxy`` in between."""
    with ExitStack() as cleanup:
        try:
            found = _in_namespaces(proxy, cleanup)
        except (OSError, subprocess.SubprocessError):
            found = _on_loopback(proxy)
        proxy.open()
        cleanup.callback(proxy.close)
        yield found


def _in_namespaces(proxy: Proxy, cleanup: ExitStack) -> list[Place]:
    """Raises ``OSError`` where there can be none."""
    mark = f"fp{os.getpid()}x{next(_numbers)}"
    hosts, ways = [f"{mark}h{side}" for side in (0, 1)], [f"{mark}w{side}" for side in (0, 1)]
    addresses = ["10.199.1.1", "10.199.1.2"]
    for space in (*hosts, *ways):
        ip("netns", "add", space)
        cleanup.callback(ip, "netns", "del", space)
        ip("-n", space, "link", "set", "lo", "up")
    for side in (0, 1):
        ip("-n", hosts[side], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", ways[side])
        for space, address in ((hosts[side], addresses[side]), (ways[side], addresses[1 - side])):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        _inside(hosts[side], _choose_ports)
    for side in (0, 1):
        # The far end of the way from one host is the near end at the other.
        for port in (STORE_PORT, *PORTS):
            listening = _inside(ways[side], partial(socket.create_server, ("", port)))
            proxy.serve(listening, _to(ways[1 - side]), is_store=port == STORE_PORT)
    store = f"tcp://{addresses[0]}:{STORE_PORT}"
    return [Place(addresses[side], store, hosts[side]) for side in (0, 1)]


def _choose_ports() -> None:
    for name, value in (("ip_local_port_range", f"{PORTS[0]} {PORTS[-1]}"), ("tcp_tw_reuse", "1")):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)


def _to(space: str) -> Way:
    def way(near: socket.socket) -> Connect:
        # What was dialled, address and port: the host beyond has that very address.
        target = near.getsockname()
        return lambda: _inside(space, lambda: socket.create_connection(target, CONNECT_S))

    return way


def _inside(space: str, action: Callable[[], object]) -> socket.socket:
    """Do ``action`` in a network namespace; sockets belong to the one that they were made in."""
    results: list[socket.socket] = []
    failures: list[OSError] = []

    def run() -> None:
        try:
            enter(space)
            results.append(action())  # type: ignore[arg-type]
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _on_loopback(proxy: Proxy) -> list[Place]:
    listening = socket.create_server(("127.0.0.1", 0))
    proxy.serve(listening, _as_told)
    port = listening.getsockname()[1]
    store_port = held_port()
    meeting = socket.create_server(("127.0.0.1", 0))
    connect = partial(socket.create_connection, ("127.0.0.1", store_port), CONNECT_S)
    proxy.serve(meeting, lambda near: connect, is_store=True)
    stores = (store_port, meeting.getsockname()[1])
    return [Place("127.0.0.1", f"tcp://127.0.0.1:{store}", proxy_port=port) for store in stores]


def _as_told(near: socket.socket) -> Connect:
    told = b""
    while not told.endswith(b"\n"):
        told += near.recv(1)
    target = parse_tcp(told.decode().strip())
    return lambda: socket.create_connection(target, CONNECT_S)


def divert(place: Place) -> None:
    """In the process of a member without a network of its own: dial the proxy, and say first who was meant."""
    plain = dialler.dial

    def dial(address: str, timeout_s: float, tls: Tls | None = None) -> Transport:
        transport = plain(f"tcp://127.0.0.1:{place.proxy_port}", timeout_s)
        transport.send((f"{address}\n".encode(),))
        return transport if tls is None else tls.dialled(transport, parse_tcp(address)[0])

    dialler.dial = dial  # type: ignore[attr-defined]
