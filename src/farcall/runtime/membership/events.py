"""Telling programs who joined, left, is suspected, recovered or died.

Owns the subscriptions. Callbacks run on worker threads, one event after the other in the order in which this node
learned of them, so a callback may make calls; an event waits for the callbacks of the one before it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from farcall.ids import WorkerInfo
from farcall.runtime.calls.executor import Executor

logger: logging.Logger = logging.getLogger("farcall")

__all__ = ["MEMBER_EVENTS", "MemberEvent", "MemberEvents"]

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


class MemberEvents:
    """The events of one node. A task of its executor."""

    quick = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[MemberEvent], object]] = []
        self._inboxes: weakref.WeakSet[_Inbox] = weakref.WeakSet()
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
            inboxes = list(self._inboxes)
        for inbox in inboxes:
            inbox.put(None)

    def iterate(self) -> AsyncIterator[MemberEvent]:
        """The events from now on, until the node ends."""
        inbox = _Inbox()
        unsubscribe = self.subscribe(inbox.put)
        with self._lock:
            if self._ended:
                inbox.put(None)
            else:
                self._inboxes.add(inbox)
        events = _events_in(inbox)
        weakref.finalize(events, unsubscribe).atexit = False  # also if nobody has ever looked at it
        return events


async def _events_in(inbox: _Inbox) -> AsyncIterator[MemberEvent]:
    while (event := await inbox.get()) is not None:
        yield event


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class _Inbox:
    """Events on their way from worker threads to a coroutine; None: there will be no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[MemberEvent | None] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, event: MemberEvent | None) -> None:
        """From any thread; never waits."""
        with self._lock:
            self._events.append(event)
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                waiting.get_loop().call_soon_threadsafe(_wake, waiting)
            except RuntimeError:
                pass  # that loop is closed

    async def get(self) -> MemberEvent | None:
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                waiting = self._waiting = asyncio.get_running_loop().create_future()
            await waiting
