"""A connection with faults: a thread between a node and one of its transports.

The node gets one end of a socket pair and treats it like any connection: it is polled, it fills up, it ends. The relay
has the other end, and the real transport. In between, outgoing bytes are split into frames, to which the rules apply;
incoming bytes pass unchanged. All waiting is real, so the node under test needs no special code.

    near (node's socket) --> Splitter --> rules --> DelayLine --> throttle --> far (the real transport)
    near                 <---------------------------------------------------- far

A relay ends when both directions have ended, when either side breaks, or when a rule cuts it. After the node closes
its end, the bytes that it wrote still leave, within CLOSING_S; messages that a rule holds back are lost.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING

from farcall.core.contract import CARRIES
from farcall.core.frames import Header, with_flags, with_number
from farcall.errors import NetworkError
from farcall.testing.faults.delay_line import NEVER, DelayLine
from farcall.testing.faults.messages import Message, SplitError, Splitter
from farcall.testing.faults.rules import OF_CONNECTIONS, Cut, Delay, Direction, Duplicate, HalfOpen, Reorder, Throttle
from farcall.transport.descriptors import close_in_children
from farcall.transport.interface import Transport, TransportError
from farcall.transport.unix import UnixTransport

if TYPE_CHECKING:
    from farcall.testing.faults.injection import Faults

logger: logging.Logger = logging.getLogger("farcall")

MOST_QUEUED_BYTES = 1 << 20
CHUNK_BYTES = 256 * 1024
CLOSING_S = 1.0
PORTION_S = 0.05
UNLIMITED = 1 << 62

Chunks = deque[tuple[memoryview, list[int]]]
"""Bytes in transit, and the descriptors that leave with the first of them."""


def connect(
    faults: Faults, direction: Direction, transport: Transport, fail_call: Callable[[int, str], None]
) -> FaultyTransport:
    """Wrap ``transport`` with faults for the messages sent over it."""
    if transport.fileno() is None:
        raise ValueError(f"{transport.describe()} has no descriptor to poll: faults need a tcp or unix connection")
    for_node, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    relay = Relay(faults, direction, UnixTransport(near), transport, fail_call)
    wrapped = FaultyTransport(for_node, transport, relay)
    relay.start()
    return wrapped


class FaultyTransport(UnixTransport):
    """The node's end of a connection with faults."""

    def __init__(self, stream: socket.socket, far: Transport, relay: Relay) -> None:
        super().__init__(stream)
        self.kind: str = far.kind
        self.carries_descriptors: bool = far.carries_descriptors
        self.peer_host: str = far.peer_host
        self._description = f"{far.describe()}, with faults"
        self._relay = relay
        self._far = far
        # A descriptor that came right after the handshake belongs to a frame that the link already has.
        self._untaken = far.take_descriptors()

    @property
    def resumable(self) -> bool:  # type: ignore[override]
        """Do both ends still count the same frames? Not after frames were repeated or reordered."""
        return not self._relay.disordered

    def silent_s(self) -> float:
        """The silence of the real connection, or of a rule that lets nothing through: then no kernel answers either."""
        return max(self._relay.silent_s(), self._far.silent_s())

    def close(self) -> None:
        super().close()
        self._relay.end(CLOSING_S)

    def describe(self) -> str:
        return self._description


class Relay:
    """The thread between a node and one of its connections. Only that thread changes the queues and the flags."""

    def __init__(
        self,
        faults: Faults,
        direction: Direction,
        near: Transport,
        far: Transport,
        fail_call: Callable[[int, str], None],
    ) -> None:
        self._faults = faults
        self._direction = direction
        self._near = near
        self._far = far
        self._fail_call = fail_call
        self._line = DelayLine(self._on_failed)
        self._splitter = Splitter(self._inspects_messages)
        self._descriptors: deque[int] = deque()
        self._number: int | None = None  # of the next frame to leave; None before the first frame
        self._forth: Chunks = deque()
        self._forth_bytes = 0
        self._back: Chunks = deque()
        self._near_ended = self._far_ended = self._node_closed = False
        self._told_far = self._told_near = False
        self.disordered: bool = False
        self._refused = False  # the other side takes no more bytes
        self._close_by = NEVER
        self._silent_since = self._silent_until = 0.0
        self._silenced_by: object = None
        self._is_to_self = direction.sender == direction.receiver  # no connection: its faults do not apply
        self._begun: set[int] = set()  # numbers of the rules without a message that were applied here
        self._tokens = 0.0
        self._paid_at = monotonic()
        self._wake_read, self._wake_write = os.pipe()
        close_in_children(self)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(
            target=self._run, name=f"farcall-faults-{direction.sender}-{direction.receiver}", daemon=True
        )

    def _inspects_messages(self) -> bool:
        """Does a rule concern messages, and not only the connection as a whole?"""
        return any(not rule.at_once for rule in self._faults.rules)

    def start(self) -> None:
        self._faults.add_relay(self)
        self._thread.start()

    def wake(self) -> None:
        """Make the thread check the rules again."""
        try:
            os.write(self._wake_write, b"\0")
        except OSError:
            pass  # the pipe is full, so the thread wakes up anyway; or the relay has ended

    def silent_s(self) -> float:
        """How long a rule has let nothing through. From any thread."""
        now = monotonic()
        return now - self._silent_since if self._silent_until > now else 0.0

    def end(self, timeout_s: float) -> None:
        """After the node closed its end: wait at most ``timeout_s`` or so until its written bytes have left."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + 0.5)

    def close_after_fork(self) -> None:
        """Close the descriptors in a forked child, where the thread does not exist."""
        self._close_wakes()

    def _close_wakes(self) -> None:
        """Close the wake-up pipe once: afterwards its descriptor numbers may belong to other files."""
        wakes = [wake for wake in (self._wake_read, self._wake_write) if wake >= 0]
        self._wake_read = self._wake_write = -1
        _close(wakes)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        except (TransportError, NetworkError, SplitError, OSError) as error:
            logger.debug("the relay from %s to %s ends: %s", self._direction.sender, self._direction.receiver, error)
        finally:
            self._faults.forget_relay(self)
            self._far.close()
            self._near.close()
            self._queue(self._line.take(NEVER))
            for _, descriptors in ((None, self._descriptors), *self._forth, *self._back):
                _close(descriptors)
            self._close_wakes()

    def _go_on(self) -> bool:
        """Wait for an event and handle it. False: this connection is over."""
        now = monotonic()
        if self._apply_connection_faults(now):
            return False
        silent = self._silent_until > now
        self._queue(self._line.take(now))
        if self._is_over(now, silent):
            return False
        near, far, wake = self._near.fileno(), self._far.fileno(), self._wake_read
        assert near is not None
        assert far is not None
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        allowance, allowed_at = self._allowance(now)
        if not (self._node_closed and self._near_ended):
            wants = 0
            if not self._near_ended and (not silent or self._node_closed) and self._forth_bytes < MOST_QUEUED_BYTES:
                wants |= select.POLLIN
            if self._back and not silent:
                wants |= select.POLLOUT
            poll.register(near, wants)
        if not silent:
            wants = 0
            if not self._far_ended and not self._back and not self._node_closed:
                wants |= select.POLLIN
            if self._forth and allowance:
                wants |= select.POLLOUT
            if wants:
                poll.register(far, wants)
        until = min(self._line.next_due, self._close_by, self._silent_until if silent else NEVER, allowed_at)
        read_far = not silent and not self._far_ended and not self._back and not self._node_closed
        if read_far and self._far.buffered:
            until = 0.0  # a poll does not report buffered bytes
        events = dict(poll.poll(None if until == NEVER else max(0.0, until - monotonic()) * 1000.0))
        if wake in events:
            os.read(wake, 4096)
        if events.get(near, 0) & (select.POLLHUP | select.POLLERR):
            self._node_has_closed()
        if events.get(near, 0) & select.POLLIN:
            self._read_near()
        if events.get(near, 0) & select.POLLOUT:
            self._write_near()
        if events.get(far, 0) & ~select.POLLOUT or (read_far and self._far.buffered):
            self._read_far()
        if events.get(far, 0) & select.POLLOUT:
            self._write_far(allowance)
        return True

    def _node_has_closed(self) -> None:
        if not self._node_closed:
            self._node_closed = True
            self._close_by = monotonic() + CLOSING_S

    def _is_over(self, now: float, silent: bool) -> bool:
        if self._node_closed and (silent or now >= self._close_by or (self._near_ended and not self._forth)):
            return True
        if self._near_ended and not self._forth and not len(self._line) and not self._told_far and not silent:
            self._told_far = True
            self._far.end_sending()
        if self._far_ended and not self._back and not self._told_near:
            self._told_near = True
            self._near.end_sending()
        return self._told_far and self._told_near

    # ------------------------------------------------------------------ out

    def _read_near(self) -> None:
        data = _read(self._near)
        self._descriptors.extend(self._near.take_descriptors())
        if data is None:
            return
        if not data:
            self._near_ended = True
            return
        now = monotonic()
        for message in self._splitter.feed(data):
            if self._number is None:
                self._number = message.number
            if message.carries_descriptor:
                message.descriptors.append(self._descriptors.popleft())
            fault, drawn = self._faults.judge(self._direction, message)
            if self._is_to_self and isinstance(fault, OF_CONNECTIONS):
                fault = None
            if isinstance(fault, Cut):
                raise TransportError("a rule cut this connection")
            if isinstance(fault, HalfOpen):
                self._silence(fault, now)
                fault = None
            if isinstance(fault, Duplicate | Reorder) or (isinstance(fault, Delay) and not fault.in_order):
                self.disordered = True
            self._line.add(message, fault, drawn, now)

    def _on_failed(self, message: Message) -> None:
        self._fail_call(message.frame.call_id, f"sending to {self._direction.receiver} failed: injected")

    def _queue(self, messages: list[Message]) -> None:
        for message in messages:
            if self._refused:
                _close(message.descriptors)
                continue
            assert self._number is not None
            data, descriptors = with_number(message.data, self._number), message.descriptors
            self._number += 1
            if descriptors and not self._far.carries_descriptors:  # it was meant for another connection
                _close(descriptors)
                data, descriptors = with_flags(data, Header.of(data).flags & ~CARRIES), []
            self._forth.append((memoryview(data), descriptors))
            self._forth_bytes += len(data)

    def _write_far(self, allowance: int) -> None:
        try:
            sent = _write(self._far, self._forth, allowance)
        except TransportError:
            # Go on without sending: bytes that the peer sent before it closed must still be read.
            self._refused = True
            for _, descriptors in self._forth:
                _close(descriptors)
            self._forth.clear()
            self._forth_bytes = 0
        else:
            self._forth_bytes -= sent
            self._tokens -= sent

    def _allowance(self, now: float) -> tuple[int, float]:
        """The number of bytes that may leave now; if 0, also the time when more may leave."""
        rates = [
            rule.fault.bytes_per_s
            for rule in self._faults.rules
            if isinstance(rule.fault, Throttle)
            and not self._is_to_self
            and rule.concerns(self._direction.sender, self._direction.receiver)
        ]
        if not rates:
            self._tokens, self._paid_at = 0.0, now
            return UNLIMITED, NEVER
        rate = min(rates)
        # Tokens do not accumulate over a pause, and bytes leave in portions, not one by one.
        portion = max(1.0, rate * PORTION_S)
        self._tokens = min(self._tokens + (now - self._paid_at) * rate, portion)
        self._paid_at = now
        if not self._forth:
            return 0, NEVER
        missing = min(portion, self._forth_bytes) - self._tokens
        return (int(self._tokens), NEVER) if missing <= 0 else (0, now + missing / rate)

    # ------------------------------------------------------------------ in

    def _read_far(self) -> None:
        data = _read(self._far)
        if data is None:
            return
        if not data:
            self._far_ended = True
            return
        self._back.append((data, self._far.take_descriptors()))

    def _write_near(self) -> None:
        try:
            _write(self._near, self._back, UNLIMITED)
        except TransportError:
            self._node_has_closed()

    # ------------------------------------------------------------------ faults of the connection

    def _apply_connection_faults(self, now: float) -> bool:
        """Begin and end the faults of whole connections. True: cut this one."""
        if self._is_to_self:
            return False
        rules = self._faults.rules
        for rule in rules:
            if rule.at_once and rule.number not in self._begun:
                self._begun.add(rule.number)
                if self._direction.begin(rule):
                    self._faults.note(rule, self._direction, frozenset())
                    if isinstance(rule.fault, Cut):
                        return True
                    if isinstance(rule.fault, HalfOpen):
                        self._silence(rule.fault, now)
        if self._silenced_by is not None and not any(rule.fault is self._silenced_by for rule in rules):
            self._silenced_by = None
            self._silent_until = 0.0
        return False

    def _silence(self, fault: HalfOpen, now: float) -> None:
        self._silenced_by = fault
        self._silent_since = now
        self._silent_until = NEVER if fault.seconds is None else now + fault.seconds


def _read(transport: Transport) -> memoryview | None:
    """Read available bytes; empty at the end of the stream or if it is broken; None if none have come yet."""
    view = memoryview(bytearray(CHUNK_BYTES))
    try:
        count = transport.receive_into(view)
    except TransportError:
        count = 0
    return None if count is None else view[:count]


def _write(transport: Transport, chunks: Chunks, most: int) -> int:
    """Send as much of ``chunks`` as the transport takes, up to ``most`` bytes; return the number of bytes."""
    sent = 0
    while chunks and sent < most:
        data, descriptors = chunks[0]
        taken = transport.send((data[: most - sent],), descriptors)
        if not taken:
            break
        _close(descriptors)
        if taken < len(data):
            chunks[0] = (data[taken:], [])
        else:
            chunks.popleft()
        sent += taken
    return sent


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
