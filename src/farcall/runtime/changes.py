"""Telling programs who joined, left, is suspected, recovered or died.

Owns the subscriptions. Callbacks run on worker threads, one event after the other in the order in which this node
learned of them, so a callback may make calls; an event waits for the callbacks of the one before it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from farcall.ids import WorkerInfo
from farcall.runtime.executor import Executor

logger = logging.getLogger("farcall")

__all__ = ["MEMBER_EVENTS", "Changes", "MemberEvent"]

MEMBER_EVENTS = ("joined", "left", "suspected", "recovered", "dead")


class MemberEvent(NamedTuple):
    """What became of a member.

    ``kind`` is ``"joined"``, ``"left"``, ``"suspected"``, ``"recovered"`` (from suspicion) or ``"dead"``;
    ``incarnation`` says which start of the worker; ``why`` is for people.
    """

    kind: str
    worker: WorkerInfo
    incarnation: str
    why: str = ""


class Changes:
    """The events of one node. A task of its executor."""

    quick = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[MemberEvent], object]] = []
        self._endings: list[Callable[[], None]] = []
        self._events: deque[MemberEvent] = deque()
        self._busy = False
        self._ended = False

    def subscribe(self, callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
        """Have ``callback`` told of events from now on; what is returned ends that."""
        with self._lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def tell(self, event: MemberEvent) -> None:
        """Something happened. From any thread; never waits."""
        with self._lock:
            if not self._callbacks or self._ended:
                return
            self._events.append(event)
            if self._busy:
                return
            self._busy = True
        self._executor.submit(self)

    def run(self, more: bool) -> None:
        """On a worker: tell what there is to tell."""
        while True:
            with self._lock:
                if not self._events:
                    self._busy = False
                    return
                event = self._events.popleft()
                callbacks = list(self._callbacks)
            for callback in callbacks:
                try:
                    callback(event)
                except Exception:
                    logger.exception("a callback failed to hear that %s %s", event.worker.name, event.kind)

    def drop(self) -> None:
        """The node ended first."""

    def end(self) -> None:
        """The node ends: so do the iterators."""
        with self._lock:
            self._ended = True
            endings, self._endings = self._endings, []
        for ending in endings:
            ending()

    async def iterate(self) -> AsyncIterator[MemberEvent]:
        """The events from now on, until the node ends."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[MemberEvent | None] = asyncio.Queue()

        def put(event: MemberEvent | None) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, event)
            except RuntimeError:
                pass  # that loop is closed

        unsubscribe = self.subscribe(put)
        ending = lambda: put(None)  # noqa: E731
        with self._lock:
            if self._ended:
                return
            self._endings.append(ending)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            unsubscribe()
            with self._lock:
                if ending in self._endings:
                    self._endings.remove(ending)
