"""TLS over a connection: the contract of transports, who is let in, and somebody in between."""

from __future__ import annotations

import errno
import re
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from tests.kit.memory_transport import MemoryTransport, memory_pair
from tests.kit.transports import TRANSPORT_CHECKS, Check

from farcall.cli.certificates import make_certificates
from farcall.options import RpcBackendOptions, TlsOptions
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import MAGIC, TLS_NAME, TLS_RECORD, Hello, Refused, Side
from farcall.protocol.member import Member
from farcall.transport import tls as tls_module
from farcall.transport.address import dial, listen
from farcall.transport.interface import (
    AcceptPostponed,
    NotEncrypted,
    TlsFailed,
    Transport,
    TransportBroken,
    TransportForged,
)
from farcall.transport.pump import TlsPump, _names_host
from farcall.transport.tls import Tls, _ephemeral, tls_for

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


@pytest.mark.parametrize("certified", [False, True], ids=["default", "certificates"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Check, certified: bool, files: Path) -> None:
    tls = Tls(options(files) if certified else None)
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
    tls = Tls(options(files))
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


def test_a_small_message_is_read_once(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read in vain, before it came or behind it, costs more than to decrypt it."""
    reads = []
    read_into = TlsPump.read_into

    def count(pump: TlsPump, view: memoryview) -> int | None:
        reads.append(read_into(pump, view))
        return reads[-1]

    monkeypatch.setattr(TlsPump, "read_into", count)
    between.left.send((bytes(200),))
    between.carry()
    assert between.right.receive_into(memoryview(bytearray(1000))) == 200
    assert between.right.receive_into(memoryview(bytearray(1000))) is None
    assert reads == [200]


def test_what_comes_of_a_record_is_a_sign_of_life_before_all_of_it_is_here(between: Between) -> None:
    """On a slow way a record takes seconds."""
    between.left.send((bytes(10_000),))
    data = take(between.left_way)
    view = memoryview(bytearray(20_000))
    for piece, held_bytes in ((data[:4000], 4000), (data[4000:9000], 9000)):
        between.right_way.send((piece,))
        assert between.right.receive_into(view) is None
        assert between.right.held_bytes == held_bytes
    between.right_way.send((data[9000:],))
    assert between.right.receive_into(view) == 10_000
    assert between.right.held_bytes == 0


def test_a_python_that_does_not_tell_channels_apart_proves_nothing(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssl.SSLObject, "get_channel_binding", lambda self, kind: None)
    with pytest.raises(TlsFailed, match="tls-unique"):
        assert between.left.binding


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
    ],
    ids=["a strange dialler", "a strange listener"],
)
def test_who_has_not_the_right_certificate_gets_nowhere(
    files: Path, dialler: tuple[str, str], listener: tuple[str, str], host: str, why: str
) -> None:
    one = Tls(options(files / dialler[0], dialler[1]))
    other = Tls(options(files / listener[0], listener[1]))
    with pytest.raises(TlsFailed, match=why):
        Between(one, other, host).meet()


def test_a_host_must_be_named_where_that_is_not_given_up(files: Path) -> None:
    first, elsewhere = Tls(options(files)), Tls(options(files, "elsewhere"))
    for one in (first, Tls(options(files, check_hosts=False)), elsewhere):
        pair = Between(one, elsewhere, "elsewhere" if one is elsewhere else "localhost")
        pair.meet()
        assert (re.search("names elsewhere, .*not localhost", pair.left.wrong_host) is not None) is (one is first)
        assert not pair.right.wrong_host


@pytest.mark.parametrize("said", [b"\x89farcall, in the clear", b"GET / HTTP/1.1\r\n", b"\0"])
@pytest.mark.parametrize("side", ["accepted", "dialled"])
def test_who_does_not_begin_with_tls_is_known_by_its_first_bytes(side: str, said: bytes) -> None:
    left, right = memory_pair()
    end = Tls(None).accepted(right) if side == "accepted" else Tls(None).dialled(right, "host")
    left.send((said,))
    with pytest.raises(NotEncrypted) as caught:
        end.receive_into(memoryview(bytearray(100)))
    assert caught.value.first_bytes == said


def test_a_dialer_says_that_it_is_farcall_before_anything_is_encrypted() -> None:
    left, right = memory_pair()
    Tls(None).dialled(left, "host").send((b"x",))
    hello = take(right)
    assert hello.startswith(TLS_RECORD)
    assert TLS_NAME in hello


def test_whoever_only_knocks_ends_the_stream_like_everybody_else() -> None:
    left, right = memory_pair()
    listening = Tls(None).accepted(right)
    left.close()
    assert listening.receive_into(memoryview(bytearray(100))) == 0


def test_a_dialer_is_told_where_the_other_end_closes_instead_of_tls() -> None:
    left, right = memory_pair()
    dialled = Tls(None).dialled(left, "host")
    dialled.send((b"x",))
    right.close()
    with pytest.raises(TransportBroken, match="its log says why"):
        dialled.receive_into(memoryview(bytearray(100)))


def test_each_process_has_a_certificate_of_its_own_and_leaves_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = _ephemeral(1)
    assert _ephemeral(1) is mine
    assert _ephemeral(2).listening_digest != mine.listening_digest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name", "host", "does"),
    [
        ("DNS", "host0", "HOST0", True),
        ("DNS", "host0", "host1", False),
        ("DNS", "*.cluster.example", "host0.cluster.example", True),
        ("DNS", "*.cluster.example", "a.b.cluster.example", False),
        ("DNS", "*", "host0", False),
        ("DNS", "*.", "host0", False),
        ("DNS", "*.host0", "host0", False),
        ("DNS", "10.0.0.1", "10.0.0.1", False),
        ("IP Address", "10.0.0.1", "10.0.0.1", True),
        ("IP Address", "10.0.0.1", "10.0.0.2", False),
        ("IP Address", "FE80:0:0:0:0:0:0:1", "fe80::1%eth0", True),
        ("email", "host0", "host0", False),
    ],
)
def test_names_of_hosts_in_certificates(kind: str, name: str, host: str, does: bool) -> None:
    assert _names_host(kind, name, host) is does


class Empty:
    """A dialer that sends records without content: messages that change its keys (RFC 8446, 4.6.3), encrypted by hand.

    Mutable: its present secret and the number of the next record. Python's ``ssl`` makes none of them.
    """

    def __init__(self, way: MemoryTransport, listening: Transport, log: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.keylog_filename = str(log)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        shaking = context.wrap_bio(incoming, outgoing)
        while True:
            try:
                shaking.do_handshake()
                break
            except ssl.SSLWantReadError:
                way.send((outgoing.read(),))
                listening.receive_into(memoryview(bytearray(100)))
                incoming.write(take(way))
        way.send((outgoing.read(),))
        assert shaking.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
        self._secret = next(
            bytes.fromhex(line.split()[2])
            for line in log.read_text().splitlines()
            if line.startswith("CLIENT_TRAFFIC_SECRET_0")
        )

    def _derived(self, label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(hashes.SHA384(), size, info).derive(self._secret)

    def record(self) -> bytes:
        """The next one: it asks the other end to change its keys, too. Its key serves for no other record."""
        head, message = b"\x17\x03\x03\0\x16", b"\x18\0\0\1\1" + b"\x16"
        found = head + AESGCM(self._derived(b"key", 32)).encrypt(self._derived(b"iv", 12), message, head)
        self._secret = self._derived(b"traffic upd", 48)
        return found


def test_a_forked_child_takes_no_lock_of_its_parent(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the parent that looks at its certificates at that moment would hold it for ever."""
    chosen = RpcBackendOptions(tls=options(files))
    parent = tls_for(chosen)
    assert parent is not None
    assert tls_for(chosen) is parent
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert tls_for(chosen) is not parent


def test_who_sends_records_with_nothing_in_them_is_cut_off(tmp_path: Path) -> None:
    """Without a proof, for ever: the thread that read them did nothing else, and kept an answer to each."""
    way, inner = memory_pair(1 << 20)
    listening = Tls(None).accepted(inner)
    empty = Empty(way, listening, tmp_path / "keys")
    view = memoryview(bytearray(1 << 14))
    way.send((b"".join(empty.record() for _ in range(10)),))
    assert listening.receive_into(view) is None
    way.send((b"".join(empty.record() for _ in range(5000)),))
    with pytest.raises(TransportBroken, match="without anything in them"):
        listening.receive_into(view)


def test_who_begins_with_more_than_anybody_needs_is_cut_off() -> None:
    """OpenSSL would keep 128 KiB of a stranger."""
    way, inner = memory_pair(1 << 20)
    listening = Tls(None).accepted(inner)
    announced = b"\x01\x01\xf0\0"
    for content in (announced + bytes((1 << 14) - len(announced)), *[bytes(1 << 14)] * 6):
        way.send((TLS_RECORD + b"\x01\x40\0" + content,))
    with pytest.raises(TransportBroken, match="without anything in them"):
        listening.receive_into(memoryview(bytearray(100)))


def certificates_of(between: Between) -> bytes:
    return between.left.binding[:64]


def test_certificates_are_read_again_when_they_change(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path / "copy")
    tls = Tls(options(tmp_path / "copy"))
    pair = Between(tls, tls)
    pair.meet()
    before = certificates_of(pair)
    (tmp_path / "copy" / "localhost.pem").write_text("half a file")
    again = Between(tls, tls)
    again.meet()
    assert certificates_of(again) == before
    make_certificates(tmp_path / "copy", ["localhost"])
    renewed = Between(tls, tls)
    renewed.meet()
    assert certificates_of(renewed) != before


def hello(name: str) -> Hello:
    return Hello(Member(name, 0, 1), "cluster")


def farcall_handshake(one: Transport, other: Transport) -> Established | None:
    dialer = Handshake(Side.DIALER, hello("w0"), SECRET, b"d" * 32, binding=lambda: one.binding)
    listener = Handshake(Side.LISTENER, hello("w1"), SECRET, b"l" * 32, binding=lambda: other.binding)
    greeting, _ = listener.receive(dialer.start())
    proof, _ = dialer.receive(greeting)
    return listener.receive(proof)[1]


def test_the_handshake_inside_proves_both_certificates(files: Path) -> None:
    here = Tls(options(files))
    direct = Between(here, here)
    direct.meet()
    assert farcall_handshake(direct.left, direct.right) is not None
    # A member that puts itself between two others, with its own certificate, and hands on what they say.
    middle = Tls(options(files, "elsewhere", check_hosts=False))
    lax = Tls(options(files, check_hosts=False))
    first, second = Between(lax, middle), Between(middle, lax)
    first.meet()
    second.meet()
    with pytest.raises(Refused):
        farcall_handshake(first.left, second.right)


def test_somebody_in_between_who_has_no_certificate_is_found_out_as_well() -> None:
    """By default: he makes one, as everybody does, and has nothing but the secret to lack."""
    direct = Between(Tls(None), Tls(None))
    direct.meet()
    assert direct.left.binding == direct.right.binding
    assert farcall_handshake(direct.left, direct.right) is not None
    first, second = Between(Tls(None), Tls(None)), Between(Tls(None), Tls(None))
    first.meet()
    second.meet()
    # The same process, so the same certificate: it is the channel that differs.
    assert first.left.binding[:64] == second.right.binding[:64]
    with pytest.raises(Refused):
        farcall_handshake(first.left, second.right)


def test_recorded_traffic_and_all_secrets_learnt_afterwards_open_nothing() -> None:
    """Not even with the key of the certificate, which these ends have: keys of a channel end with it."""
    pair = Between(Tls(None), Tls(None))
    said: dict[str, list[bytearray]] = {"dialer": [], "listener": []}

    def carry_and_record() -> None:
        for who, source, target in (
            ("dialer", pair.left_way, pair.right_way),
            ("listener", pair.right_way, pair.left_way),
        ):
            if data := take(source):
                said[who].append(data)
                target.send((data,))

    pair.carry = carry_and_record  # type: ignore[method-assign]
    pair.meet()
    dialer = Handshake(Side.DIALER, hello("w0"), SECRET, b"d" * 32, binding=lambda: pair.left.binding)
    listener = Handshake(Side.LISTENER, hello("w1"), SECRET, b"l" * 32, binding=lambda: pair.right.binding)
    view = memoryview(bytearray(1 << 16))
    outgoing, ends = dialer.start(), [(pair.right, listener), (pair.left, dialer)]
    messages = []
    while outgoing:
        messages.append(outgoing)
        ends[1][0].send((outgoing,))
        pair.carry()
        outgoing = ends[0][1].receive(view[: ends[0][0].receive_into(view)])[0]
        ends.reverse()
    pair.left.send((b"a function and its arguments",))
    pair.carry()
    assert len(messages) == 4
    record = b"".join(b"".join(pieces) for pieces in said.values())
    for message in (*messages, MAGIC, b"d" * 32, b"l" * 32, b"a function"):
        assert message not in record
    # What was said to one end of it is nothing to another end, with the same secret and the same certificate.
    for who, end, way in (("dialer", 1, 0), ("listener", 0, 1)):
        again = Between(Tls(None), Tls(None))
        again.left.send((b"x",))  # a dialer speaks first
        ends_again, ways_again = (again.left, again.right), (again.left_way, again.right_way)
        heard = bytearray()
        with pytest.raises(TransportBroken):  # noqa: PT012
            for piece in said[who]:
                ways_again[1 - way].send((piece,))
                heard += view[: ends_again[end].receive_into(view) or 0]
        assert heard == b""


def test_it_is_tls_1_3_whatever_the_system_sets_for_other_programs() -> None:
    """With MaxProtocol = TLSv1.2 in openssl.cnf nobody met anybody: "no protocols available"."""
    for context in tls_module._contexts():
        assert context.minimum_version is context.maximum_version is ssl.TLSVersion.TLSv1_3


def test_a_connection_that_gets_no_tls_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors, it would keep one for as long as the error is looked at."""

    def fail(process: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    listener = listen("tcp://127.0.0.1:0")
    monkeypatch.setattr(tls_module, "_ephemeral", fail)
    with pytest.raises(AcceptPostponed) as held:
        dial(listener.address, PATIENCE_S, Tls(None))
    far = listener.accept()
    assert far is not None
    assert far.wait_readable(PATIENCE_S), held
    assert far.receive_into(memoryview(bytearray(1))) == 0
    far.close()
    listener.close()


def test_names_in_certificates(files: Path) -> None:
    bound = Tls(options(files, bind_names=True))
    pair = Between(bound, bound)
    pair.meet()
    assert pair.left.peer_names is not None
    assert {"localhost", "w0"} <= pair.left.peer_names
    free = Tls(options(files))
    pair = Between(free, free)
    pair.meet()
    assert pair.left.peer_names is None


def test_files_that_are_no_certificates_are_told_at_once(tmp_path: Path) -> None:
    for name in ("ca.pem", "localhost.pem", "localhost.key"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(ValueError, match="farcall certificates"):
        Tls(options(tmp_path))


def test_what_stands_before_a_certificate_may_have_any_letters(files: Path, tmp_path: Path) -> None:
    """Other programs write whose it is; OpenSSL skips it."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    certificate = tmp_path / "localhost.pem"
    certificate.write_bytes("friendlyName: Zoë's\n".encode() + certificate.read_bytes())
    here, there = Tls(options(tmp_path)), Tls(options(files))
    pair = Between(here, there)
    pair.meet()
    assert farcall_handshake(pair.left, pair.right) is not None


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(files: Path, tmp_path: Path) -> None:
    """OpenSSL would ask on the terminal; when files are read again, too, on the thread that reads for all links."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    key = serialization.load_pem_private_key((tmp_path / "localhost.key").read_bytes(), None)
    kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = serialization.BestAvailableEncryption(b"password")
    (tmp_path / "localhost.key").write_bytes(key.private_bytes(kind, form, locked))
    with pytest.raises(ValueError, match="the key needs a password"):
        Tls(options(tmp_path))


@pytest.mark.parametrize(
    ("alert", "is_about_certificates"), [(40, False), (70, False), (120, False), (45, True), (48, True), (116, True)]
)
def test_certificates_are_advised_only_where_the_other_end_speaks_of_them(
    alert: int, is_about_certificates: bool
) -> None:
    """A web server that does not know TLS 1.3, or farcall, says so to members without any, too."""
    way, inner = memory_pair()
    dialling = Tls(None).dialled(inner, "host")
    assert dialling.send((b"x",)) == 0
    way.send((b"\x15\x03\x03\0\2\2" + bytes([alert]),))
    with pytest.raises(TlsFailed, match="the other end refuses TLS") as told:
        dialling.receive_into(memoryview(bytearray(10)))
    assert ("certificates" in str(told.value)) is is_about_certificates
