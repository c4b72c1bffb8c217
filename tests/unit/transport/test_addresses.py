"""Addresses, listeners and what a dial says when it fails."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from farcall.transport import unix
from farcall.transport.address import dial, listen
from farcall.transport.interface import (
    MAX_DESCRIPTORS_PER_SEND,
    MAX_DESCRIPTORS_UNTAKEN,
    DialFailed,
    ListenFailed,
    TransportBroken,
    TransportClosed,
)
from farcall.transport.tcp import TcpListener, format_tcp, leads_to, parse_tcp
from farcall.transport.unix import UnixListener, UnixTransport

PATIENCE_S = 10.0


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


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "unix:", "memory:"])
def test_a_listener_that_closed(address: str) -> None:
    listener = listen(address)
    where = listener.address
    assert listener.accept() is None
    listener.close()
    listener.close()
    with pytest.raises(DialFailed, match="cannot connect"):
        dial(where, PATIENCE_S)
    if listener.fileno() is not None:
        with pytest.raises(TransportClosed):
            listener.accept()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "unix:", "memory:"])
def test_an_address_in_use(address: str) -> None:
    listener = listen(address)
    try:
        with pytest.raises(ListenFailed, match="cannot listen"):
            listen(listener.address)
    finally:
        listener.close()


def test_an_unknown_host() -> None:
    with pytest.raises(DialFailed, match="cannot resolve"):
        dial("tcp://no-such-host.invalid:1", PATIENCE_S)


def test_every_interface_includes_both_versions() -> None:
    listener = TcpListener("tcp://*:0")
    try:
        dial(f"tcp://127.0.0.1:{listener.port}", PATIENCE_S).close()
        if socket.has_dualstack_ipv6():
            dial(f"tcp://[::1]:{listener.port}", PATIENCE_S).close()
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


def test_without_abstract_names_a_private_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unix, "_HAS_ABSTRACT_NAMES", False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    listener = UnixListener()
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    dial(listener.address, PATIENCE_S).close()
    listener.close()
    assert not list(tmp_path.iterdir())


def test_a_path_too_long() -> None:
    with pytest.raises(ListenFailed):
        UnixListener("unix:/tmp/" + "x" * 200)
    with pytest.raises(DialFailed):
        dial("unix:/tmp/" + "x" * 200, PATIENCE_S)


def unix_pair() -> tuple[UnixTransport, UnixTransport]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixTransport(left), UnixTransport(right)


def open_descriptors() -> int:
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
    assert open_descriptors() == before


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
    assert open_descriptors() == before


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
    assert open_descriptors() == before


def test_where_an_address_leads_to() -> None:
    assert leads_to("tcp://127.0.0.1:1", "127.0.0.1")
    assert leads_to("tcp://[::1]:1", "::1")
    assert not leads_to("tcp://127.0.0.1:1", "127.0.0.2")
    assert not leads_to("tcp://127.0.0.1:1", "")
