"""TLS over a connection: the contract of transports, who is let in, and somebody in between."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="certificates are made with it: pip install 'farcall[tls]'")

from tests.kit.memory_transport import MemoryTransport, memory_pair
from tests.kit.transports import TRANSPORT_CHECKS, Check

from farcall.cli.certificates import make_certificates
from farcall.options import TlsOptions
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import Hello, Refused, Side
from farcall.protocol.member import Member
from farcall.transport.address import dial, listen
from farcall.transport.interface import Transport, TransportBroken, TransportForged
from farcall.transport.tls import Tls, TlsFailed

KEY = b"k" * 32

SECRET = b"a secret of some length"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory, ["localhost", "elsewhere"], ["w0"])
    make_certificates(directory / "strangers", ["localhost"])
    return directory


def options(directory: Path, host: str = "localhost", **choices: bool) -> TlsOptions:
    return TlsOptions(
        ca=str(directory / "ca.pem"),
        certificate=str(directory / f"{host}.pem"),
        key=str(directory / f"{host}.key"),
        **choices,
    )


def shake(one: Transport, other: Transport) -> None:
    """Have both ends speak until a byte came through each way."""
    for _ in range(10):
        if one.send((b"x",)):
            break
        other.receive_into(memoryview(bytearray(10)))
    view = memoryview(bytearray(10))
    while other.receive_into(view) is None:
        pass
    assert other.send((b"y",)) == 1
    assert one.receive_into(view) == 1


def over_tcp(tls: Tls) -> tuple[Transport, Transport]:
    listener = listen("tcp://127.0.0.1:0")
    try:
        near = dial(listener.address, PATIENCE_S)
        far = listener.accept()
        assert far is not None
    finally:
        listener.close()
    pair = tls.dialled(near, "localhost"), tls.accepted(far)
    shake(*pair)
    return pair


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Check, files: Path) -> None:
    tls = Tls(options(files), lambda: [KEY])
    check(lambda: over_tcp(tls))


class Between:
    """Two ends, and somebody through whose hands all passes."""

    def __init__(self, dialling: Tls, listening: Tls, host: str = "localhost") -> None:
        left, self.left_way = memory_pair(1 << 20)
        self.right_way, right = memory_pair(1 << 20)
        self.left = dialling.dialled(left, host)
        self.right = listening.accepted(right)

    def carry(self) -> None:
        carry(self.left_way, self.right_way)
        carry(self.right_way, self.left_way)

    def meet(self) -> None:
        for _ in range(10):
            if self.left.send((b"x",)):
                break
            self.carry()
            self.right.receive_into(memoryview(bytearray(10)))
            self.carry()
        self.carry()
        assert self.right.receive_into(memoryview(bytearray(10))) == 1
        assert self.right.send((b"y",)) == 1
        self.carry()
        assert self.left.receive_into(memoryview(bytearray(10))) == 1


def take(transport: MemoryTransport) -> bytearray:
    view = memoryview(bytearray(1 << 20))
    return bytearray(view[: transport.receive_into(view) or 0])


def carry(source: MemoryTransport, target: MemoryTransport) -> None:
    data = take(source)
    if data:
        target.send((data,))


@pytest.fixture
def between(files: Path) -> Between:
    tls = Tls(options(files), lambda: [KEY])
    pair = Between(tls, tls)
    pair.meet()
    return pair


def test_nobody_in_between_can_read_or_change(between: Between) -> None:
    assert between.left.send((b"a function and its arguments",)) == 28
    data = take(between.left_way)
    assert b"function" not in data
    data[-1] ^= 1
    between.right_way.send((data,))
    with pytest.raises(TransportForged):
        between.right.receive_into(memoryview(bytearray(100)))
    with pytest.raises(TransportBroken):  # another thread, which sends meanwhile, is told so, too
        between.right.send((b"an answer",))


def test_nobody_in_between_can_drop_or_repeat(between: Between) -> None:
    records = []
    for word in (b"one", b"two"):
        between.left.send((word,))
        records.append(take(between.left_way))
    between.right_way.send((records[1],))
    with pytest.raises(TransportForged):
        between.right.receive_into(memoryview(bytearray(100)))


@pytest.mark.parametrize(
    ("dialler", "listener", "host", "why"),
    [
        (("strangers", "localhost"), ("", "localhost"), "localhost", "certificate"),
        (("", "localhost"), ("strangers", "localhost"), "localhost", "certificate"),
        (("", "localhost"), ("", "elsewhere"), "localhost", "not valid for 'localhost'"),
    ],
    ids=["a strange dialler", "a strange listener", "another host"],
)
def test_who_has_not_the_right_certificate_gets_nowhere(
    files: Path, dialler: tuple[str, str], listener: tuple[str, str], host: str, why: str
) -> None:
    one = Tls(options(files / dialler[0], dialler[1]), lambda: [KEY])
    other = Tls(options(files / listener[0], listener[1]), lambda: [KEY])
    with pytest.raises(TlsFailed, match=why):
        Between(one, other, host).meet()


def test_a_host_need_not_be_named_where_that_is_asked_for(files: Path) -> None:
    one = Tls(options(files, check_hosts=False), lambda: [KEY])
    Between(one, Tls(options(files, "elsewhere"), lambda: [KEY])).meet()


def test_who_does_not_speak_tls_gets_nowhere(files: Path) -> None:
    left, right = memory_pair()
    listening = Tls(options(files), lambda: [KEY]).accepted(right)
    left.send((b"\x89farcall, in the clear",))
    with pytest.raises(TlsFailed):
        listening.receive_into(memoryview(bytearray(100)))


def test_certificates_are_read_again_when_they_change(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path / "copy")
    tls = Tls(options(tmp_path / "copy"), lambda: [KEY])
    pair = Between(tls, tls)
    pair.meet()
    before = pair.left.binding
    (tmp_path / "copy" / "localhost.pem").write_text("half a file")
    again = Between(tls, tls)
    again.meet()
    assert again.left.binding == before
    make_certificates(tmp_path / "copy", ["localhost"])
    renewed = Between(tls, tls)
    renewed.meet()
    assert renewed.left.binding != before


def hello(name: str) -> Hello:
    return Hello(Member(name, 0, 1), "cluster")


def farcall_handshake(one: Transport, other: Transport) -> Established | None:
    dialer = Handshake(Side.DIALER, hello("w0"), SECRET, b"d" * 32, binding=lambda: one.binding)
    listener = Handshake(Side.LISTENER, hello("w1"), SECRET, b"l" * 32, binding=lambda: other.binding)
    greeting, _ = listener.receive(dialer.start())
    proof, _ = dialer.receive(greeting)
    return listener.receive(proof)[1]


def test_the_handshake_inside_proves_both_certificates(files: Path) -> None:
    here = Tls(options(files), lambda: [KEY])
    direct = Between(here, here)
    direct.meet()
    assert farcall_handshake(direct.left, direct.right) is not None
    # A member that puts itself between two others, with its own certificate, and hands on what they say.
    middle = Tls(options(files, "elsewhere", check_hosts=False), lambda: [KEY])
    lax = Tls(options(files, check_hosts=False), lambda: [KEY])
    first, second = Between(lax, middle), Between(middle, lax)
    first.meet()
    second.meet()
    with pytest.raises(Refused):
        farcall_handshake(first.left, second.right)


def test_names_in_certificates(files: Path) -> None:
    bound = Tls(options(files, bind_names=True), lambda: [KEY])
    pair = Between(bound, bound)
    pair.meet()
    assert pair.left.peer_names is not None
    assert {"localhost", "w0"} <= pair.left.peer_names
    free = Tls(options(files), lambda: [KEY])
    pair = Between(free, free)
    pair.meet()
    assert pair.left.peer_names is None


def test_files_that_are_no_certificates_are_told_at_once(tmp_path: Path) -> None:
    for name in ("ca.pem", "localhost.pem", "localhost.key"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(ValueError, match="farcall certificates"):
        Tls(options(tmp_path), lambda: [KEY])


@pytest.mark.skipif(sys.version_info < (3, 13), reason="ssl has no PSK before 3.13")
def test_the_secret_alone_is_enough() -> None:
    one = Tls(TlsOptions(from_secret=True), lambda: [KEY])
    Between(one, one).meet()
    with pytest.raises(TransportBroken):
        Between(one, Tls(TlsOptions(from_secret=True), lambda: [b"o" * 32])).meet()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="ssl has PSK")
def test_the_secret_alone_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"3\.13"):
        Tls(TlsOptions(from_secret=True), lambda: [KEY])
