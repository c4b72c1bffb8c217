"""An observer's questions are answered, but no faster than a member can bear."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from tests.kit.clock import Clock
from tests.kit.memory_transport import MemoryTransport, memory_pair

from farcall.protocol.observing import Ask, encode_framed
from farcall.runtime.io.loop import READ
from farcall.runtime.observing import observer_connection
from farcall.runtime.observing.observer_connection import (
    QUESTIONS_AT_ONCE,
    QUESTIONS_PER_S,
    ObserverConnection,
)
from farcall.transport.tls import Tls, TlsTransport


class Loop:
    """A loop that runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timer = self.clock.timer
        self.soon: deque[Callable[[], object]] = deque()

    def call_soon(self, function: Callable[[], object]) -> None:
        self.soon.append(function)

    def run(self) -> None:
        while self.soon:
            self.soon.popleft()()


class PollingLoop(Loop):
    """It also reports what has come over one connection, as a poll does: the wire's bytes, and no others."""

    def __init__(self, wire: MemoryTransport) -> None:
        super().__init__()
        self._wire = wire
        self._listens = True

    def watch(self, descriptor: int, on_event: Callable[[int], object]) -> None:
        self._on_event = on_event

    def silence(self, descriptor: int) -> None:
        self._listens = False

    def listen(self, descriptor: int) -> None:
        self._listens = True

    def want_write(self, descriptor: int, wanted: bool) -> None:
        pass

    def run(self) -> None:
        super().run()
        while self._listens and self._wire.wait_readable(0.0):
            self._on_event(READ)
            super().run()


class Questions:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def answer_observer(self, observer: ObserverConnection, ask: Ask) -> None:
        self.asked.append(ask.number)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1000.0]
    monkeypatch.setattr(observer_connection, "monotonic", lambda: time[0])
    return time


def connected(loop: Loop) -> tuple[MemoryTransport, Questions, list[ObserverConnection]]:
    theirs, ours = memory_pair(1 << 20)
    questions, gone = Questions(), []
    connection = ObserverConnection(ours, loop, questions, gone.append)  # type: ignore[arg-type]
    connection.start(b"")
    return theirs, questions, gone


def test_a_flood_of_questions_is_answered_at_a_bearable_rate(now: list[float]) -> None:
    """It used to be answered as fast as it came, on the I/O thread: the member stood still for twelve seconds."""
    loop = Loop()
    theirs, questions, gone = connected(loop)
    flood = b"".join(encode_framed(Ask(number, "metrics")) for number in range(1000))
    assert theirs.send((flood,)) == len(flood)
    loop.run()
    assert questions.asked == list(range(int(QUESTIONS_AT_ONCE)))
    for second in range(1, 4):
        until = 1000.0 + second
        while loop.clock.due <= until:
            now[0] = loop.clock.due
            loop.clock.turn_to(now[0])
            loop.run()
        now[0] = until
        wanted = QUESTIONS_AT_ONCE + second * QUESTIONS_PER_S
        assert wanted - 2 <= len(questions.asked) <= wanted + 2
    assert questions.asked == list(range(len(questions.asked)))  # none is left out, and none comes twice
    assert not gone


def test_who_asks_as_people_do_does_not_notice(now: list[float]) -> None:
    loop = Loop()
    theirs, questions, _ = connected(loop)
    for number in range(100):
        now[0] += 0.5
        for part in range(3):
            theirs.send((encode_framed(Ask(3 * number + part, "metrics")),))
        loop.run()
        assert len(questions.asked) == 3 * number + 3


def test_questions_that_are_decrypted_already_are_answered_as_well(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No poll reports them: those that had come while others waited were answered when one more came."""
    theirs, ours = memory_pair(1 << 20)
    dialling, listening = Tls(None).dialled(theirs, "host"), Tls(None).accepted(ours)
    while not dialling.send((b"x",)):
        listening.receive_into(memoryview(bytearray(10)))
    assert listening.receive_into(memoryview(bytearray(10))) == 1
    monkeypatch.setattr(TlsTransport, "fileno", lambda self: 7)
    loop, questions = PollingLoop(ours), Questions()
    first, *others = [encode_framed(Ask(number, "metrics", bytes(200))) for number in range(60)]
    flood = b"".join(others)
    assert dialling.send((flood,)) == len(flood)
    view = memoryview(bytearray(100))
    assert listening.receive_into(view) == len(view)  # a handshake has read the first bytes, and the rest of a record
    ObserverConnection(listening, loop, questions, lambda connection: None).start(first + bytes(view))  # type: ignore[arg-type]
    for _ in range(100):
        now[0] += 0.5
        loop.clock.turn_to(now[0])
        loop.run()
    assert questions.asked == list(range(60))
