"""The states of a node, and the one way to change them.

    state      by                             to
    new        start()                        starting: meets the others, dials the earlier ones, awaits the later ones
    starting   all linked; or let in          running: serves calls (those that came before have waited)
    starting   an error                       ended
    running    shutdown(graceful)             leaving: agrees with all members, then ends; in a group without a fixed
                                              size: ends its own work, tells the others, then ends
    running    shutdown(graceful=False)       ended
    running    the others declare it dead     expelled, then ended: every call fails and says so
    (any)      fork(), in the child           forked: it is the parent's

The thread that starts or shuts down a node and its I/O thread, which learns that it is expelled, change the state under
the lock: who moves it away from "running" is the one that ends the node. Any thread reads, without a lock.
Knows nothing of what is to be started or stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from farcall.errors import NotInitialized, RpcError

__all__ = ["Lifecycle"]


class Lifecycle:
    """One node's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self.state: str = "new"
        self.is_running: bool = False
        """May calls be made? True in the states "running" and "leaving": every call asks, so it is kept."""
        self.verdict: RpcError | None = None
        """Why the others hold this node for dead, if they do: that is final."""

    def _become(self, state: str) -> None:
        self.state = state
        self.is_running = state in ("running", "leaving")

    def move(self, before: str, after: str) -> bool:
        """Change the state, if it is ``before``."""
        with self._lock:
            if self.state != before:
                return False
            self._become(after)
            return True

    def is_over(self) -> bool:
        """Has it ended, or is it ending without waiting for anybody?"""
        return self.state not in ("new", "starting", "running", "leaving")

    def expel(self, end: Callable[[RpcError], None]) -> bool:
        """On the I/O thread, when there is a verdict: have ``end`` called on a thread of its own.

        False: somebody is starting or shutting the node down, and ends it.
        """
        ending = threading.Thread(target=end, args=(self.verdict,), name=f"farcall-end-{self._name}", daemon=True)
        with self._lock:
            if self.state != "running":
                return False
            self._become("expelled")
            ending.start()
            self._ending = ending
            return True

    def end(self) -> None:
        """By who ends the node, whatever the state was."""
        self._become("ended" if self.verdict is None else "expelled")

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the thread that ends an expelled node, if there is one."""
        if self._ending is not None:
            self._ending.join(timeout_s)

    def fork(self) -> None:
        """In a forked child."""
        self._become("forked")

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        if self.verdict is not None or self.is_running:
            return self.verdict
        return NotInitialized(f"the node {self._name} is {self.state}: no calls can be made with it")
