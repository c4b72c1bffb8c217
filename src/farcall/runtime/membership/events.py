"""Reactions to members that come and go: programs get events, and calls to members that are gone fail.

Owns the subscriptions of programs (`MemberEvents`) and what the parts of the node do about each change
(`MemberChanges`). Does not decide who is a member (`failure_detector.py` does), and keeps no peer.

Thread rules
- Callbacks of programs run on worker threads, so a callback may make calls. Events come one at a time, in the order in
  which this node learned of them: each waits for the callbacks of the event before it.
- The node's peer table calls `MemberChanges` on the I/O thread; only ``awaited`` and ``fail_unsent`` may be called from
  any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import NamedTuple

from farcall.errors import Delivery, NetworkError
from farcall.ids import WorkerInfo
from farcall.protocol.member import Member, incarnation_text
from farcall.protocol.messages import LEFT
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.io.loop import Loop
from farcall.runtime.membership.shutdown import Leaving, Withdrawing
from farcall.runtime.observing.counters import LOST
from farcall.runtime.observing.event_log import INTERRUPTED, RECONNECTED, EventLog
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous

logger: logging.Logger = logging.getLogger("farcall")

ENDS_S = 2.0
RECENTLY_S = 10.0
MEMBER_EVENTS = ("joined", "left", "unresponsive", "recovered", "dead", "rejoined")


class MemberEvent(NamedTuple):
    """A change of a member.

    ``kind`` is ``"joined"``, ``"left"``, ``"unresponsive"``, ``"recovered"`` (from suspicion), ``"dead"``, or
    ``"rejoined"``, for this worker itself: it was expelled, and is a new member. ``incarnation`` identifies one start
    of the worker; ``why`` is for people.
    """

    kind: str
    worker: WorkerInfo
    incarnation: str
    why: str = ""


class MemberEvents:
    """The subscriptions of programs to changes of members. A task of the executor, which runs the callbacks."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        # Mutable, under the lock: the subscribers, the events not delivered yet, and whether a worker delivers them.
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[MemberEvent], object]] = []
        self._inboxes: weakref.WeakSet[_Inbox] = weakref.WeakSet()
        self._events: deque[MemberEvent] = deque()
        self._busy = False
        self._ended = False

    def subscribe(self, callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; returns the function that ends the subscription."""
        with self._lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def take_over(self, before: MemberEvents) -> None:
        """Take over the subscriptions of this node's former membership. Call before the first ``subscribe`` here."""
        with before._lock:
            self._lock, self._callbacks, self._inboxes = before._lock, before._callbacks, before._inboxes

    def tell(self, event: MemberEvent) -> None:
        """Queue ``event`` for the callbacks. From any thread; never waits."""
        with self._lock:
            if not self._callbacks or self._ended:
                return
            self._events.append(event)
            if self._busy:
                return
            self._busy = True
        self._executor.submit(self)

    def run(self, more: bool) -> None:
        """On a worker thread: deliver all queued events."""
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
                    logger.exception("a callback of on_member failed (%s: %s)", event.worker.name, event.kind)

    def drop(self) -> None:
        """The executor ended before it ran this task: the events are lost with the node."""

    def end(self) -> None:
        """The node ends: end the iterators."""
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
        # Not a ``finally`` in the generator: that would not run if the iterator is dropped before its first step.
        weakref.finalize(events, unsubscribe).atexit = False
        return events


async def _events_in(inbox: _Inbox) -> AsyncIterator[MemberEvent]:
    while (event := await inbox.get()) is not None:
        yield event


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class _Inbox:
    """Events on their way from worker threads to a coroutine; None ends the iteration."""

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


_lost_processes: dict[int, float] = {}
"""Process ids, on this host, of lost members, and when each was lost."""


def note_lost_process(peer: RemotePeer) -> None:
    """On the I/O thread: ``peer`` is lost, or says that it ends; before anybody is told."""
    now = monotonic()
    for process in [process for process, at in _lost_processes.items() if now - at > RECENTLY_S]:
        del _lost_processes[process]
    _lost_processes[peer.link.transport.peer_process] = now


def wait_for_lost_processes() -> None:
    """At the end of this process: wait up to ENDS_S until recently lost processes have ended.

    A launcher reports the first process that fails. Their loss may be why this one fails, so they should end first.
    """
    deadline = monotonic() + ENDS_S
    for process, lost_at in _lost_processes.copy().items():
        if process in (0, os.getpid(), os.getppid()) or monotonic() - lost_at > RECENTLY_S:
            continue
        try:
            descriptor = os.pidfd_open(process)
        except (AttributeError, OSError):
            continue  # this system has no pidfd_open, or the process has ended
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(max(0.0, deadline - monotonic()) * 1000.0)
        finally:
            os.close(descriptor)


class MemberChanges:
    """The reactions of a node to each change among its members."""

    def __init__(
        self,
        name: str,
        *,
        is_over: Callable[[], bool],
        loop: Loop,
        admission: Admission,
        calls: CallTable,
        leaving: Leaving | Withdrawing,
        events: MemberEvents,
        event_log: EventLog,
        entry: DynamicRendezvous | None,
        joined_hooks: Sequence[Callable[[Peer], None]],
        gone_hooks: Sequence[Callable[[Peer], None]],
    ) -> None:
        """``is_over``: has this node itself ended? ``entry``: None in a group of fixed size.

        The owner may append hooks later.
        """
        self._name = name
        self._is_over = is_over
        self._loop = loop
        self._admission = admission
        self._calls = calls
        self._leaving = leaving
        self._events = events
        self._event_log = event_log
        self._entry = entry
        self._joined_hooks = joined_hooks
        self._gone_hooks = gone_hooks
        # The fields that change.
        self.peers_lost: int = 0
        """The number of members lost without a goodbye."""
        self.loss_level: int = logging.WARNING
        """The level of the log line for a lost member; lower where somebody else tells of it."""

    def on_entered(self, peer: RemotePeer) -> None:
        """A member joined; no frame from it has been read yet."""
        self._leaving.on_peer_came(peer)
        for hook in self._joined_hooks:
            hook(peer)

    def on_change(self, kind: str, member: Member, why: str) -> None:
        """A member joined, left, died, is unresponsive, or recovered."""
        # Info only: the one warning for a death is that of `on_gone`.
        logger.info("%s: %s (rank %d) %s%s", self._name, member.name, member.rank, kind, f": {why}" * bool(why))
        self._event_log.note(kind, member.name, text=why)
        if self._entry is not None and kind in ("joined", "left", "dead"):
            self._entry.on_change()
        self._events.tell(
            MemberEvent(kind, WorkerInfo(member.name, member.rank), incarnation_text(member.incarnation), why)
        )

    def on_interrupted(self, info: WorkerInfo, why: str) -> None:
        """The connection to a member broke."""
        self._event_log.note(INTERRUPTED, info.name, text=why)

    def on_reconnected(self, info: WorkerInfo) -> None:
        """A member is connected again."""
        self._event_log.note(RECONNECTED, info.name)

    def on_gone(self, peer: RemotePeer, reason: str) -> None:
        """Called once per member: its link is dead. Fail the calls to it now."""
        peer.close()
        self._admission.forget(peer)
        if peer.leaving:
            level = logging.DEBUG if peer.farewell == LEFT else logging.WARNING
            logger.log(level, "%s: %s %s", self._name, peer.info.name, peer.farewell)
        elif not self._is_over():
            self.peers_lost += 1
            # A member without a link had no calls with this node; the log line of `on_change` suffices for it.
            level = self.loss_level if peer.linked else logging.DEBUG
            logger.log(level, "%s: lost %s: %s", self._name, peer.info.name, reason)
        if peer.linked and not (peer.leaving and peer.farewell == LEFT):
            note_lost_process(peer)
        self._calls.look_for_lost(peer)
        for hook in self._gone_hooks:
            hook(peer)
        self._leaving.on_peer_gone(peer)

    def awaited(self) -> set[Peer]:
        """The members from which this node awaits answers. From any thread."""
        return {call.peer for call in self._calls.snapshot()}

    def fail_unsent(self, call_id: int, why: str) -> None:
        """A request was not sent after all: fail its call, on the I/O thread. From any thread."""

        def fail() -> None:
            call = self._calls.claim(call_id)
            if call is not None:
                call.counters[LOST] += 1
                call.on_failure(NetworkError(why, Delivery.NOT_SENT))
                call.peer.cancel(call.call_id)  # wakes a caller that waits for it

        self._loop.call_soon(fail)
