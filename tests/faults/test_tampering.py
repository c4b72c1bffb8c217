"""Somebody between two members changes bytes: every call runs once, with what its caller gave it, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.team import team, together
from tests.kit.times import LONG_S

import farcall
from farcall import api
from farcall.errors import HandshakeRefused, InitError, NetworkError
from farcall.options import TlsOptions
from farcall.runtime.link import dialler
from farcall.testing.cluster import MemberFailed, run_cluster
from farcall.transport.interface import Transport
from farcall.transport.layer import Layer

CALLS = 50
HONEST_BYTES = 4 * 1024
ran: list[bytes] = []


def keep(content: bytes) -> bytes:
    ran.append(content)
    return content


class Tampering(Layer):
    """Honest while the two ends prove themselves; then, now and then, a bit comes out changed."""

    needs_sealing = True
    changes = 0

    def __init__(self, inner: Transport, chance: random.Random) -> None:
        super().__init__(inner)
        self._chance = chance
        self._honest_bytes = HONEST_BYTES + chance.randrange(HONEST_BYTES)

    def send(self, buffers: Any, descriptors: Any = ()) -> int:
        return self._inner.send(buffers, descriptors)

    def receive_into(self, view: memoryview) -> int | None:
        count = self._inner.receive_into(view)
        self._honest_bytes -= count or 0
        if count and self._honest_bytes < 0:
            view[self._chance.randrange(count)] ^= 1 << self._chance.randrange(8)
            Tampering.changes += 1
        return count

    def describe(self) -> str:
        return f"{self._inner.describe()}, with somebody in between"


def interpose(monkeypatch: pytest.MonkeyPatch, over: Callable[[Transport, Any], Transport]) -> None:
    real, chance = dialler.dial, random.Random(7)

    def dial(way: str, timeout_s: float, tls: Any = None) -> Transport:
        return over(Tampering(real(way, timeout_s), chance), tls)

    monkeypatch.setattr(dialler, "dial", dial)
    Tampering.changes = 0
    ran.clear()


def make_calls(**options: Any) -> None:
    contents = [bytes([number]) * 700 for number in range(CALLS)]
    with team([None, None], transports=("tcp",), rpc_timeout=LONG_S, **options) as nodes:
        for content in contents:
            assert nodes[1].rpc_sync("w0", keep, (content,)) == content
    assert ran == contents
    assert Tampering.changes > 2


def test_changed_bytes_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    interpose(monkeypatch, lambda transport, tls: transport)
    make_calls()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography", reason="certificates are made with it: pip install 'farcall[tls]'")
    from farcall.cli.certificates import make_certificates

    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory, ["127.0.0.1"], ["w0", "w1"])
    return directory


def options(directory: Path, **choices: bool) -> TlsOptions:
    return TlsOptions(
        ca=str(directory / "ca.pem"),
        certificate=str(directory / "127.0.0.1.pem"),
        key=str(directory / "127.0.0.1.key"),
        **choices,
    )


def test_changed_bytes_reach_nobody_under_tls(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    interpose(monkeypatch, lambda transport, tls: tls.dialled(transport, "127.0.0.1"))
    make_calls(tls=options(files))


def echo(rank: int) -> str:
    if rank == 0:
        return ""
    large = torch.arange(1 << 20)
    for size in (1, 1000, 1 << 20):
        assert torch.equal(farcall.rpc_sync("w0", torch.neg, (large[:size],)), -large[:size])
    return api.current_runtime().links.peers.remotes[0].link.transport.describe()


@pytest.mark.parametrize("bind_names", [False, True])
def test_calls_over_tls(files: Path, bind_names: bool) -> None:
    _, described = run_cluster(2, echo, transports=("tcp",), tls=options(files, bind_names=bind_names))
    assert described.endswith("TLS")


def test_unix_sockets_stay_plain(files: Path) -> None:
    _, described = run_cluster(2, echo, tls=options(files))
    assert described.startswith("unix")


def test_a_worker_whose_name_is_in_no_certificate_is_not_let_in(files: Path) -> None:
    from farcall.cli.certificates import make_certificates

    make_certificates(files / "unnamed", ["127.0.0.1"])
    with pytest.raises((HandshakeRefused, InitError, NetworkError, MemberFailed), match="names in its certificate"):
        run_cluster(2, echo, transports=("tcp",), tls=options(files / "unnamed", bind_names=True), start_timeout_s=15)


def test_tls_is_on_both_ends_or_none(files: Path) -> None:
    url = tcp_url()
    nodes = [
        farcall.Node(
            f"w{rank}",
            rank=rank,
            world_size=2,
            options=farcall.RpcBackendOptions(
                init_method=url, transports=("tcp",), start_timeout_s=3, tls=options(files) if rank else None
            ),
        )
        for rank in range(2)
    ]
    try:
        with pytest.raises((NetworkError, InitError)):
            together([node.start for node in nodes])
    finally:
        for node in nodes:
            node.shutdown(graceful=False)
