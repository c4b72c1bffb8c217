"""The log of a node's events: every kind is counted for good, the latest events are kept.

Owns the kinds of events, their counts and the last MOST_EVENTS of them. A call that ends well is no event. An event
that repeats the one before only raises its ``times``: a loop over a broken function must not push a death out of the
log. From any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Final, NamedTuple

# Beside these: the kinds of `membership.events.MemberEvent`: "joined", "left", "unresponsive", "recovered" and "dead".
FAILED: Final = "failed"
"""A function raised that this node ran for ``worker``."""
TIMED_OUT: Final = "timed out"
"""A call of this node to ``worker`` was not answered in time."""
INTERRUPTED: Final = "interrupted"
"""The connection to ``worker`` broke."""
RECONNECTED: Final = "reconnected"
"""The connection to ``worker`` is back."""

MOST_EVENTS: Final = 100
MOST_CHARACTERS: Final = 400


class LoggedEvent(NamedTuple):
    """An event, which may have happened several times in a row."""

    at: float
    """Seconds since the epoch, of the last time."""
    kind: str
    worker: str
    what: str = ""
    """The function, if it is about a call."""
    text: str = ""
    times: int = 1


class EventLog:
    """The events of one node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[LoggedEvent] = deque(maxlen=MOST_EVENTS)
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, worker: str, what: str = "", text: str = "") -> None:
        """Add an event of this moment."""
        text = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
        now = time.time()
        with self._lock:
            self._counts[kind] += 1
            times = 1
            if self._events and self._events[-1][1:4] == (kind, worker, what):
                times += self._events.pop().times
            self._events.append(LoggedEvent(now, kind, worker, what, text, times))

    def count(self, kind: str) -> int:
        """The number of events of ``kind`` since the start."""
        return self._counts[kind]

    def latest(self) -> list[LoggedEvent]:
        """The last events, the oldest first."""
        with self._lock:
            return list(self._events)
