"""A relay between two hosts that ends the encryption towards both: it reads no byte of a call, and both ends say why.

It does all that its knowledge allows: it answers in the name of each end to the other, with certificates that it made,
or has, and puts proofs of its own in the place of theirs where it has a key to make them with.
"""

from __future__ import annotations

import hashlib
import logging
import select
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from tests.faults.namespaces import enter
from tests.fuzz.proxy import Connect, Place, Proxy, divert, places
from tests.kit.team import team
from tests.kit.times import LONG_S, PATIENT

import farcall
from farcall.cli.certificates import make_certificates
from farcall.errors import RpcError
from farcall.observe.observer import Observer, send_all
from farcall.options import TlsOptions
from farcall.protocol.handshake import _proof, _root_key
from farcall.protocol.hello import HEADER, Kind, RefusalReason, Refused, Side, message_of, observer_key, refuse
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import finish, start_processes
from farcall.transport.interface import Transport, TransportError
from farcall.transport.tcp import TcpTransport, format_tcp, parse_tcp
from farcall.transport.tls import Tls

SECRET = "what the relay does not have, and never sees"
MARKER = "what the relay would like to know"
START_S = 8.0

ran: list[str] = []


def note(marker: str) -> str:
    ran.append(marker)
    return marker


class Relay(Proxy):
    """Ends TLS at both sides (``tls``: with what; None: hands on what comes), and proves ``key``, if it has one.

    Mutable: what it read.
    """

    def __init__(self, tls: Tls | None, key: bytes) -> None:
        super().__init__(0, b"", [MARKER.encode()])
        self._tls = tls
        self._key = key
        self.read: bytearray = bytearray()
        self.forged: int = 0

    def _relay(self, near: socket.socket, far: socket.socket, connect: Connect | None) -> None:
        if connect is None:
            super()._relay(near, far, connect)
            return
        with self._lock:
            self._ends |= {near, far}
        ends: list[Transport] = [TcpTransport(near), TcpTransport(far)]
        if self._tls is not None:
            ends = [self._tls.accepted(ends[0]), self._tls.dialled(ends[1], far.getpeername()[0])]
        try:
            self._hand_on(ends, (near, far))
        except TransportError:
            pass
        finally:
            with self._lock:
                self._ends -= {near, far}

    def _hand_on(self, ends: list[Transport], sockets: tuple[socket.socket, ...]) -> None:
        view = memoryview(bytearray(1 << 17))
        greetings: list[bytes] = []
        while True:
            select.select(sockets, [], [])
            for number in (0, 1):
                while (count := ends[number].receive_into(view)) is not None:
                    if not count:
                        return
                    data = bytes(view[:count])
                    self.read += data
                    if len(greetings) < 2:
                        greetings.append(data)
                    elif self._key and data[10:12] == Kind.DIALER_PROOF.to_bytes(2, "big"):
                        self._forge(ends, greetings)
                        continue
                    assert send_all(ends[1 - number], data, monotonic() + LONG_S)

    def _forge(self, ends: list[Transport], greetings: list[bytes]) -> None:
        """Prove to each end what the other one should have proved, over the channel with it."""
        for end, side, kind in (
            (ends[1], Side.DIALER, Kind.DIALER_PROOF),
            (ends[0], Side.LISTENER, Kind.LISTENER_PROOF),
        ):
            transcript = hashlib.sha256(b"".join(greetings) + end.binding).digest()
            proof = message_of(kind, _proof(_root_key(self._key), side, transcript))
            assert len(proof) > HEADER.size
            send_all(end, proof, monotonic() + LONG_S)
            self.forged += 1


def take_part(rank: int, between: list[Place], options: list[dict[str, Any]]) -> tuple[str, str, list[str]]:
    """Meet, call, and tell: what the start failed with, what was logged, what ran here."""
    torch.set_num_threads(1)
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("farcall").addHandler(Lines())
    place = between[rank]
    if place.space:
        enter(place.space)
    else:
        divert(place)
    node = farcall.Node(
        f"w{rank}",
        rank=rank,
        world_size=2,
        options=farcall.RpcBackendOptions(
            init_method=place.store,
            advertise=place.host,
            transports=("tcp",),
            secret=SECRET,
            membership=PATIENT,
            start_timeout_s=START_S,
            **options[rank],
        ),
    )
    try:
        node.start()
        if rank == 1:
            assert node.rpc_sync("w0", note, (MARKER,)) == MARKER
        node.shutdown()
    except (RpcError, OSError) as error:
        node.shutdown(graceful=False)
        return str(error), "\n".join(lines), ran
    return "", "\n".join(lines), ran


def meet(relay: Relay, options: Callable[[list[Place]], list[dict[str, Any]]]) -> list[tuple[str, str, list[str]]]:
    with places(relay) as between:
        told: list[tuple[str, str, list[str]]] = finish(
            start_processes(2, take_part, between, options(between)), 4 * LONG_S
        )
    return told


def test_the_relay_of_these_tests_hands_on_what_members_say() -> None:
    """Where it may read: else the tests below would show nothing."""
    relay = Relay(None, b"")
    told = meet(relay, lambda between: [{"encryption": "off"}] * 2)
    assert [failure for failure, _, _ in told] == ["", ""]
    assert told[0][2] == [MARKER]
    assert MARKER.encode() in relay.read


@pytest.mark.parametrize("has_key", [False, True], ids=["nothing", "the observers' key"])
def test_a_relay_that_ends_the_encryption_at_both_ends_reads_no_call(has_key: bool) -> None:
    relay = Relay(Tls(None), observer_key(SECRET.encode()) if has_key else b"")
    (first, log, ran), (second, _, _) = meet(relay, lambda between: [{}, {}])
    assert relay.read, "it was not even there"
    assert bool(relay.forged) is has_key
    assert MARKER.encode() not in relay.read
    assert ran == []
    assert "could not prove the cluster's secret" in log
    assert "secret" in second
    assert "w1" in first


@pytest.mark.parametrize("of", ["another authority", "this authority", "this authority, and hosts are not checked"])
def test_a_relay_with_a_certificate_reads_no_call(of: str, tmp_path: Path) -> None:
    def files(folder: str, host: str) -> TlsOptions:
        [(_, certificate, key)] = make_certificates(tmp_path / folder, [host])
        ca, checks = str(tmp_path / folder / "ca.pem"), "not checked" not in of
        return TlsOptions(ca=ca, certificate=str(certificate), key=str(key), check_hosts=checks)

    own = files("strangers" if of == "another authority" else "cluster", "relay.example")
    relay = Relay(Tls(TlsOptions(ca=own.ca, certificate=own.certificate, key=own.key, check_hosts=False)), b"")
    told = meet(relay, lambda between: [{"tls": files("cluster", place.host)} for place in between])
    (first, log, ran), (second, _, _) = told
    assert MARKER.encode() not in relay.read
    assert ran == []
    if "not checked" in of:
        assert relay.read, "it was not even there"
        assert "could not prove the cluster's secret" in log
        assert "secret" in second
    else:
        assert relay.read in (b"", refuse(RefusalReason.OTHER_HOST, "").farewell)
        assert "certificate" in second
        assert "certificate of this node" in log or of == "another authority"
        assert "names relay.example" in second or of == "another authority"
    assert "w1" in first


def test_a_relay_between_an_observer_and_a_member_reads_no_question(caplog: pytest.LogCaptureFixture) -> None:
    """As `farcall top` and `farcall stacks` connect to a member elsewhere."""
    relay = Relay(Tls(None), b"")
    with team([None], 1, transports=("tcp",), advertise="127.0.0.1", secret=SECRET) as [node]:
        options = farcall.RpcBackendOptions(secret=SECRET)
        (address,) = runtime_of(node).addresses
        with Observer.connect_with_secret(address, options) as observer:
            assert observer.snapshots(LONG_S).answers
        listening = socket.create_server(("127.0.0.1", 0))
        relay.serve(listening, lambda near: lambda: socket.create_connection(parse_tcp(address)))
        relay.open()
        try:
            with pytest.raises(Refused, match="secret"):
                Observer.connect_with_secret(format_tcp(*listening.getsockname()), options)
        finally:
            relay.close()
    assert relay.read, "it was not even there"
    assert "could not prove the cluster's secret" in caplog.text
