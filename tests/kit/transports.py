"""The conformance kit of transports: one set of checks, run over every kind.

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS)
    def test_memory(check: Check) -> None:
        check(memory_pair)

A check is given what makes two connected ends. It uses only the contract of ``Transport``, waits for conditions and
never for a time, and closes both ends. The author of a transport runs this before anything else.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from farcall.transport.interface import (
    WAIT_SLICE_S,
    Buffer,
    Transport,
    TransportBroken,
    TransportClosed,
    TransportError,
)

MakePair: TypeAlias = Callable[[], tuple[Transport, Transport]]
Check: TypeAlias = Callable[[MakePair], None]

PATIENCE_S = 30.0  # nothing here takes near this long unless it hangs
_ENOUGH_TO_FILL_ANY_PIPE = 256 << 20
_ZEROS = bytes(1 << 20)


@contextmanager
def _pair(make_pair: MakePair) -> Iterator[tuple[Transport, Transport]]:
    left, right = make_pair()
    try:
        yield left, right
    finally:
        left.close()
        right.close()


def send_waiting(transport: Transport, buffers: Sequence[Buffer], timeout_s: float) -> int:
    """``send``, after waiting for room."""
    transport.wait_writable(timeout_s)
    return transport.send(buffers)


def receive_waiting(transport: Transport, view: memoryview, timeout_s: float) -> int | None:
    """``receive_into``, after waiting for bytes."""
    transport.wait_readable(timeout_s)
    return transport.receive_into(view)


def send_all(transport: Transport, buffers: Iterable[Buffer]) -> None:
    """Send everything, in order, however partially it is taken."""
    rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    deadline = time.monotonic() + PATIENCE_S
    while rest:
        assert time.monotonic() < deadline, f"{transport.describe()} takes no more bytes"
        taken = send_waiting(transport, rest, WAIT_SLICE_S)
        while taken:
            step = min(taken, len(rest[0]))
            taken -= step
            rest[0] = rest[0][step:]
            if not len(rest[0]):
                rest.pop(0)


def receive_exactly(transport: Transport, size: int) -> bytearray:
    """Receive ``size`` bytes, however they are split; fails when the peer ends before."""
    received = bytearray(size)
    fill(transport, memoryview(received))
    return received


def fill(transport: Transport, view: memoryview) -> None:
    """Receive until ``view`` is full."""
    deadline = time.monotonic() + PATIENCE_S
    filled = 0
    while filled < len(view):
        assert time.monotonic() < deadline, f"no more bytes from {transport.describe()}"
        count = receive_waiting(transport, view[filled:], WAIT_SLICE_S)
        assert count != 0, "the peer ended too early"
        filled += count or 0


def wait_for_end(transport: Transport) -> None:
    """Wait until the peer's end is seen; fails on any byte before it."""
    deadline = time.monotonic() + PATIENCE_S
    while (count := receive_waiting(transport, memoryview(bytearray(1)), WAIT_SLICE_S)) != 0:
        assert count is None, "a byte came where the end was due"
        assert time.monotonic() < deadline, "the peer's end is not seen"


@contextmanager
def _in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Run ``work`` beside the block; its failure is the block's."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the other thread hangs"
    if failures:
        raise failures[0]


def _fill_up(transport: Transport) -> int:
    """Send until the transport takes no more; return the number of bytes. Zeros, and more of them may be on their way.

    A network stack moves bytes to the reader's side a little later, and has room again then: wait for that.
    """
    total = 0
    while True:
        while taken := transport.send([_ZEROS]):
            total += taken
            assert total < _ENOUGH_TO_FILL_ANY_PIPE, "send takes without bound while nobody reads"
        if not transport.wait_writable(0.05):
            return total


def check_order(make_pair: MakePair) -> None:
    """Bytes come in the order sent, both ways at once."""
    with _pair(make_pair) as (left, right):
        there, back = bytes(range(256)) * 64, bytes(reversed(range(256))) * 64
        send_all(left, [there])
        send_all(right, [back])
        assert receive_exactly(right, len(there)) == there
        assert receive_exactly(left, len(back)) == back


def check_nothing_there(make_pair: MakePair) -> None:
    """Receiving with nothing there says None at once; nothing to send takes nothing."""
    with _pair(make_pair) as (left, right):
        assert left.receive_into(memoryview(bytearray(10))) is None
        assert left.send([b""]) == 0
        assert left.send([b"", b""]) == 0
        assert right.receive_into(memoryview(bytearray(10))) is None


def check_scatter_gather(make_pair: MakePair) -> None:
    """Many buffers of all kinds, empty ones among them, more than one system call may take."""
    with _pair(make_pair) as (left, right):
        buffers: list[Buffer] = []
        for index in range(3000):
            buffers += [b"", bytes([index % 256]) * (index % 7), bytearray(b"-"), memoryview(b"xyz")[1:]]
        expected = b"".join(buffers)
        taken = left.send(buffers)
        assert 0 < taken <= len(expected)
        rest = memoryview(expected)[taken:]
        with _in_thread(lambda: send_all(left, [rest])):
            assert receive_exactly(right, len(expected)) == expected


def check_backpressure(make_pair: MakePair) -> None:
    """A reader that does not read bounds what send takes; when it reads, there is room again."""
    with _pair(make_pair) as (left, right):
        total = _fill_up(left)
        assert total > 0
        with _in_thread(lambda: send_all(left, [_ZEROS])):
            receive_exactly(right, total + len(_ZEROS))
        assert left.wait_writable(PATIENCE_S)
        assert left.send([b"more"]) == 4
        assert receive_exactly(right, 4) == b"more"


def check_room_wakes_the_sender(make_pair: MakePair) -> None:
    """A sender that waits goes on as soon as the reader reads."""
    with _pair(make_pair) as (left, right):
        total = _fill_up(left)
        with _in_thread(lambda: send_all(left, [_ZEROS, b"z" * 100])):
            assert receive_exactly(right, total + len(_ZEROS) + 100)[-100:] == b"z" * 100


def check_many_small(make_pair: MakePair) -> None:
    """Ten thousand small messages arrive whole and in order."""
    messages = [index.to_bytes(4, "little") for index in range(10_000)]

    def send() -> None:
        for message in messages:
            send_all(left, [message])

    with _pair(make_pair) as (left, right), _in_thread(send):
        assert receive_exactly(right, 4 * len(messages)) == b"".join(messages)


def check_large(make_pair: MakePair) -> None:
    """64 MiB pass from the sender's memory into the receiver's, nothing joined between."""
    size = 64 << 20
    source = memoryview(bytearray(os.urandom(1 << 16) * (size >> 16)))
    target = memoryview(bytearray(size))
    third = size // 3
    with (
        _pair(make_pair) as (left, right),
        _in_thread(lambda: send_all(left, [source[:third], source[third : 2 * third], source[2 * third :]])),
    ):
        fill(right, target)
    assert target == source


def check_end(make_pair: MakePair) -> None:
    """What was sent before a close still arrives, then the end, again and again."""
    with _pair(make_pair) as (left, right):
        send_all(left, [b"last words"])
        left.close()
        assert receive_exactly(right, 10) == b"last words"
        wait_for_end(right)
        wait_for_end(right)
        assert not right.closed


def check_half_end(make_pair: MakePair) -> None:
    """After the end of one direction the other goes on."""
    with _pair(make_pair) as (left, right):
        left.end_sending()
        left.end_sending()
        wait_for_end(right)
        send_all(right, [b"still here"])
        assert receive_exactly(left, 10) == b"still here"


def check_closed_by_us(make_pair: MakePair) -> None:
    """On a side that closed, everything says Closed; closing again is nothing."""
    with _pair(make_pair) as (left, _):
        left.close()
        left.close()
        assert left.closed
        operations: tuple[Callable[[], object], ...] = (
            lambda: left.send([b"x"]),
            lambda: send_waiting(left, [b"x"], 1.0),
            lambda: left.receive_into(memoryview(bytearray(1))),
            lambda: receive_waiting(left, memoryview(bytearray(1)), 1.0),
            lambda: receive_waiting(left, memoryview(bytearray(1)), 0.01),
        )
        for operation in operations:
            _expect(TransportClosed, operation)
        assert left.describe()


def check_closed_by_peer(make_pair: MakePair) -> None:
    """Sending to a peer that is gone ends in Broken, whether it waits or not."""
    with _pair(make_pair) as (left, right):
        right.close()
        deadline = time.monotonic() + PATIENCE_S

        def send_until_noticed() -> None:
            while time.monotonic() < deadline:
                send_waiting(left, [b"x" * 1000], 0.01)

        _expect(TransportBroken, send_until_noticed)
        _expect(TransportBroken, lambda: left.send([b"x"]))


def check_close_wakes_sender(make_pair: MakePair) -> None:
    """A sender waiting for room is woken when the peer goes."""
    with _pair(make_pair) as (left, right):
        _fill_up(left)
        rest = bytes(_ENOUGH_TO_FILL_ANY_PIPE)
        with _in_thread(lambda: _expect(TransportError, lambda: send_all(left, [rest]))):
            right.close()


def check_interrupt_wakes(make_pair: MakePair) -> None:
    """A thread waiting for bytes is woken by an interrupt of its own side, and told that it is closed."""
    with _pair(make_pair) as (left, _):
        waiting = threading.Event()

        def wait_for_bytes() -> None:
            waiting.set()
            while True:
                receive_waiting(left, memoryview(bytearray(1)), WAIT_SLICE_S)

        with _in_thread(lambda: _expect(TransportClosed, wait_for_bytes)):
            waiting.wait(PATIENCE_S)
            left.interrupt()


def check_interrupt_keeps_what_came(make_pair: MakePair) -> None:
    """After an interrupt of its own side, what came before it is received, and nothing else is done."""
    with _pair(make_pair) as (left, right):
        send_all(right, [b"last words"])
        received = receive_exactly(left, 1)  # a record, or a packet, comes as a whole
        left.interrupt()
        _expect(TransportClosed, lambda: left.send([b"x"]))
        view = memoryview(bytearray(100))

        def receive_all() -> None:
            while True:
                received.extend(view[: left.receive_into(view) or 0])

        _expect(TransportClosed, receive_all)
        assert received == b"last words"


def check_waiting_to_receive(make_pair: MakePair) -> None:
    """A wait is bounded by its timeout, and ends early when a byte comes."""
    with _pair(make_pair) as (left, right):
        view = memoryview(bytearray(8))
        for timeout_s in (0.0, 0.02):
            assert not left.wait_readable(timeout_s)
            assert not left.look()
            assert receive_waiting(left, view, timeout_s) is None
        with _in_thread(lambda: send_all(right, [b"wake"])):
            assert receive_exactly(left, 4) == b"wake"
        send_all(right, [b"!"])
        assert left.wait_readable(PATIENCE_S)
        assert left.look()
        assert receive_waiting(left, view, 0.0) == 1
        assert not left.look()


def check_looking(make_pair: MakePair) -> None:
    """A look finds what `wait_readable` finds; where there is a descriptor, no Python function is entered for it."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    with _pair(make_pair) as (left, right):
        look, before = left.look, sys.getprofile()
        sys.setprofile(note)
        try:
            found = [look(), look()]
        finally:
            sys.setprofile(before)
        assert not any(found)
        assert left.fileno() is None or entered == []
        send_all(right, [b"two"])
        assert left.wait_readable(PATIENCE_S)
        assert look()
        assert receive_exactly(left, 1) == b"t"
        assert left.look(), "the rest may be buffered here"
        assert receive_exactly(left, 2) == b"wo"
        right.close()
        assert left.wait_readable(PATIENCE_S)
        assert left.look(), "the end of the stream is something to receive"
        left.interrupt()
        assert left.look(), "whoever receives finds out that this side ended it"


def check_readiness(make_pair: MakePair) -> None:
    """A transport has a descriptor to poll, or its hooks tell of bytes, of room and of the end."""
    with _pair(make_pair) as (left, right):
        if left.fileno() is not None:
            return
        readable, writable = threading.Event(), threading.Event()
        left.watch(readable.set, writable.set)
        assert writable.is_set()
        assert not readable.is_set()
        send_all(right, [b"x"])
        assert readable.is_set()
        receive_exactly(left, 1)
        total = _fill_up(left)
        writable.clear()
        receive_exactly(right, total)
        assert writable.is_set()
        readable.clear()
        right.close()
        assert readable.is_set()


def check_descriptors(make_pair: MakePair) -> None:
    """Descriptors arrive with their bytes, in order, or are refused where they cannot travel."""
    with _pair(make_pair) as (left, right):
        reading, writing = os.pipe()
        try:
            if not left.carries_descriptors:
                _expect(ValueError, lambda: left.send([b"x"], [reading]))
                assert right.take_descriptors() == []
                return
            assert left.send([b"plain"]) == 5
            assert left.send([b"", b"with"], [writing, reading]) == 4
            assert left.send([b"after"]) == 5
            assert receive_exactly(right, 14) == b"plainwithafter"
            copies = right.take_descriptors()
            assert right.take_descriptors() == []
            try:
                os.write(copies[0], b"through the copy")
                assert os.read(reading, 100) == b"through the copy"
                assert os.fstat(copies[1]).st_ino == os.fstat(reading).st_ino
            finally:
                for copy in copies:
                    os.close(copy)
            _expect(ValueError, lambda: left.send([b""], [reading]))
            _fill_up(left)
            assert left.send([b"x"], [reading]) == 0
        finally:
            os.close(reading)
            os.close(writing)


def _expect(error: type[BaseException], operation: Callable[[], object]) -> None:
    try:
        operation()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


TRANSPORT_CHECKS: tuple[Check, ...] = (
    check_order,
    check_nothing_there,
    check_scatter_gather,
    check_backpressure,
    check_room_wakes_the_sender,
    check_many_small,
    check_large,
    check_end,
    check_half_end,
    check_closed_by_us,
    check_closed_by_peer,
    check_close_wakes_sender,
    check_interrupt_wakes,
    check_interrupt_keeps_what_came,
    check_looking,
    check_waiting_to_receive,
    check_readiness,
    check_descriptors,
)
