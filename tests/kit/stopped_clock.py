"""A clock for those who meet in a group of fixed size: it stands still until a test turns it.

A start that is to end for want of others ends when the test says so: it has all the time of a busy machine for what
comes before, and the test waits for none of it.
"""

from __future__ import annotations

import time

import pytest
from tests.kit.waiting import wait_until

from farcall.runtime.rendezvous import static, store


class StoppedClock:
    """The time of `static` and `store` in this process, and who waits for others there. Mutable, by the test."""

    def __init__(self, patch: pytest.MonkeyPatch, *, turned_by_waiting_s: float = 0.0) -> None:
        """``turned_by_waiting_s``: turned by that as soon as somebody waits for others."""
        self._now = time.monotonic()
        self._readings = 0
        self._waiting: list[str] = []
        wait_for_outcome = static.StaticRendezvous._wait_for_outcome

        def noted(meeting: static.StaticRendezvous) -> object:
            self._waiting.append(meeting._me.name)
            self.turn(turned_by_waiting_s)
            return wait_for_outcome(meeting)

        patch.setattr(static.StaticRendezvous, "_wait_for_outcome", noted)
        for module in (static, store):
            patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        """For the modules: all that they take from `time`."""
        self._readings += 1
        return self._now

    def turn(self, seconds: float) -> None:
        self._now += seconds

    def wait_until_waits(self, name: str) -> None:
        """Until ``name`` has a record in the store, and waits for those of others."""
        wait_until(lambda: name in self._waiting, f"{name} waits for others")

    def wait_read(self) -> None:
        """Until somebody who tries again and again has looked at the clock some times from now on."""
        enough = self._readings + 20
        wait_until(lambda: self._readings >= enough, "somebody reads the clock")
