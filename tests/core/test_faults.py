"""What goes wrong below a core, or at its peer: it raises or breaks one connection, and no more."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from tests.kit.cores import HEADER, VERSION, Pair, Side, connected, frame, implementation
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.core.contract import ACKNOWLEDGE, CHUNK, CONTROL, ENDED, MARKED, RESPONSE, CoreError


def raw(pair: Pair) -> socket.socket:
    """The other end of far's connection."""
    near, far = connected("unix")
    pair.far.core.attach(pair.far.link, far)
    end = socket.socket(fileno=near)
    end.setblocking(True)
    return end


def chunk(number: int, offset: int, data: bytes) -> bytes:
    return HEADER.pack(b"fc", VERSION, CHUNK, 0, offset, len(data), 0, 0, 0, number) + data


def test_a_message_that_went_wrong_does_not_go_on_over_the_next_connection(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    message = frame(CONTROL, payload=b"12345")[0]
    for size in (0, 20_000):  # with the bytes of one header, or more than fit into what is read at once
        with raw(pair) as end:
            end.sendall(chunk(0, 0, message + bytes(100 + size)))
            assert b"more bytes" in pair.far.event(ENDED).function
        assert pair.far.core.detach(pair.far.link) == 0
        with raw(pair) as end:
            end.sendall(chunk(0, len(message), bytes(200_000)))
            assert pair.far.event(ENDED).function
        assert pair.far.core.detach(pair.far.link) == 0
    with raw(pair) as end:
        end.sendall(chunk(0, 0, message))
        assert pair.far.core.next().payload == b"12345"


def test_a_peer_that_acknowledges_what_never_left_keeps_no_sender(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    payload = bytes(30 << 20)
    answers: list[Any] = []
    with raw(pair) as end:
        sender = pair.far.start(lambda: answers.append(pair.far.call(payload=payload)))
        end.recv(1, socket.MSG_PEEK)
        end.sendall(HEADER.pack(b"fc", VERSION, ACKNOWLEDGE, 0, 1 << 60, 0, 0, 0, 0, 0))
        end.sendall(HEADER.pack(b"fc", VERSION, CONTROL, 0, 0, 0, 0, 0, 0, 1))
        assert pair.far.core.next().kind == CONTROL
    pair.far.event(ENDED)
    pair.far.core.end(pair.far.link)
    sender.join(LONG_S)
    assert [each.kind for each in answers] == [ENDED]


def test_a_peer_that_acknowledges_nothing_takes_no_more_memory() -> None:
    side = Side(implementation("compiled")())
    near, far = connected("unix")
    side.core.attach(side.link, far)
    with socket.socket(fileno=near) as end:
        end.setblocking(True)

        def swallow() -> None:
            while end.recv(1 << 20):
                pass

        side.start(swallow)

        def send() -> None:
            for _ in range(3000):
                side.control(bytes(60_000), deadline=monotonic() + 1)

        with pytest.raises(CoreError):
            send()
        for at in range(100):  # what it acknowledges makes room again
            end.sendall(HEADER.pack(b"fc", VERSION, ACKNOWLEDGE, 0, 6 * (at + 1), 0, 0, 0, 0, at))
        side.control(bytes(60_000), deadline=monotonic() + LONG_S)
        side.end()


def test_senders_that_wait_for_room_beside_a_call_that_lasts(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(backlog_limit=100_000)
    pair.connect()
    pair.far.serve(2)
    caller = pair.near.start(pair.near.call, b"hold")
    pair.far.until(lambda: pair.far.core.counts().running)

    def send() -> None:
        for _ in range(400):
            pair.near.control(bytes(60_000))

    senders = [pair.near.start(send) for _ in range(6)]
    for sender in senders:
        sender.join(LONG_S)
        assert not sender.is_alive(), "a sender was not told of the room"
    pair.far.gate.set()
    caller.join(LONG_S)


def test_an_answer_that_comes_while_a_signals_handler_runs_is_its_callers(pair: Pair) -> None:
    pair.far.serve()
    pair.near.serve()
    core = pair.near.core

    def handler(number: int, at: Any) -> None:
        pair.far.gate.set()
        wait_until(lambda: core.done(core.counts().last_call))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for flags in (0, MARKED):
            pair.far.gate.clear()
            pair.far.came.clear()

            def poke() -> None:
                pair.far.until(lambda: pair.far.came)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

            poker = pair.near.start(poke)
            answer = pair.near.call(b"hold", b"mine", flags=flags)
            assert (answer.kind, answer.payload) == (RESPONSE, b"mine")
            poker.join(LONG_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def alone(program: str) -> None:
    """Run this in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S * 4, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"


HEAD = """
import resource, sys, threading, time
from tests.kit.cores import *
from farcall.core.contract import *
core = implementation(NAME)()
"""


@pytest.mark.parametrize("name", ["compiled", "plain"])
def test_no_memory_for_a_copy_is_an_error_of_the_call(name: str) -> None:
    implementation(name)
    alone(
        HEAD.replace("NAME", repr(name))
        + """
link, own = core.open_link(), core.open_link(True)
piece = bytearray(300 << 20)
head, pieces = frame(REQUEST, b"f", piece)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), used + (100 << 20)))
for to, options in ((link, {"patient": False}), (own, {})):
    try:
        core.post(to, head, pieces, **options)
    except (MemoryError, CoreError):
        pass
    else:
        sys.exit("it was sent")
assert core.counts().pending == 0, core.counts()
core.stop()
"""
    )


@pytest.mark.parametrize("name", ["compiled", "plain"])
def test_no_descriptors_left_is_an_error_of_whoever_needs_one(name: str) -> None:
    implementation(name)
    alone(
        HEAD.replace("NAME", repr(name))
        + """
import os
link, own = core.open_link(), core.open_link(True)
number = core.post(own, *frame(REQUEST, b"f"))
limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
while True:
    try:
        os.dup(0)
    except OSError:
        break
try:
    implementation(NAME)()
except OSError:
    pass
else:
    sys.exit("a core without descriptors")
errors = []
def work():
    try:
        errors.append(core.next())
    except OSError as error:
        errors.append(error)
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert errors, errors
core.stop()
""".replace("NAME", repr(name))
    )


@pytest.mark.parametrize("name", ["compiled", "plain"])
def test_a_thread_in_a_core_ends_with_the_interpreter(name: str) -> None:
    """One that nobody joins, and that wakes while the interpreter ends."""
    implementation(name)
    alone(
        HEAD.replace("NAME", repr(name))
        + """
link = core.open_link()
def call():
    for _ in range(100):
        core.call(link, *frame(REQUEST, b"f", bytearray(1 << 20)), deadline=time.monotonic() + 0.05)
for _ in range(4):
    threading.Thread(target=call, daemon=True).start()
class Last:
    def __del__(self, sleep=time.sleep):
        for _ in range(20):
            sleep(0.02)
sys.last = Last()
while core.counts().pending < 4:
    time.sleep(0.001)
"""
    )


class Posting:
    """A pump that posts to another core amid its work, as a destructor may that runs there."""

    def __init__(self, end: int, other: Side) -> None:
        self.end, self.other, self.lent = end, other, bytearray(100_000)

    def fileno(self) -> int:
        return self.end

    def open(self, data: bytes) -> bytes:
        return data

    def seal(self, data: list[memoryview]) -> bytes:
        self.other.control(self.lent, patient=False)
        return b"".join(data)


def test_memory_that_is_posted_amid_a_pump_is_the_senders_again(pair: Pair, make_pair: Callable[..., Pair]) -> None:
    other = make_pair()
    near, far = connected("unix")
    pump = Posting(near, other.near)
    pair.near.core.attach(pair.near.link, pump, pair.far.core.detach(pair.far.link))
    pair.far.core.attach(pair.far.link, far)
    pair.far.serve()
    payload = bytes(100_000)
    assert pair.near.call(payload=payload).payload == payload
    pump.lent.append(1)
