"""Addresses, listeners and what a dial says when it fails."""

from __future__ import annotations

import errno
import gc
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.kit.memory_transport import FRESH
from tests.kit.ports import held_port
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.private_files import pid_namespace
from farcall.transport import tcp, unix
from farcall.transport.address import dial, listen
from farcall.transport.interface import (
    MAX_DESCRIPTORS_PER_SEND,
    MAX_DESCRIPTORS_UNTAKEN,
    DialFailed,
    DialRefused,
    ListenFailed,
    TransportBroken,
    TransportClosed,
)
from farcall.transport.tcp import TcpListener, format_tcp, leads_to, parse_tcp, port_is_open
from farcall.transport.unix import UnixListener, UnixTransport

PATIENCE_S = 60.0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The name of a socket has about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://localhost:80", "localhost", 80),
        ("tcp://10.0.0.1:0", "10.0.0.1", 0),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://*:1", "", 1),
    ],
)
def test_tcp_addresses(address: str, host: str, port: int) -> None:
    assert parse_tcp(address) == (host, port)
    assert format_tcp(host or "*", port) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp", "tcp://", "tcp://host", "tcp://:1", "tcp://::1:80", "tcp://host:65536", "tcp://host:x"),
        *("http://a:1", "unix", "unix:@", "unix:a\0b", "memory"),
    ],
)
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        dial(address, PATIENCE_S)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "unix:", FRESH])
def test_a_listener_that_closed(address: str) -> None:
    # A port that is held: nobody else takes it meanwhile.
    listener = listen(f"tcp://127.0.0.1:{held_port()}" if address.startswith("tcp") else address)
    where = listener.address
    assert listener.accept() is None
    listener.close()
    listener.close()
    with pytest.raises(DialFailed, match="cannot connect"):
        dial(where, PATIENCE_S)
    if listener.fileno() is not None:
        with pytest.raises(TransportClosed):
            listener.accept()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "unix:", FRESH])
def test_an_address_in_use(address: str) -> None:
    listener = listen(address)
    try:
        with pytest.raises(ListenFailed, match="cannot listen"):
            listen(listener.address)
    finally:
        listener.close()


def port_of(listener: TcpListener) -> int:
    return parse_tcp(listener.address)[1]


def test_an_unknown_host() -> None:
    with pytest.raises(DialFailed, match="cannot resolve"):
        dial("tcp://no-such-host.invalid:1", PATIENCE_S)


def test_a_name_service_that_does_not_answer_costs_no_more_than_the_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_look_ups", {})
    asked: list[str] = []
    answers = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, port: int, **options: int) -> object:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return look_up(host, port, **options)
        asked.append(host)
        assert answers.wait(PATIENCE_S)
        return look_up("127.0.0.1", port, **options)

    with closing(TcpListener("tcp://127.0.0.1:0")) as listener:
        monkeypatch.setattr(socket, "getaddrinfo", hang)
        address = f"tcp://slow.example:{port_of(listener)}"
        for _ in range(3):
            with pytest.raises(DialFailed, match=r"'slow.example'.*no name service answered within 0.01 s"):
                dial(address, 0.01)
        wait_until(lambda: asked)
        assert asked == ["slow.example"]  # each further thread would hang, too
        answers.set()
        [look_up_then] = tcp._look_ups.values()
        assert look_up_then.done.wait(PATIENCE_S)  # when nobody waits any more
        dial(address, PATIENCE_S).close()
        assert asked == ["slow.example"]  # the answer that came late was not in vain
        assert not tcp._look_ups
        assert leads_to(address, "127.0.0.1")
        assert len(asked) == 2


def test_an_answer_of_a_name_service_that_is_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(TcpListener("tcp://127.0.0.1:0")) as listener:
        old = tcp._LookUp()
        old.error = OSError("an old answer")
        old.done.set()
        old.answered_at = time.monotonic() - tcp._ANSWER_KEPT_S
        kept = {(os.getpid(), host, port_of(listener)): old for host in ("localhost", "never.asked.again")}
        monkeypatch.setattr(tcp, "_look_ups", kept)
        dial(f"tcp://localhost:{port_of(listener)}", PATIENCE_S).close()
        assert not kept


def test_every_interface_includes_both_versions() -> None:
    listener = TcpListener("tcp://*:0")
    try:
        dial(f"tcp://127.0.0.1:{port_of(listener)}", PATIENCE_S).close()
        if socket.has_dualstack_ipv6():
            dial(f"tcp://[::1]:{port_of(listener)}", PATIENCE_S).close()
    finally:
        listener.close()


def test_tcp_options() -> None:
    listener = TcpListener("tcp://127.0.0.1:0")
    near = dial(listener.address, PATIENCE_S)
    far = listener.accept()
    assert far is not None
    for end in (near, far):
        descriptor = end.fileno()
        assert descriptor is not None
        with socket.socket(fileno=os.dup(descriptor)) as probe:
            assert probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert probe.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        end.close()
    listener.close()


def test_a_socket_file_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = UnixListener(f"unix:{path}")
    assert path.is_socket()
    dial(listener.address, PATIENCE_S).close()
    listener.close()
    assert not path.exists()


def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ListenFailed):
        UnixListener(f"unix:{path}")
    assert path.read_text() == "data"


def test_sockets_lie_where_only_their_user_may_enter(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    listener = UnixListener()
    (directory,) = short_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert listener.address.startswith(f"unix:{directory}/")
    dial(listener.address, PATIENCE_S).close()
    listener.close()
    assert not list(directory.iterdir())


def test_a_directory_that_others_may_enter_or_whose_name_is_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "farcall").mkdir(mode=0o755)
    long = tmp_path / ("x" * 120)
    long.mkdir()
    for root in (tmp_path, long):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
        listener = UnixListener()
        home = Path(listener.address.removeprefix("unix:")).parent
        assert not home.is_relative_to(tmp_path)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        dial(listener.address, PATIENCE_S).close()
        listener.close()
        assert not home.exists()


def test_names_of_killed_processes_are_removed(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    directory = short_path / "farcall"
    directory.mkdir(mode=0o700)
    ours, elsewhere = pid_namespace(), pid_namespace() + 1
    living, dead = os.getpid(), 2**22 + 1
    for name in (f"{ours}-{living}-aa", f"{ours}-{dead}-bb", f"{elsewhere}-{dead}-cc"):
        (directory / f"{name}.socket").touch()
    listener = UnixListener()
    left = {path.name for path in directory.iterdir()} - {Path(listener.address).name}
    listener.close()
    assert left == {f"{ours}-{living}-aa.socket", f"{elsewhere}-{dead}-cc.socket"}


@pytest.mark.parametrize("host", ["*", "127.0.0.1"])
def test_the_kernel_knows_whether_anybody_listens_at_a_port_of_this_host(host: str) -> None:
    listener = TcpListener(f"tcp://{host}:0")
    port = listener.address.rpartition(":")[2]
    there = f"tcp://192.0.2.1:{port}"  # any address: a member advertises one of this host
    assert port_is_open(there)
    listener.close()
    assert not port_is_open(there)


@pytest.mark.parametrize("removed", ["file", "directory"])
def test_a_file_that_is_gone_says_nothing_of_who_listens(removed: str, short_path: Path) -> None:
    """A cleaner of temporary files may have removed it; the kernel knows who is there."""
    home = short_path / "home"
    home.mkdir()
    address = f"unix:{home}/socket"
    listener = UnixListener(address)
    (home / "socket").unlink()
    if removed == "directory":
        home.rmdir()
    with pytest.raises(DialFailed, match="but not its listener") as caught:
        dial(address, PATIENCE_S)
    assert not isinstance(caught.value, DialRefused)
    listener.close()
    with pytest.raises(DialRefused):
        dial(address, PATIENCE_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("address", ["unix:", "unix:@farcall-test-of-users"])
def test_another_user_gets_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> None:
    """Whoever connects could pass a descriptor whose closing takes as long as its sender wishes."""
    listener = UnixListener(address)
    nobody = 65534
    code = (
        f"import os, socket; os.setuid({nobody}); stream = socket.socket(socket.AF_UNIX);\n"
        f"stream.connect({unix._socket_name(listener.address)!r}); print('connected'); print(stream.recv(1))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if address == "unix:":
        assert "PermissionError" in process.communicate(timeout=LONG_S)[1]
    else:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        assert listener.accept() is None
        assert process.communicate(timeout=LONG_S)[0] == "b''\n"
    listener.close()


def test_a_name_that_a_peer_chose_is_quoted(tmp_path: Path) -> None:
    listener = UnixListener(f"unix:{tmp_path}/socket")
    with socket.socket(socket.AF_UNIX) as stream:
        stream.bind(f"{tmp_path}/a\nb\x1b[2J")
        stream.connect(f"{tmp_path}/socket")
        guest = listener.accept()
        assert guest is not None
        assert guest.describe().isprintable()
        guest.close()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.bind("\0farcall test\nof names \x1b[2J")
        stream.connect(f"{tmp_path}/socket")
        guest = listener.accept()
        assert guest is not None
        assert guest.describe().isprintable()
        guest.close()
    listener.close()


def test_before_proof_no_descriptor_is_received() -> None:
    ours, theirs = unix_pair()
    before = open_descriptors()
    theirs.send((b"x",), [0, 1, 2])
    assert ours.receive_bytes_into(memoryview(bytearray(16))) == 1
    assert ours.take_descriptors() == []
    assert open_descriptors() <= before
    ours.close()
    theirs.close()


class NoSocket(socket.socket):
    def __init__(self, *_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("address", ["unix:", "tcp://127.0.0.1:0"])
def test_a_dial_without_a_descriptor_to_spare_fails_like_any_other(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    with closing(listen(address)) as listener:
        monkeypatch.setattr(socket, "socket", NoSocket)
        with pytest.raises(DialFailed, match="Too many open files") as caught:
            dial(listener.address, PATIENCE_S)
        assert not isinstance(caught.value, DialRefused)


def test_a_path_too_long() -> None:
    with pytest.raises(ListenFailed):
        UnixListener("unix:/tmp/" + "x" * 200)
    with pytest.raises(DialFailed):
        dial("unix:/tmp/" + "x" * 200, PATIENCE_S)


def unix_pair() -> tuple[UnixTransport, UnixTransport]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixTransport(left), UnixTransport(right)


def open_descriptors() -> int:
    """How many there are; garbage of another test may have some."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_nobody_takes_are_closed() -> None:
    before = open_descriptors()
    left, right = unix_pair()
    reading, writing = os.pipe()
    left.send([b"x"], [reading, writing])
    assert right.receive_into(memoryview(bytearray(1))) == 1
    right.close()
    left.close()
    os.close(reading)
    os.close(writing)
    assert open_descriptors() <= before


def test_a_flood_of_descriptors_ends_the_connection() -> None:
    before = open_descriptors()
    left, right = unix_pair()
    reading, writing = os.pipe()
    view = memoryview(bytearray(1))
    for _ in range(MAX_DESCRIPTORS_UNTAKEN // MAX_DESCRIPTORS_PER_SEND):
        assert left.send([b"x"], [reading] * MAX_DESCRIPTORS_PER_SEND) == 1
        assert right.receive_into(view) == 1
    left.send([b"x"], [reading])
    with pytest.raises(TransportBroken, match="more descriptors"):
        right.receive_into(view)
    left.close()
    right.close()
    os.close(reading)
    os.close(writing)
    assert open_descriptors() <= before


def test_more_descriptors_in_one_message_than_agreed() -> None:
    before = open_descriptors()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    victim = UnixTransport(right)
    reading, writing = os.pipe()
    socket.send_fds(left, [b"x"], [reading] * (4 * MAX_DESCRIPTORS_PER_SEND))
    with pytest.raises(TransportBroken, match="more descriptors"):
        victim.receive_into(memoryview(bytearray(1)))
    with pytest.raises(ValueError):
        victim.send([b"x"], [reading] * (MAX_DESCRIPTORS_PER_SEND + 1))
    left.close()
    victim.close()
    os.close(reading)
    os.close(writing)
    assert open_descriptors() <= before


def test_where_an_address_leads_to() -> None:
    assert leads_to("tcp://127.0.0.1:1", "127.0.0.1")
    assert leads_to("tcp://[::1]:1", "::1")
    assert not leads_to("tcp://127.0.0.1:1", "127.0.0.2")
    assert not leads_to("tcp://127.0.0.1:1", "")
