"""The connections of observers, at the member that they ask: questions in, answers out.

All of this runs on the I/O thread, or after its end, so there is no lock. Knows nothing of the subjects: it hands on
questions, and sends the answers. Bytes that the kernel does not take are kept, up to MOST_UNSENT_BYTES: an observer
that does not read is cut off. After the first few questions, QUESTIONS_PER_S are answered; meanwhile the observer is
not read, so a flood of questions stays in its own socket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from farcall.protocol.handshake import Established
from farcall.protocol.observing import MAX_QUESTION_BYTES, Ask, Message, MessageDecoder, ObservingError, encode_framed
from farcall.runtime.io.loop import READ, WRITE, Loop
from farcall.runtime.io.timers import NEVER
from farcall.transport.interface import Transport, TransportError

logger: logging.Logger = logging.getLogger("farcall")

MOST_UNSENT_BYTES = 256 << 20
MOST_OBSERVERS = 32
QUESTIONS_PER_S = 20.0
QUESTIONS_AT_ONCE = 20.0
_READ_BYTES = 4 * 1024
_ALMOST_ONE = 1.0 - 1e-6  # sums of fractions fall short of it


class Questions(Protocol):
    """The questions about a node, asked and answered; `farcall.observe` has them."""

    def answer_observer(self, observer: ObserverConnection, ask: Ask) -> None:
        """Answer a question of an observer. On the I/O thread."""

    def explain(self, call: Any, done: Callable[[str], None]) -> None:
        """Ask the callee about a pending call whose time is up. From any thread.

        ``done`` gets the explanation once, on the I/O thread, within a second.
        """


class ObserverConnections:
    """All observers that are connected to one node."""

    def __init__(self, name: str, loop: Loop) -> None:
        self._name = name
        self._loop = loop
        self.questions: Questions | None = None
        """Given once, while the node starts; without it no observer is let in."""
        self._connected: set[ObserverConnection] = set()

    def admit(self, transport: Transport, established: Established) -> None:
        """Take over the connection of an observer that has proved itself."""
        if self.questions is None or len(self._connected) >= MOST_OBSERVERS:
            transport.close()
            return
        logger.info("%s: an observer is connected over %s", self._name, transport.describe())
        connection = ObserverConnection(transport, self._loop, self.questions, self._connected.discard)
        self._connected.add(connection)
        connection.start(established.leftover)

    def close(self) -> None:
        """The node has ended."""
        for connection in list(self._connected):
            connection.close(f"{self._name} ended")


class ObserverConnection:
    """The connection of one observer that has proved itself."""

    def __init__(
        self,
        transport: Transport,
        loop: Loop,
        questions: Questions,
        on_gone: Callable[[ObserverConnection], None],
    ) -> None:
        self._transport = transport
        self._descriptor = transport.fileno()
        self._loop = loop
        self._questions = questions
        self._on_gone = on_gone
        self._decoder = MessageDecoder(MAX_QUESTION_BYTES)
        self._buffer = bytearray(_READ_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._asked: deque[Ask] = deque()
        self._allowed = QUESTIONS_AT_ONCE
        self._allowed_at = monotonic()
        self._timer = loop.timer(self._answer_more)
        self._waits = False  # for its next question to be answered
        self._closed = False

    def start(self, first_bytes: bytes) -> None:
        """Begin to read; ``first_bytes`` came behind the handshake."""
        if self._descriptor is None:
            self._transport.watch(lambda: self._loop.call_soon(self._read), lambda: self._loop.call_soon(self._write))
        else:
            self._loop.watch(self._descriptor, self._on_event)
        if first_bytes:
            self._take(first_bytes)
        if self._transport.buffered:
            self._read()

    def tell(self, message: Message) -> None:
        """Send a message, if the observer is still there."""
        if self._closed:
            return
        data = encode_framed(message)
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._write()
        if self._unsent_bytes > MOST_UNSENT_BYTES:
            self.close("it does not read")

    def close(self, reason: str) -> None:
        """End the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        logger.debug("an observer is gone (%s): %s", self._transport.describe(), reason)
        if self._descriptor is None:
            self._transport.watch(None, None)
        else:
            self._loop.forget(self._descriptor)
        self._transport.close()
        self._on_gone(self)

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self._write()
        if events & READ and self._waits:
            self.close("it went away")  # the descriptor is silenced, so the poller reports nothing but its end
        elif events & READ and not self._closed:
            self._read()

    def _read(self) -> None:
        while not self._closed and not self._asked:
            try:
                count = self._transport.receive_into(memoryview(self._buffer))
            except TransportError as error:
                self.close(str(error))
                return
            if count is None:
                return
            if count == 0:
                self.close("it closed the connection")
                return
            self._take(memoryview(self._buffer)[:count])

    def _take(self, data: bytes | memoryview) -> None:
        try:
            messages = self._decoder.receive(data)
        except ObservingError as error:
            logger.warning("an observer broke the rules (%s): %s", self._transport.describe(), error)
            self.close(str(error))
            return
        for message in messages:
            if not isinstance(message, Ask):
                logger.warning("an observer sent a %s (%s)", type(message).__name__, self._transport.describe())
                self.close("it may only ask")
                return
            self._asked.append(message)
        self._answer_more(monotonic())

    def _answer_more(self, now: float) -> float:
        """Answer as many questions as are allowed now; returns the moment for the next."""
        self._allowed = min(QUESTIONS_AT_ONCE, self._allowed + (now - self._allowed_at) * QUESTIONS_PER_S)
        self._allowed_at = now
        was_waiting = self._waits
        while self._asked and self._allowed > _ALMOST_ONE and not self._closed:
            self._allowed -= 1.0
            self._questions.answer_observer(self, self._asked.popleft())
        self._waits = bool(self._asked) and not self._closed
        if self._waits:
            due = now + (1.0 - self._allowed) / QUESTIONS_PER_S
            self._timer.at(due)
            if not was_waiting and self._descriptor is not None:
                self._loop.silence(self._descriptor)
            return due
        if was_waiting and not self._closed:
            if self._descriptor is not None:
                self._loop.listen(self._descriptor)
            if self._descriptor is None or self._transport.buffered:  # a poll does not report buffered bytes
                self._loop.call_soon(self._read)
        return NEVER

    def _write(self) -> None:
        unsent = self._unsent
        try:
            while unsent and not self._closed:
                taken = self._transport.send((unsent[0],))
                if taken == 0:
                    break
                self._unsent_bytes -= taken
                if taken == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][taken:]
        except TransportError as error:
            self.close(str(error))
            return
        if self._descriptor is not None and not self._closed:
            self._loop.want_write(self._descriptor, bool(unsent))
