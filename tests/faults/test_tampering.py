"""Somebody between two members changes bytes: every call runs once, with what its caller gave it, or not at all."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.team import team
from tests.kit.times import LONG_S

import farcall
from farcall import api
from farcall.cli.certificates import make_certificates
from farcall.errors import HandshakeRefused, InitError, NetworkError
from farcall.options import TlsOptions
from farcall.runtime.link import dialler
from farcall.testing.cluster import MemberFailed, run_cluster
from farcall.transport.interface import Transport

CALLS = 50
HONEST_BYTES = 4 * 1024
ran: list[bytes] = []


def keep(content: bytes) -> bytes:
    ran.append(content)
    return content


class Tampering:
    """Honest while the two ends prove themselves; then, now and then, a bit comes out changed."""

    changes = 0

    def __init__(self, inner: Transport, chance: random.Random) -> None:
        self._inner = inner
        self._chance = chance
        self._honest_bytes = HONEST_BYTES + chance.randrange(HONEST_BYTES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive_into(self, view: memoryview) -> int | None:
        count = self._inner.receive_into(view)
        self._honest_bytes -= count or 0
        if count and self._honest_bytes < 0:
            view[self._chance.randrange(count)] ^= 1 << self._chance.randrange(8)
            Tampering.changes += 1
        return count


def interpose(monkeypatch: pytest.MonkeyPatch) -> None:
    real, chance = dialler.dial, random.Random(7)

    def dial(way: str, timeout_s: float, tls: Any = None) -> Transport:
        between: Transport = tls.dialled(Tampering(real(way, timeout_s), chance), "127.0.0.1")
        return between

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
    interpose(monkeypatch)
    make_calls()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_changed_bytes_reach_nobody_with_certificates(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    interpose(monkeypatch)
    make_calls(tls=options(files))


def echo(rank: int) -> str:
    if rank == 0:
        return ""
    large = torch.arange(1 << 20)
    for size in (1, 1000, 1 << 20):
        assert torch.equal(farcall.rpc_sync("w0", torch.neg, (large[:size],)), -large[:size])
    return api.current_runtime().links.peers.remotes[0].link.transport.describe()


@pytest.mark.parametrize("bind_names", [False, True])
def test_calls_with_certificates(files: Path, bind_names: bool) -> None:
    _, described = run_cluster(2, echo, transports=("tcp",), tls=options(files, bind_names=bind_names))
    assert described.endswith("TLS")


def test_calls_over_tcp_are_encrypted_unless_all_members_say_no() -> None:
    _, described = run_cluster(2, echo, transports=("tcp",))
    assert described.endswith("TLS")
    _, described = run_cluster(2, echo, transports=("tcp",), encryption="off")
    assert described.startswith("tcp")
    assert not described.endswith("TLS")


def test_unix_sockets_stay_plain() -> None:
    _, described = run_cluster(2, echo)
    assert described.startswith("unix")


def test_a_worker_whose_name_is_in_no_certificate_is_not_let_in(files: Path) -> None:
    make_certificates(files / "unnamed", ["127.0.0.1"])
    with pytest.raises((HandshakeRefused, InitError, NetworkError, MemberFailed), match="names in its certificate"):
        run_cluster(2, echo, transports=("tcp",), tls=options(files / "unnamed", bind_names=True), start_timeout_s=15)


def start_two(*choices: dict[str, Any]) -> list[str]:
    """What members with these options say of their start."""
    url = tcp_url()
    common: dict[str, Any] = {"init_method": url, "transports": ("tcp",), "start_timeout_s": 3}
    nodes = [
        farcall.Node(f"w{rank}", rank=rank, world_size=2, options=farcall.RpcBackendOptions(**common, **own))
        for rank, own in enumerate(choices)
    ]

    def start(node: farcall.Node) -> str:
        try:
            node.start()
        except (NetworkError, InitError, HandshakeRefused) as error:
            return str(error)
        return ""

    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(start, nodes))
    finally:
        for node in nodes:
            node.shutdown(graceful=False)


@pytest.mark.parametrize("off", [0, 1])
def test_encryption_that_is_off_at_one_end_only_is_refused_and_both_name_the_option(off: int) -> None:
    choices: list[dict[str, Any]] = [{}, {}]
    choices[off] = {"encryption": "off"}
    for told in start_two(*choices):
        assert "FARCALL_ENCRYPTION=off" in told


@pytest.mark.parametrize("certified", [0, 1])
def test_certificates_are_on_both_ends_or_none(files: Path, certified: int) -> None:
    choices: list[dict[str, Any]] = [{}, {}]
    choices[certified] = {"tls": options(files)}
    for told in start_two(*choices):
        assert "give every member certificates of one authority" in told


def test_a_certificate_that_does_not_name_what_is_dialled_is_told_what_it_names(files: Path) -> None:
    make_certificates(files / "elsewhere", ["host0"])
    elsewhere = farcall.TlsOptions(
        ca=str(files / "elsewhere" / "ca.pem"),
        certificate=str(files / "elsewhere" / "host0.pem"),
        key=str(files / "elsewhere" / "host0.key"),
    )
    told_first, told = start_two({"tls": elsewhere}, {"tls": elsewhere})
    assert "certificate of this node does not name what was dialled" in told_first
    assert "w0: its certificate names host0" in told
    assert "not 127.0.0.1, which was dialled" in told
    assert "host0=127.0.0.1" in told or "HOST=127.0.0.1" in told
