"""Upkeep of the list of contacts: so that newcomers find somebody who is there.

The member of the lowest rank does it, whenever somebody joined or ended: takes the ended off the list, and fills it up.
On a thread of its own, since a store may block. The first error ends it: the store is dead, and the group goes on
without one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from farcall.protocol.member import Member
from farcall.runtime.rendezvous.contacts import Contacts

logger: logging.Logger = logging.getLogger("farcall")

__all__ = ["Upkeep"]

COLLECT_S = 0.2
"""Changes come in bunches."""


class Upkeep:
    """What one member does for the list."""

    def __init__(
        self, contacts: Contacts, members: Callable[[], Sequence[Member]], is_over: Callable[[int], bool]
    ) -> None:
        self._contacts = contacts
        self._members = members
        self._is_over = is_over
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._stopped = threading.Event()

    def poke(self) -> None:
        """Something has changed. From any thread; never waits."""
        with self._lock:
            self._again = True
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="farcall-upkeep", daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Begin nothing any more, and wait for what is under way, if that takes no time."""
        with self._lock:  # so that it is not about to be started
            self._stopped.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.wait(COLLECT_S):
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._contacts.refresh(self._members(), self._is_over)
            except Exception as error:
                logger.info("the list of contacts is not kept up any more: %s", error)
                self._stopped.set()
