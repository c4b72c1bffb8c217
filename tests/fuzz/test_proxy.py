"""A proxy between two hosts gets neither in nor data out, nor can it read any.

At the meeting, at handshakes and after them it alters, drops, repeats, reorders, injects what it has seen and requests
of its own, and connects by itself with recordings of others. Whatever it does, calls that run were made, once, with
these arguments; answers are right; nobody else is a member. ``FARCALL_SOAK=full`` alters 100,000 times.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.faults.namespaces import enter
from tests.fuzz.mutations import FULL
from tests.fuzz.proxy import Place, Proxy, divert, places
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.cli.certificates import make_certificates
from farcall.cli.team import Team
from farcall.errors import RpcError
from farcall.options import TlsOptions
from farcall.protocol.frames import REQUEST, encode_small
from farcall.runtime.node import runtime_of

SECRET = "what the proxy does not have, and never sees"
MARKER = "what the proxy would like to know"
ALTERATIONS = 50_000 if FULL else 24
"""With each kind of protection."""
A_GROUP = 1000 if FULL else 20
"""So many alterations while the same members last."""
CHANCES = {"meeting": 0.005, "handshake": 0.01 if FULL else 0.05, "calls": 0.2 if FULL else 0.1}
"""A group that does not meet costs its 5 s, and so does a handshake that never ends."""
CALLERS = 4
BOUND_S = 120.0
IMPATIENT_S = 0.3
"""What was dropped never comes: the next bytes show that something is missing, and other calls send them."""

ran: list[tuple[str, int]] = []
intrusions: list[str] = []


def note(caller: str, number: int, marker: str, x: torch.Tensor) -> torch.Tensor:
    ran.append((caller, number) if marker == MARKER else (caller, -1))
    return x * number


def intrude() -> None:
    """What the proxy would have members do."""
    intrusions.append("in")


FORGED = encode_small(REQUEST, 0, 1, b"ptests.fuzz.test_proxy\0intrude", b"", b"")


class Seat:
    """In a member's process: one node after the other."""

    def __init__(self, rank: int, place: Place, tls: TlsOptions | None) -> None:
        self._rank, self._place, self._tls = rank, place, tls
        self._node: farcall.Node | None = None
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count(1)
        self._made: list[int] = []
        self._wrong: list[int] = []
        self._right = 0
        self._ended = False

    def start(self) -> str:
        """Meet the other one; why not, if so."""
        options = farcall.RpcBackendOptions(
            init_method=self._place.store,
            advertise=self._place.host,
            transports=("tcp",),
            secret=SECRET,
            tls=self._tls,
            membership=PATIENT,
            start_timeout_s=5.0,
        )
        node = farcall.Node(f"w{self._rank}", rank=self._rank, world_size=2, options=options)
        try:
            node.start()
        except (RpcError, OSError) as error:
            node.shutdown(graceful=False)
            return repr(error)
        assert [info.name for info in node.workers()] == ["w0", "w1"]
        self._node, self._ended = node, False
        self._threads = [threading.Thread(target=self._call, args=(node,)) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()
        return ""

    def _call(self, node: farcall.Node) -> None:
        me, other = f"w{self._rank}", f"w{1 - self._rank}"
        while not self._ended:
            number = next(self._numbers)
            x = torch.arange(20_000.0 if number % 3 == 0 else 50.0)
            self._made.append(number)
            try:
                found = node.rpc_sync(other, note, (me, number, MARKER, x), timeout=IMPATIENT_S)
            except RpcError:
                if any(peer.link.broken is not None for peer in runtime_of(node).others()):
                    return  # both have given each other up: nobody else comes in by that
                continue
            self._right += 1
            if not torch.equal(found, x * number):
                self._wrong.append(number)

    def runs(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def succeeds(self) -> bool:
        return self._right > 0

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(LONG_S)
        if self._node is not None:
            self._node.shutdown(graceful=False)
            self._node = None

    def account(self) -> tuple[list[int], list[tuple[str, int]], list[int], list[str]]:
        return self._made, ran, self._wrong, intrusions


@contextmanager
def member(
    rank: int, size: int, directory: str, between: list[Place], tls: list[TlsOptions | None]
) -> Iterator[Callable[[str], Any]]:
    torch.set_num_threads(1)
    logging.getLogger("farcall").setLevel(logging.CRITICAL)
    # torch's store believes lengths that the proxy has changed.
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    place = between[rank]
    if place.space:
        enter(place.space)
    else:
        divert(place)
    seat = Seat(rank, place, tls[rank])
    try:
        yield lambda request: getattr(seat, request)()
    finally:
        seat.end()


def options_of(protection: str, directory: Path, between: list[Place]) -> list[TlsOptions | None]:
    if protection == "default":
        return [None, None]
    made = make_certificates(directory, list(dict.fromkeys(place.host for place in between)))
    files = {host: TlsOptions(ca=str(directory / "ca.pem"), certificate=str(c), key=str(k)) for host, c, k in made}
    return [files[place.host] for place in between]


@pytest.mark.timeout(8 * 3600 if FULL else 900)
@pytest.mark.parametrize("protection", ["default", "certificates"])
def test_a_proxy_gets_neither_in_nor_data_out(protection: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FARCALL_SEED", "19"))
    proxy = Proxy(seed, FORGED, [SECRET.encode(), MARKER.encode()])
    with places(proxy) as between:
        team = Team(member, 2, between, options_of(protection, tmp_path, between))
        try:
            meddle(proxy, team)
            accounts = [team.ask(rank, "account", BOUND_S) for rank in (0, 1)]
            team.stop()
        except BaseException:
            team.kill()
            raise
    print(f"{protection}: {dict(proxy.alterations)}, in namespaces: {bool(between[0].space)}")
    for rank, (_, served, wrong, intruded) in enumerate(accounts):
        made_there = accounts[1 - rank][0]
        assert not wrong
        assert not intruded
        assert len(set(served)) == len(served), "a call ran twice"
        assert set(served) <= {(f"w{1 - rank}", number) for number in made_there}, "a call ran that nobody made"
    assert SECRET.encode() not in proxy.found
    assert MARKER.encode() not in proxy.found


def is_enough(proxy: Proxy) -> bool:
    return proxy.alterations.total() >= ALTERATIONS and {"handshake", "calls", "replay"} <= set(proxy.alterations)


def meddle(proxy: Proxy, team: Team) -> None:
    """One group after the other, until there were enough alterations; the first one meets undisturbed."""
    while not is_enough(proxy):
        before = proxy.alterations.total()
        with ThreadPoolExecutor(2) as pool:
            met = not any(pool.map(lambda rank: team.ask(rank, "start", BOUND_S), (0, 1)))
        if met and not proxy.chances:
            for rank in (0, 1):
                wait_until(lambda rank=rank: team.ask(rank, "succeeds", BOUND_S))
            proxy.chances = CHANCES
        until = monotonic() + (600.0 if FULL else 10.0)
        while met and proxy.alterations.total() < before + A_GROUP and monotonic() < until:
            for _ in range(5):
                if 2 * proxy.alterations["replay"] <= proxy.alterations.total():  # they are quicker than all others
                    proxy.replay()
            sleep(0.02)
            if not all(team.ask(rank, "runs", BOUND_S) for rank in (0, 1)):
                break
        for rank in (0, 1):
            team.ask(rank, "end", BOUND_S)
        print(f"the group has {'met' if met else 'not met'}; alterations so far: {dict(proxy.alterations)}", flush=True)
