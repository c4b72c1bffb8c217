"""The states of a node, and the one way to change them: the rows of `TRANSITIONS`.

    starting   meets the others, dials the earlier ones, awaits the later ones; or asks to be let in
    running    makes and serves calls
    leaving    as running; agrees with all members, or ends its own work where members come and go
    expelled   declared dead by the others: every call fails and says so
    forked     in a forked child: the node is the parent's

Two threads change the state, under the lock: the one that starts or shuts down the node, and its I/O thread, which
learns of an expulsion. The thread that moves it away from "running" ends the node. Any thread reads, without the lock.
Knows none of the parts that start or stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Literal

from farcall.errors import NotInitialized, RpcError

State = Literal["new", "starting", "running", "leaving", "expelled", "ended", "forked"]
Event = Literal["start", "connected", "leave", "expel", "end", "end expelled", "fork"]

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    "new": {"start": "starting"},
    # A node that is expelled while a thread starts it, or shuts it down, is ended by that thread.
    "starting": {"connected": "running", "end": "ended", "end expelled": "expelled", "fork": "forked"},
    "running": {"leave": "leaving", "expel": "expelled", "fork": "forked"},
    "leaving": {"end": "ended", "end expelled": "expelled", "fork": "forked"},
    "expelled": {"fork": "forked"},
    "ended": {},
    "forked": {},
}


class Lifecycle:
    """The state of one node."""

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.state: State = "new"
        self.is_running: bool = False
        """May calls be made? True in the states "running" and "leaving"; kept, since every call asks."""
        self.verdict: RpcError | None = None
        """The reason for which the node can do no more: expelled, or its I/O thread failed. Final."""
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None

    def move(self, event: Event) -> bool:
        """Change the state by ``event``; False: this state has no such row."""
        with self._lock:
            return self._follow(event)

    def _follow(self, event: Event) -> bool:
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            return False
        self.state = after
        self.is_running = after in ("running", "leaving")
        return True

    def is_over(self) -> bool:
        """Has the node ended, or is it ending without waiting for anybody?"""
        return self.state in ("expelled", "ended", "forked")

    def expel(self, end: Callable[[RpcError], None]) -> bool:
        """On the I/O thread, when there is a verdict: have ``end`` called on a thread of its own.

        False: another thread starts the node or shuts it down, and ends it.
        """
        ending = threading.Thread(target=end, args=(self.verdict,), name=f"farcall-end-{self.name}", daemon=True)
        with self._lock:
            if not self._follow("expel"):
                return False
            ending.start()  # under the lock: a shutdown that sees the new state waits for this thread
            self._ending = ending
            return True

    def end(self) -> None:
        """By the thread that ends the node. Idempotent."""
        self.move("end" if self.verdict is None else "end expelled")

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the thread that ends an expelled node, if there is one."""
        if self._ending is not None:
            self._ending.join(timeout_s)

    def fork(self) -> None:
        """In a forked child, where another thread of the parent may have held the lock for good."""
        self._lock = threading.Lock()
        self.move("fork")

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        if self.verdict is not None or self.is_running:
            return self.verdict
        return NotInitialized(f"the node {self.name} is {self.state}: no calls can be made with it")
