"""What happened at a node that somebody may ask about afterwards: counted by kind for good, told of the latest only.

Owns the kinds of events, their counts and the last MOST_EVENTS of them. Nothing here is on the way of a call that ends
well. An event that repeats the last one is not told again, but counted in its ``times``: a loop over a broken function
must not push a death out of sight. From any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Final, NamedTuple

__all__ = ["FAILED", "INTERRUPTED", "MOST_EVENTS", "RECONNECTED", "TIMED_OUT", "Event", "EventLog"]

FAILED: Final = "failed"
"""A function raised that this node ran for ``worker``."""
TIMED_OUT: Final = "timed out"
"""A call of this node to ``worker`` was not answered in time."""
INTERRUPTED: Final = "interrupted"
"""The connection to ``worker`` broke."""
RECONNECTED: Final = "reconnected"
"""It was made again."""
# Beside these: the kinds of `changes.MemberEvent`, which are "joined", "left", "suspected", "recovered" and "dead".

MOST_EVENTS: Final = 100
MOST_CHARACTERS: Final = 400


class Event(NamedTuple):
    """One of the latest events."""

    at: float
    """Seconds since the epoch; of one that came several times, the last."""
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
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, worker: str, what: str = "", text: str = "") -> None:
        """Something happened."""
        text = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
        now = time.time()
        with self._lock:
            self._counts[kind] += 1
            times = 1
            if self._events and self._events[-1][1:4] == (kind, worker, what):
                times += self._events.pop().times
            self._events.append(Event(now, kind, worker, what, text, times))

    def count(self, kind: str) -> int:
        """How often this has happened."""
        return self._counts[kind]

    def latest(self) -> list[Event]:
        """The last events, the oldest first."""
        with self._lock:
            return list(self._events)
