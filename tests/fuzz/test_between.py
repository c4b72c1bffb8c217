"""Somebody on the way between two members, who alters, drops, repeats, injects: neither in, nor any wrong value out.

The way is that of a router: the dialer dials the address that it was told, and its bytes pass through here. One with
the cluster's secret would be a member; this one has recorded everything, and may do what it likes with it.
``FARCALL_SOAK=full`` alters 100,000 times.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.fuzz.mutations import FULL, mutate, rounds
from tests.kit.team import team
from tests.kit.times import LONG_S, PATIENT

from farcall.errors import RpcError
from farcall.runtime.link import dialler
from farcall.transport.interface import Transport, TransportError
from farcall.transport.memory import memory_pair
from farcall.transport.sealed import SealedTransport
from farcall.transport.tcp import format_tcp, parse_tcp

SECRET = "what the router has not"
ALTERATIONS = 100_000 if FULL else 10
CHANCE = 0.03
IMPATIENT_S = 1.0
"""What was dropped never comes: the next bytes show that something is missing, and a call sends them."""


class Router:
    """A relay for each connection. Mutable: how often it has altered something, and all that it has seen."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.alterations = 0
        self.seen: list[bytes] = []
        self.meddles = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._targets: dict[int, tuple[str, int]] = {}
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def dial(self, plain: Callable[[str, float], Transport], address: str, timeout_s: float) -> Transport:
        """Dial ``address``, without knowing that it leads through here."""
        if not address.startswith("tcp://"):
            return plain(address, timeout_s)
        with self._lock:
            transport = plain(format_tcp("127.0.0.1", self._listening.getsockname()[1]), timeout_s)
            near, _ = self._listening.accept()
        try:
            far = socket.create_connection(parse_tcp(address), timeout=timeout_s)
        except OSError:
            near.close()
            return transport
        self._ends += [near, far]
        thread = threading.Thread(target=self._relay, args=(near, far), daemon=True)
        self._threads.append(thread)
        thread.start()
        return transport

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, contextlib.suppress(OSError, ValueError):
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    other = far if end is near else near
                    for piece in self._alter(data):
                        other.sendall(piece)

    def _alter(self, data: bytes) -> list[bytes]:
        with self._lock:
            chance = self.chance
            if len(self.seen) < 1000:
                self.seen.append(data)
            if not self.meddles or chance.random() >= CHANCE:
                return [data]
            self.alterations += 1
            kind = chance.randrange(5)
            if kind == 0:
                return []  # drop
            if kind == 1:
                return [data, data]  # repeat
            if kind == 2:
                return [data, chance.choice(self.seen)]  # inject what was seen once
            if kind == 3:
                return [chance.choice(self.seen)]  # put something else in its place
            return [mutate(chance, data, self.seen[-10:])]

    def close(self) -> None:
        self._listening.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)


@contextmanager
def routed(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Router]:
    router, plain = Router(seed), dialler.dial
    monkeypatch.setattr(dialler, "dial", lambda address, timeout_s, tls: router.dial(plain, address, timeout_s))
    try:
        yield router
    finally:
        router.close()


ran: list[int] = []


def note(number: int, x: torch.Tensor) -> torch.Tensor:
    ran.append(number)
    return x * number


def test_who_sits_between_two_members_gets_neither_in_nor_a_wrong_value_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    options: dict[str, Any] = {"transports": ["tcp"], "secret": SECRET, "membership": PATIENT}
    outcomes = {"right": 0, "lost": 0}
    with routed(monkeypatch, seed=19) as router:
        try:
            with team([None, None], 2, **options) as nodes:
                router.meddles = True
                number = 0
                x = torch.arange(50.0)
                while router.alterations < ALTERATIONS:
                    number += 1
                    try:
                        found = nodes[number % 2].rpc_sync(f"w{1 - number % 2}", note, (number, x), timeout=IMPATIENT_S)
                    except RpcError:
                        outcomes["lost"] += 1
                        if not all(peer.link.broken is None for node in nodes for peer in node._runtime.others()):
                            break  # both have given each other up: nobody else comes in by that
                        continue
                    assert torch.equal(found, x * number)
                    outcomes["right"] += 1
                router.meddles = False
                for node in nodes:
                    node.shutdown(graceful=False)
        except RpcError:
            pass
    assert outcomes["right"] > 0
    assert router.alterations > 0
    assert len(ran) == len(set(ran)), "a call ran twice"
    assert set(ran) <= set(range(1, number + 1)), "a call ran that nobody made"


def test_at_the_meeting_and_the_handshake_it_only_delays_or_prevents(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20 if FULL else 2):
        with routed(monkeypatch, seed) as router:
            router.meddles = True
            options: dict[str, Any] = {
                "transports": ["tcp"],
                "secret": "what the router has not",
                "start_timeout_s": 3.0,
            }
            try:
                with team([None, None], 2, **options) as nodes:
                    router.meddles = False
                    assert [info.name for info in nodes[0]._runtime.workers()] == ["w0", "w1"]
                    assert nodes[0].rpc_sync("w1", divmod, (7, 2)) == (3, 1)
            except RpcError:
                pass  # they did not meet: that is all it can bring about


def test_of_a_sealed_connection_only_what_was_sent_comes_out_in_its_order() -> None:
    """100,000 alterations under FARCALL_SOAK=full, some thousands else, of records small and large."""
    for seed, chance in rounds(100_000 if FULL else 4000):
        sealing, way = ends(KEYS)
        bodies = [chance.randbytes(chance.choice((1, 40, 300, 5000))) for _ in range(chance.randint(1, 4))]
        records = []
        for body in bodies:
            assert sealing.send((body,)) == len(body)
            records.append(take(way))
        altered = [*records]
        kind, which = chance.randrange(5), chance.randrange(len(records))
        if kind == 0:
            del altered[which]
        elif kind == 1:
            altered.insert(which, altered[which])
        elif kind == 2:
            altered.insert(which, chance.randbytes(chance.randint(1, 60)))
        elif kind == 3:
            chance.shuffle(altered)
        else:
            altered[which] = mutate(chance, altered[which], records)
        # The other end of the same connection, whose keys are the other way round.
        opening, there = ends(KEYS[::-1])
        there.send((b"".join(altered),))
        came = bytearray()
        view = memoryview(bytearray(1 << 16))
        with contextlib.suppress(TransportError):
            while count := opening.receive_into(view):
                came += view[:count]
        assert b"".join(bodies).startswith(came), seed


KEYS = (b"t" * 32, b"b" * 32)


def ends(keys: tuple[bytes, ...]) -> tuple[SealedTransport, Transport]:
    near, far = memory_pair(1 << 17)
    return SealedTransport(near, send_key=keys[0], receive_key=keys[1]), far


def take(way: Transport) -> bytes:
    view = memoryview(bytearray(1 << 16))
    count = way.receive_into(view)
    return bytes(view[: count or 0])
