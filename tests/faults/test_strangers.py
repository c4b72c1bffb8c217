"""Those who may not come in, over real sockets: refused, logged once, and the members never notice."""

from __future__ import annotations

import logging
import os
import resource
import socket

import pytest
from tests.kit.ports import held_port
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import HandshakeRefused, InitError
from farcall.protocol.hello import MAX_MESSAGE_BYTES
from farcall.runtime.link import listener
from farcall.testing.cluster import finish, run_cluster, start_processes


def addresses() -> list[str]:
    return list(api.current_runtime().resources.listener.addresses)


def guests() -> int:
    return len(api.current_runtime().resources.listener._guests)


def connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(address.removeprefix("unix:"))
        return stream
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]*") or "127.0.0.1", int(port)))


def is_shown_out(stream: socket.socket) -> bool:
    stream.settimeout(LONG_S)
    try:
        while stream.recv(1000):
            pass
    except ConnectionError:
        pass
    stream.close()
    return True


GREETING = b"\x89farcall\x00\x02\x00\x01"
STRANGERS = [
    b"GET / HTTP/1.0\r\n\r\n",
    os.urandom(1000),
    b"\x80\x04\x95" + b"cposix\nsystem\n(S'touch /tmp/farcall-owned'\ntR." * 20,  # a pickle
    GREETING + (2**32 - 1).to_bytes(4, "big"),
    GREETING + (MAX_MESSAGE_BYTES).to_bytes(4, "big"),
    GREETING + (1000).to_bytes(4, "big") + b"\xdd\xff\xff\xff\xff" + bytes(995),  # an array of 2**32 items
    b"\x16\x03\x01\x02\x00" + os.urandom(1000),  # what should be TLS
    b"",
]


def annoy(rank: int) -> int:
    """Rank 0 annoys rank 1 while both call each other."""
    if rank == 1:
        return 0
    refused = 0
    farcall.rpc_sync("w1", listen_to_the_log)
    memory = farcall.rpc_sync("w1", peak_memory_bytes)
    for address in farcall.rpc_sync("w1", addresses):
        for what in STRANGERS * 5:
            stream = connect(address)
            if what:
                try:
                    stream.sendall(what)
                    for _ in range(32):
                        stream.sendall(bytes(64 * 1024))  # and more than anybody may keep
                except ConnectionError:
                    pass
            else:
                stream.shutdown(socket.SHUT_WR)
            refused += is_shown_out(stream)
            assert farcall.rpc_sync("w1", max, (refused, 0)) == refused
    assert farcall.rpc_sync("w1", peak_memory_bytes) - memory < 64 << 20
    wait_until(lambda: farcall.rpc_sync("w1", guests) == 0)
    told = farcall.rpc_sync("w1", what_was_logged)
    # Each reason once for each way, however often it was tried.
    assert 0 < len([line for line in told if "refused a connection" in line]) <= 2 * len(STRANGERS), told
    return refused


log: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.append(record.getMessage())


def listen_to_the_log() -> None:
    logging.getLogger("farcall").addHandler(Listener(logging.WARNING))


def what_was_logged() -> list[str]:
    return log


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_strangers_are_refused_and_nothing_is_lost() -> None:
    assert run_cluster(2, annoy, transports=("unix", "tcp"))[0] == 2 * 5 * len(STRANGERS)
    assert not os.path.exists("/tmp/farcall-owned")


def hold_open(rank: int) -> int:
    """Half-open connections: neither descriptors nor members suffer, and they are shown out in time."""
    if rank == 1:
        return 0
    address = farcall.rpc_sync("w1", addresses)[-1]
    farcall.rpc_sync("w1", be_patient)
    before = farcall.rpc_sync("w1", descriptors)
    streams = [connect(address) for _ in range(400)]
    streams[0].send(b"\x16\x03")  # as TLS begins
    wait_until(lambda: farcall.rpc_sync("w1", guests) == 256)
    assert farcall.rpc_sync("w1", descriptors) <= before + 256 + 5
    assert farcall.rpc_sync("w1", os.getpid) > 0
    farcall.rpc_sync("w1", time_is_up)
    wait_until(lambda: farcall.rpc_sync("w1", guests) == 0)
    assert all(is_shown_out(stream) for stream in streams)
    wait_until(lambda: farcall.rpc_sync("w1", descriptors) <= before)
    return len(streams)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def be_patient() -> None:
    """On a busy machine it takes long until all are there: nobody is shown out before."""
    listener.HANDSHAKE_S = 10 * LONG_S


def time_is_up() -> None:
    """As if that time had passed."""
    door = api.current_runtime().resources.listener
    for guest in list(door._guests):
        guest.deadline = 0.0
    door._timer.at(0.0)


def test_half_open_connections_are_bounded_and_shown_out() -> None:
    assert run_cluster(2, hold_open)[0] == 400


def with_secret(rank: int, port: int, secrets: list[str | None], environment: bool) -> tuple[str, str]:
    if environment and secrets[rank] is not None:
        os.environ["FARCALL_SECRET"] = str(secrets[rank])
    options = farcall.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        secret=None if environment else secrets[rank],
        start_timeout_s=LONG_S,
    )
    try:
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=len(secrets), rpc_backend_options=options)
    except HandshakeRefused as error:
        return "HandshakeRefused", str(error)
    except InitError as error:
        return type(error).__name__, str(error)
    name = farcall.rpc_sync((rank + 1) % len(secrets), farcall.get_worker_info).name
    farcall.shutdown()
    return "in", name


@pytest.mark.parametrize("environment", [False, True])
def test_same_secret_lets_everybody_in(environment: bool) -> None:
    found = finish(start_processes(2, with_secret, held_port(), ["open sesame and more"] * 2, environment))
    assert found == [("in", "w1"), ("in", "w0")]


def test_wrong_secret_keeps_out_and_both_sides_say_why() -> None:
    secrets: list[str | None] = ["open sesame and more", "open barley and more"]
    waited, dialled = finish(start_processes(2, with_secret, held_port(), secrets, False))
    assert waited[0] == dialled[0] == "WrongSecret"
    assert "w1" in waited[1]
    assert "w0" in dialled[1]
    assert "the same FARCALL_SECRET" in waited[1]
    assert "the same FARCALL_SECRET" in dialled[1]
    assert "sesame" not in waited[1] + dialled[1]  # errors end up in logs


def test_secret_on_one_side_only_is_an_error_that_names_both() -> None:
    first, second = finish(start_processes(2, with_secret, held_port(), ["open sesame and more", None], False))
    assert first[0] == second[0] == "WrongSecret"
    assert "'w1', was given no secret" in first[1]
    assert "'w0', was given another secret, and this process none" in second[1]
