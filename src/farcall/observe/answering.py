"""A node's answers to questions about it, and its own questions to others.

Owns which subjects there are, the questions that it passed on for observers, and those that it asks for itself: what
a peer does with a call whose time is up. Everything runs on the I/O thread but ``explain`` and the end of the node, and
whoever pops a question from its table ends it, so there is no lock. Nothing here waits, and no answer needs a worker
thread. An answer that does not come is given up at its bound.

An observer is told of all workers: the asked member passes the question on over its links, and each answer back.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import msgspec

from farcall.observe import explaining, metrics
from farcall.observe.threads import take_snapshot
from farcall.protocol.observing import Ask, Roster, Told, WorkerState
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Node
from farcall.runtime.observing.event_log import LoggedEvent
from farcall.runtime.observing.observer_connection import ObserverConnection
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer

__all__ = ["CALL", "EVENTS", "METRICS", "SNAPSHOT", "Answering", "Subject", "WorkerEvents"]

logger: logging.Logger = logging.getLogger("farcall")

SNAPSHOT = "snapshot"
METRICS = "metrics"
CALL = "call"
EVENTS = "events"

FORGET_S = 30.0
SILENT_S = 5.0
"""A peer that did not answer in time is not asked again for this long: errors must not be held up again and again."""

Subject = Callable[[Peer | None, bytes], bytes | Callable[[], bytes]]
"""From who asks (None: an observer) and the argument to the answer. On the I/O thread: it must not block.

An answer that takes long to write is given as a function, which runs on a thread of its own.
"""


class WorkerEvents(msgspec.Struct, frozen=True, array_like=True):
    """What has happened of late at one worker, the oldest first."""

    worker: str
    events: list[LoggedEvent]


class _PassedOn(NamedTuple):
    onlooker: ObserverConnection
    number: int
    deadline: float


class _Own(NamedTuple):
    peer: Peer
    deadline: float
    done: Callable[[bytes], None]


class Answering:
    """A part of a node: ``node.part(Answering)``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        encode = msgspec.msgpack.encode
        self.subjects: dict[str, Subject] = {
            SNAPSHOT: lambda peer, argument: encode(take_snapshot(node)),
            METRICS: lambda peer, argument: encode(metrics.collect(node)),
            EVENTS: lambda peer, argument: encode(WorkerEvents(node.info.name, node.event_log.latest())),
            CALL: lambda peer, argument: explaining.describe_call(node, peer, argument),
        }
        """Other layers may add theirs, before the node starts."""
        self._numbers = itertools.count(1)
        self._passed_on: dict[int, _PassedOn] = {}
        self._own: dict[int, _Own] = {}
        self._silent_until: dict[int, float] = {}
        node.on_control(Ask, self._on_member_asks)
        node.on_control(Told, self._on_told)
        node.on_control(Roster, lambda peer, message: peer.link.abort("a member does not send a roster"))
        node.on_question = self._on_observer_asks
        node.calls.explain = self.explain
        node.wait_for(lambda: len(self._own))
        node.on_end(self._give_up_all)
        self._timer = node.timer(self._give_up_overdue)

    # ------------------------------------------------------------------ what others ask

    def answer(self, peer: Peer | None, subject: str, argument: bytes, tell: Callable[[bytes], None]) -> None:
        """Tell what this node says, now or later; nothing where it knows no such subject, or cannot say."""
        handle = self.subjects.get(subject)
        try:
            found = b"" if handle is None else handle(peer, argument)
        except Exception:
            self._went_wrong(subject)
            found = b""
        if isinstance(found, bytes):
            tell(found)
        else:
            name = f"farcall-answer-{self._node.info.name}"
            threading.Thread(target=self._write, args=(subject, found, tell), name=name, daemon=True).start()

    def _write(self, subject: str, write: Callable[[], bytes], tell: Callable[[bytes], None]) -> None:
        """On a thread of its own: work out an answer."""
        data = b""
        try:
            data = write()
        except Exception:
            self._went_wrong(subject)
        self._node.call_soon(lambda: tell(data))

    def _went_wrong(self, subject: str) -> None:
        logger.exception("%s: a question about %r went wrong; please report this", self._node.info.name, subject)

    def _on_member_asks(self, peer: RemotePeer, ask: Ask) -> None:
        me = self._node.info.name
        self.answer(peer, ask.subject, ask.argument, lambda data: peer.control(Told(ask.number, me, data)))

    def _on_observer_asks(self, onlooker: ObserverConnection, ask: Ask) -> None:
        node = self._node
        others = node.others() if ask.everyone else []
        workers = self._everyone() if ask.everyone else [WorkerState(node.info.name, node.info.id)]
        onlooker.tell(Roster(ask.number, node.membership.cluster_id, workers))
        deadline = monotonic() + FORGET_S
        for peer in others:
            if not peer.broken:
                number = next(self._numbers)
                self._passed_on[number] = _PassedOn(onlooker, ask.number, deadline)
                peer.control(Ask(number, ask.subject, ask.argument))
        self._timer.at(deadline)
        self.answer(None, ask.subject, ask.argument, lambda data: onlooker.tell(Told(ask.number, node.info.name, data)))

    def _everyone(self) -> list[WorkerState]:
        """All members; where they come and go, those that are there."""
        node = self._node
        if not node.is_static:
            return [WorkerState(info.name, info.id) for info in node.workers()]
        return [WorkerState(one.name, one.rank, self._why_gone(one.rank)) for one in node.membership.members]

    def _why_gone(self, rank: int) -> str:
        peer = self._node.other(rank)
        if peer is None:
            return "" if rank == self._node.info.id else "it is not connected yet"
        if not peer.broken:
            return ""
        return "it has left" if peer.leaving else str(peer.link.broken)

    def _on_told(self, peer: RemotePeer, told: Told) -> None:
        passed_on = self._passed_on.pop(told.number, None)
        if passed_on is not None:
            passed_on.onlooker.tell(Told(passed_on.number, peer.info.name, told.data))
            return
        own = self._own.pop(told.number, None)
        if own is not None:
            self._end_own(own, told.data)

    # ------------------------------------------------------------------ what this node asks

    def ask(self, peer: Peer, subject: str, argument: bytes, bound_s: float, done: Callable[[bytes], None]) -> None:
        """Ask ``peer``; ``done`` gets the answer, or nothing if none comes within ``bound_s``. On the I/O thread."""
        if isinstance(peer, LoopbackPeer):
            self.answer(peer, subject, argument, done)
            return
        now = monotonic()
        if peer.broken or self._silent_until.get(peer.number, 0.0) > now or not isinstance(peer, RemotePeer):
            done(b"")
            return
        number = next(self._numbers)
        self._own[number] = _Own(peer, now + bound_s, done)
        peer.control(Ask(number, subject, argument))
        self._timer.at(now + bound_s)
        # After it is in the table: if the node ends in this moment, one of the two sees the other.
        if not self._node.running and self._own.pop(number, None) is not None:
            done(b"")

    def explain(self, call: PendingCall, done: Callable[[str], None]) -> None:
        """Find out what the callee does with ``call``, whose time is up. From any thread."""

        def begin() -> None:
            bound_s = explaining.bound_s(call.timeout_s)
            argument = msgspec.msgpack.encode(call.call_id)
            self.ask(
                call.peer,
                CALL,
                argument,
                bound_s,
                lambda data: done(explaining.say(call.peer.info.name, data, bound_s)),
            )

        if not self._node.running:
            done("")  # the I/O thread may have ended
        elif self._node.on_io_thread():
            begin()  # at once, so that nothing is left behind if this is the thread's last round
        else:
            self._node.call_soon(begin)

    # ------------------------------------------------------------------ bounds

    def _give_up_overdue(self, now: float) -> float:
        nearest = NEVER
        for number, own in list(self._own.items()):
            if own.deadline <= now:
                self._silent_until[own.peer.number] = now + SILENT_S
                if self._own.pop(number, None) is not None:
                    self._end_own(own, b"")
            else:
                nearest = min(nearest, own.deadline)
        for number, passed_on in list(self._passed_on.items()):
            if passed_on.deadline <= now:
                del self._passed_on[number]
            else:
                nearest = min(nearest, passed_on.deadline)
        return nearest

    def _end_own(self, own: _Own, data: bytes) -> None:
        own.done(data)
        self._node.something_ended()

    def _give_up_all(self) -> None:
        """The node ends: whoever waits for an answer gets his error without it."""
        for number in list(self._own):
            own = self._own.pop(number, None)
            if own is not None:
                own.done(b"")
