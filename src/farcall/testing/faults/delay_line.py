"""The messages that wait between a sender and the wire: delayed, repeated or overtaken.

Sans-I/O: messages and the time go in, messages come out when they are due.

    fault      request                            answer, letter or control message
    Drop       its remains leave                  its remains leave
    Fail       its remains leave, caller is told  leaves late, and so do its followers
    Delay      leaves late                        leaves late
    Duplicate  leaves twice, if repeatable        leaves twice, if repeatable
    Reorder    leaves behind later ones           leaves behind later ones

Invariant: a message leaves once (or as often as a rule says), and messages that no rule held back leave in order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from farcall.protocol.frames import REQUEST
from farcall.testing.faults.messages import Message
from farcall.testing.faults.rules import Delay, Drop, Duplicate, Fail, Fault, Reorder

NEVER = float("inf")
BACKOFF = 1.5


@dataclass(eq=False, slots=True)
class _Overtaken:
    """A message that lets ``left`` others pass, but waits no longer than until ``due``."""

    message: Message
    left: int
    due: float


class DelayLine:
    """The messages from one worker to another that were sent and have not left. Mutable: the three queues."""

    def __init__(self, on_failed: Callable[[Message], None]) -> None:
        """``on_failed`` is called with each request whose sending fails."""
        self._on_failed = on_failed
        self._order = itertools.count()
        self._waiting: deque[Message] = deque()  # in order, once the line is clear
        self._clear_at = 0.0
        self._late: list[tuple[float, int, Message]] = []
        self._overtaken: list[_Overtaken] = []

    def add(self, message: Message, fault: Fault | None, drawn: float, now: float) -> None:
        """Take a message and its fault; ``drawn`` is a random number from 0 to 1."""
        if fault is None:
            self._waiting.append(message)
        elif isinstance(fault, Drop):
            self._lose(message)
        elif isinstance(fault, Fail):
            if message.frame.kind == REQUEST:
                self._lose(message)
                self._on_failed(message)
            else:
                # Later messages wait, too: retransmission over a connection keeps the order.
                late_s = sum(fault.retry_s * BACKOFF**attempt for attempt in range(fault.attempts))
                self._clear_at = max(self._clear_at, now + late_s)
                self._waiting.append(message)
        elif isinstance(fault, Delay):
            due = now + fault.seconds + fault.jitter_s * drawn
            if fault.in_order:
                self._clear_at = max(self._clear_at, due)
                self._waiting.append(message)
            else:
                self._hold(message, due)
        elif isinstance(fault, Duplicate):
            self._waiting.append(message)
            for number in range(1, fault.copies + 1 if message.repeatable else 1):
                copy = message.copy(number)
                if fault.after_s:
                    self._hold(copy, now + fault.after_s * number)
                else:
                    self._waiting.append(copy)
        elif isinstance(fault, Reorder):
            self._overtaken.append(_Overtaken(message, fault.behind, now + fault.within_s))
        else:
            raise AssertionError(f"{fault} is not for messages")

    def take(self, now: float) -> list[Message]:
        """Return the messages that leave now, in order."""
        leaving: list[Message] = []
        while self._late and self._late[0][0] <= now:
            leaving.append(heapq.heappop(self._late)[2])
        if now >= self._clear_at:
            while self._waiting:
                leaving.append(self._waiting.popleft())
                for held in list(self._overtaken):
                    held.left -= 1
                    if held.left <= 0:
                        self._overtaken.remove(held)
                        leaving.append(held.message)
        for held in [held for held in self._overtaken if held.due <= now]:
            self._overtaken.remove(held)
            leaving.append(held.message)
        return leaving

    @property
    def next_due(self) -> float:
        """When `take` next returns a message, unless one is added before; infinity: never."""
        due = self._late[0][0] if self._late else NEVER
        for held in self._overtaken:
            due = min(due, held.due)
        return min(due, self._clear_at) if self._waiting else due

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late) + len(self._overtaken)

    def _hold(self, message: Message, due: float) -> None:
        heapq.heappush(self._late, (due, next(self._order), message))

    def _lose(self, message: Message) -> None:
        self._waiting.append(message.remains())
