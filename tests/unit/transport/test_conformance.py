"""Every transport keeps the one contract."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.kit.memory_transport import MemoryTransport, memory_pair
from tests.kit.transports import TRANSPORT_CHECKS, Check, MakePair, check_backpressure

from farcall.transport.address import dial, listen
from farcall.transport.interface import Buffer, Transport

PATIENCE_S = 60.0


def dialled_pair(address: str) -> tuple[Transport, Transport]:
    listener = listen(address)
    try:
        near = dial(listener.address.replace("*", "127.0.0.1"), PATIENCE_S)
        far = listener.accept()
        assert far is not None
        return near, far
    finally:
        listener.close()


def stuttering_pair() -> tuple[Transport, Transport]:
    """Takes and gives a few bytes at a time."""
    left, right = memory_pair(capacity_bytes=64 * 1024)
    left.largest_send, right.largest_send = 40_000, 17
    left.largest_receive, right.largest_receive = 11, 50_000
    return left, right


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def over(address: str) -> MakePair:
    return lambda: dialled_pair(address)


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
WAYS = [
    pytest.param(over("tcp://127.0.0.1:0"), id="tcp-v4"),
    pytest.param(over("tcp://[::1]:0"), id="tcp-v6", marks=needs_ipv6),
    pytest.param(over("tcp://*:0"), id="tcp-any"),
    pytest.param(over("unix:"), id="unix"),
    pytest.param(over("memory:"), id="memory"),
    pytest.param(stuttering_pair, id="memory-stuttering"),
]


@pytest.mark.parametrize("make_pair", WAYS)
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Check, make_pair: Callable[[], tuple[Transport, Transport]]) -> None:
    check(make_pair)


class Insatiable(MemoryTransport):
    """A faulty transport: it says that it takes everything."""

    __slots__ = ()

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        super().send(buffers)
        return sum(map(len, buffers))


def test_the_kit_finds_a_fault() -> None:
    def make_pair() -> tuple[Transport, Transport]:
        left, right = memory_pair()
        left.__class__ = Insatiable
        return left, right

    with pytest.raises(AssertionError, match="without bound"):
        check_backpressure(make_pair)


@pytest.mark.parametrize("address", ["unix:", "tcp://127.0.0.1:0"])
def test_two_threads_may_wait_for_room_at_once(address: str) -> None:
    """One with a descriptor to send beside one with a large message, where the kernel was full for both."""
    near, far = dialled_pair(address)
    try:
        while near.send((b"x" * 65536,)):
            pass
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(near.wait_writable, PATIENCE_S) for _ in range(2)]
            time.sleep(0.1)  # so that they wait at the same time; what is right does not depend on it
            while not all(wait.done() for wait in waits):
                far.receive_into(memoryview(bytearray(1 << 20)))
            assert [wait.result(PATIENCE_S) for wait in waits] == [True, True]
    finally:
        near.close()
        far.close()
