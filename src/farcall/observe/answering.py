"""A node's answers to questions about it, and its own questions to peers.

Owns the subjects, the questions forwarded for observers, and the node's own: when a call has timed out, the node asks
the callee about it, and the answer explains the error. All but ``explain`` and the node's end run on the I/O thread.
Popping a question from the table ends it, and is atomic, so no lock is needed. Nothing here blocks, and no answer needs
a worker thread. A question without an answer is given up at its deadline.

An observer hears of all workers: the member that it asks forwards the question over its links, and each answer back.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from farcall.observe.snapshot import (
    LATER,
    QUEUED,
    STARTING,
    OutgoingCall,
    PoolView,
    ServedCall,
    StackLine,
    outgoing_call,
    pool_view,
    queued_calls,
    served_call,
    take_snapshot,
    view_threads,
)
from farcall.protocol.hello import observer_key
from farcall.protocol.observing import HIDDEN, Ask, Roster, Told, WorkerState
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.event_log import LoggedEvent
from farcall.runtime.observing.observer_connection import ObserverConnection
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize.allowance import INSTALLED

logger: logging.Logger = logging.getLogger("farcall")

SNAPSHOT = "snapshot"
METRICS = "metrics"
CALL_STATE = "call"
EVENTS = "events"
TRACE_BEGIN = "trace: begin"
TRACE_END = "trace: end"

FORGET_S = 30.0
SILENT_S = 5.0
"""A peer that did not answer in time is not asked again for this long: it must not delay one error after the other."""
LONGEST_EXPLAINING_S = 0.3
SHORTEST_EXPLAINING_S = 0.02
MOST_EXPLAINED = 64
"""How many calls one question is about; more are in the next one."""

Subject = Callable[[Peer | None, bytes], bytes | Callable[[], bytes]]
"""From the asking peer (None: an observer) and the argument to the answer. Runs on the I/O thread: it must not block.

For an answer that takes long to write it returns a function, which runs on a thread of its own.
"""


class WorkerEvents(msgspec.Struct, frozen=True, array_like=True):
    """The latest events of one worker, the oldest first."""

    worker: str
    events: list[LoggedEvent]


class CallState(msgspec.Struct, frozen=True, array_like=True):
    """A call that has timed out, as its callee sees it."""

    served: ServedCall | None
    """None: it never arrived, or it has been answered."""
    pool: PoolView
    thread: str = ""
    at: StackLine | None = None
    waits_for: OutgoingCall | None = None
    """The further call that its thread waits for."""
    worker_state: str = ""


# Made at the import, as all decoders: msgspec looks into a type at its first use, and two threads that do so at once
# crash.
_decode_state: Callable[[bytes], CallState] = msgspec.msgpack.Decoder(CallState).decode
_decode_states: Callable[[bytes], list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_numbers: Callable[[bytes], list[int]] = msgspec.msgpack.Decoder(list[int]).decode


class _Question(NamedTuple):
    """A question to a peer that waits for its answer."""

    peer: Peer
    deadline: float
    done: Callable[[bytes], None]
    own: bool = True
    """False: forwarded for an observer, which needs no empty answer."""


class _Unexplained(NamedTuple):
    """A call that has timed out, and whose error waits for its explanation."""

    call_id: int
    bound_s: float
    deadline: float
    done: Callable[[str], None]


class Answering:
    """The questions of one node, asked and answered: ``node.part(Answering)``.

    Mutable: the open questions, the peers that are not asked for a while, and the calls to be explained, by the number
    of their peer. A peer has one question about calls at a time: what becomes overdue meanwhile is in the next one, or,
    if the peer is silent, needs none.
    """

    def __init__(self, node: Runtime) -> None:
        self._node = node
        encode = msgspec.msgpack.encode
        self.subjects: dict[str, Subject] = {
            SNAPSHOT: lambda peer, argument: encode(take_snapshot(node)),
            METRICS: lambda peer, argument: encode(_collect(node)),
            EVENTS: lambda peer, argument: encode(WorkerEvents(node.info.name, node.event_log.latest())),
            CALL_STATE: lambda peer, argument: describe_calls(node, peer, argument),
        }
        """Other parts may add subjects before the node starts."""
        self._numbers = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._silent_until: dict[int, float] = {}
        self._unexplained: dict[int, list[_Unexplained]] = {}  # there is an entry while a question is open
        node.hooks.on_control(Ask, self._on_member_asks)
        node.hooks.on_control(Told, self._on_told)
        node.hooks.on_control(Roster, lambda peer, message: peer.link.abort("a member does not send a roster"))
        node.use_questions(self)
        node.hooks.unsettled.append(lambda: sum(question.own for question in list(self._open.values())))
        node.hooks.ended.append(self._give_up_all)
        self._timer = node.timer(self._give_up_overdue)

    # ------------------------------------------------------------------ questions of peers and observers

    def answer(self, peer: Peer | None, subject: str, argument: bytes, tell: Callable[[bytes], None]) -> None:
        """Call ``tell`` with this node's answer, now or later; empty if it knows no such subject, or fails."""
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
        """On a separate thread: write a long answer."""
        data = b""
        try:
            data = write()
        except Exception:
            self._went_wrong(subject)
        self._node.call_soon(lambda: tell(data))

    def _went_wrong(self, subject: str) -> None:
        logger.exception("%s: cannot answer a question about %r; please report this", self._node.info.name, subject)

    def _on_member_asks(self, peer: RemotePeer, ask: Ask) -> None:
        me = self._node.info.name
        if INSTALLED.allowance is not None and ask.subject != CALL_STATE:  # about its own calls anybody may ask
            wanted = ask.proved(self._key(), self._node.me.incarnation)
            if not hmac.compare_digest(wanted.proof, ask.proof):
                peer.control(Told(ask.number, me, b""))
                return
        self.answer(peer, ask.subject, ask.argument, lambda data: peer.control(Told(ask.number, me, data)))

    def answer_observer(self, observer: ObserverConnection, ask: Ask) -> None:
        """Answer an observer, and forward its question to all other workers if it asks for everyone."""
        node = self._node
        workers = self._everyone() if ask.everyone else [WorkerState(node.info.name, node.info.id)]
        observer.tell(Roster(ask.number, node.membership.cluster_id, workers))

        def teller(worker: str) -> Callable[[bytes], None]:
            return lambda data: observer.tell(Told(ask.number, worker, data))

        for peer in node.others() if ask.everyone and not self._are_hidden else []:
            if not peer.broken:
                question = _Question(peer, monotonic() + FORGET_S, teller(peer.info.name), own=False)
                self._send(question, peer, ask.subject, ask.argument, proves=INSTALLED.allowance is not None)
        self.answer(None, ask.subject, ask.argument, teller(node.info.name))

    @property
    def _are_hidden(self) -> bool:
        """Has each worker a secret for observers of its own, so that this one cannot ask others for an observer?"""
        return INSTALLED.allowance is not None and self._node.options.observing.secret is None

    def _key(self) -> bytes:
        return observer_key(self._node.observers_secret.values[0])

    def _everyone(self) -> list[WorkerState]:
        """All members; in a group without a fixed size, those present now."""
        node = self._node
        if self._are_hidden:
            return [WorkerState(info.name, info.id, HIDDEN * (info != node.info)) for info in node.workers()]
        if not node.is_static:
            return [WorkerState(info.name, info.id) for info in node.workers()]
        names = {one.rank: one.name for one in node.membership.members} | {one.id: one.name for one in node.workers()}
        return [WorkerState(name, rank, self._why_gone(rank)) for rank, name in sorted(names.items())]

    def _why_gone(self, rank: int) -> str:
        peer = self._node.links.peers.remotes.get(rank)
        if peer is None:
            return "" if rank == self._node.info.id else "it is not connected yet"
        if not peer.broken:
            return ""
        return "it has left" if peer.leaving else str(peer.link.broken)

    def _on_told(self, peer: RemotePeer, told: Told) -> None:
        self._end(told.number, told.data)

    # ------------------------------------------------------------------ questions of this node

    def ask(self, peer: Peer, subject: str, argument: bytes, bound_s: float, done: Callable[[bytes], None]) -> None:
        """Ask ``peer``; ``done`` gets the answer, empty if none comes within ``bound_s``. On the I/O thread."""
        if isinstance(peer, LoopbackPeer):
            self.answer(peer, subject, argument, done)
            return
        now = monotonic()
        if peer.broken or self._silent_until.get(peer.number, 0.0) > now or not isinstance(peer, RemotePeer):
            done(b"")
            return
        number = self._send(_Question(peer, now + bound_s, done), peer, subject, argument)
        # Check after the entry in the table: if the node ends now, this line or `_give_up_all` ends the question.
        if not self._node.running and self._open.pop(number, None) is not None:
            done(b"")

    def _send(
        self, question: _Question, peer: RemotePeer, subject: str, argument: bytes, *, proves: bool = False
    ) -> int:
        number = next(self._numbers)
        self._open[number] = question
        ask = Ask(number, subject, argument)
        peer.control(ask.proved(self._key(), peer.incarnation) if proves else ask)
        self._timer.at(question.deadline)
        return number

    def _end(self, number: int, data: bytes) -> None:
        question = self._open.pop(number, None)
        if question is not None:
            question.done(data)
            if question.own:
                self._node.something_ended()

    def explain(self, call: PendingCall, done: Callable[[str], None]) -> None:
        """Ask the callee about ``call``, which has timed out; ``done`` gets the explanation. From any thread."""

        peer, bound_s = call.peer, explaining_s(call.timeout_s)

        def begin() -> None:
            one = _Unexplained(call.call_id, bound_s, monotonic() + bound_s, done)
            if peer.number in self._unexplained:
                self._unexplained[peer.number].append(one)
            else:
                self._unexplained[peer.number] = [one]
                self._ask_about_calls(peer)

        if not self._node.running:
            done("")  # the I/O thread may have ended
        elif self._node.on_io_thread():
            begin()  # at once: this may be the thread's last round, which a queued callback would miss
        else:
            self._node.call_soon(begin)

    def _ask_about_calls(self, peer: Peer) -> None:
        """On the I/O thread: ask about the calls to ``peer`` that wait for their explanation, if any still do."""
        now = monotonic()
        asked: list[_Unexplained] = []
        while self._unexplained[peer.number] and not asked:
            waiting = self._unexplained[peer.number]
            self._unexplained[peer.number] = waiting[MOST_EXPLAINED:]
            for one in waiting[:MOST_EXPLAINED]:
                if one.deadline > now:
                    asked.append(one)
                else:
                    one.done("")
        if not asked:
            del self._unexplained[peer.number]
            return
        argument = msgspec.msgpack.encode([one.call_id for one in asked])
        bound_s = max(one.deadline for one in asked) - now
        self.ask(peer, CALL_STATE, argument, bound_s, lambda data: self._on_explained(peer, asked, data))

    def _on_explained(self, peer: Peer, asked: list[_Unexplained], data: bytes) -> None:
        """On the I/O thread: ``peer`` has answered, or is silent."""
        states: list[Any] = []
        why = self._node.links.peers.why_unreached(peer) if not data and isinstance(peer, RemotePeer) else ""
        if not data:
            asked, self._unexplained[peer.number] = asked + self._unexplained[peer.number], []
            states = [b""] * len(asked)
        else:
            try:
                states = _decode_states(data)
            except (msgspec.DecodeError, ValueError):
                pass
        for one, state in itertools.zip_longest(asked, states[: len(asked)]):
            one.done(why or ("" if state is None else explanation(peer.info.name, bytes(state), one.bound_s)))
        self._ask_about_calls(peer)

    # ------------------------------------------------------------------ bounds

    def _give_up_overdue(self, now: float) -> float:
        for number, question in self._open.copy().items():
            if question.deadline <= now:
                if question.own:
                    self._silent_until[question.peer.number] = now + SILENT_S
                    self._end(number, b"")
                else:
                    self._open.pop(number, None)  # the observer has given up long ago
        return min((question.deadline for question in list(self._open.values())), default=NEVER)

    def _give_up_all(self) -> None:
        """Release errors that wait for an explanation: the node ends."""
        for number in list(self._open):
            question = self._open.pop(number, None)
            if question is not None and question.own:
                question.done(b"")


def _collect(node: Runtime) -> msgspec.Struct:
    from farcall.observe.metrics import collect  # imports every layer: loaded at the first question

    return collect(node)


# ---------------------------------------------------------------------- a call that has timed out


def explaining_s(timeout_s: float) -> float:
    """How long an explanation may delay an error: not long, if the call's own timeout was short."""
    return min(LONGEST_EXPLAINING_S, max(SHORTEST_EXPLAINING_S, timeout_s / 4))


def describe_calls(node: Runtime, peer: Peer | None, argument: bytes) -> bytes:
    """At the callee: the states of the calls of ``peer`` with these numbers."""
    pool = pool_view(node)
    return msgspec.msgpack.encode(
        [_describe_call(node, pool, peer, number) for number in _decode_numbers(argument)[:MOST_EXPLAINED]]
    )


def _describe_call(node: Runtime, pool: PoolView, peer: Peer | None, call_id: int) -> CallState:
    request = None if peer is None else node.server.find(peer, call_id)
    if request is None:
        waiting = [] if peer is None else queued_calls(node)
        found = [one for one in waiting if one.call_id == call_id and peer and one.caller == peer.info.name]
        return CallState(found[0] if found else None, pool, worker_state=node.state)
    served = served_call(request)
    thread, at, waits_for = "", None, None
    if served.thread_id:
        for view in view_threads({served.thread_id}):
            thread, at = view.name, view.stack[0] if view.stack else None
        for call in node.calls.snapshot():
            if call.thread_id == served.thread_id:
                waits_for = outgoing_call(call)
    return CallState(served, pool, thread, at, waits_for, node.state)


def explanation(worker: str, data: bytes, asked_s: float) -> str:
    """At the caller: the text that is added to the error."""
    if not data:
        return (
            f"{worker} did not say within {asked_s:.2g} s what it does with it: its process may be stopped, or busy in "
            "native code, or the network may be slow"
        )
    try:
        state = _decode_state(data)
    except (msgspec.DecodeError, ValueError):
        return ""
    served = state.served
    if served is None:
        return f"{worker} does not have it: either it never arrived there, or its answer is on the way"
    pool = state.pool
    if served.state == QUEUED and state.worker_state == STARTING:
        return (
            f"it has been waiting there for {served.for_s:.2f} s: {worker} is still starting, and serves calls when it "
            "is connected to everybody (`farcall stacks` says who is missing)"
        )
    if served.behind is not None:
        holder = served.behind
        text = f"it has waited on {worker} for its turn for {served.for_s:.2f} s, as its object is serial: "
        if not holder.function:
            return text + "the object is being made, or serves a batch"
        text += f"{holder.function}() for {holder.caller} has "
        text += f"{'waited for a thread' if holder.state == QUEUED else 'run'} for {holder.for_s:.2f} s"
        return text + (f", and {served.waiting} calls wait for their turns" if served.waiting > 1 else "")
    if served.state == QUEUED and pool.busy - pool.parked < pool.size:
        free, is_what = pool.size - pool.busy + pool.parked, f": {worker} is {state.worker_state}"
        return (
            f"it has been waiting on {worker} for {served.for_s:.2f} s, though {free} threads are free there{is_what}"
        )
    if served.state == QUEUED:
        return (
            f"it has been waiting on {worker} for a thread for {served.for_s:.2f} s (num_worker_threads). "
            f"Functions on the {pool.size} threads there: {pool.busy - pool.parked}; calls that wait: {pool.queued}"
        )
    if served.state == LATER:
        return (
            f"on {worker} the function has returned a future or coroutine, which is not done after {served.for_s:.2f} s"
        )
    text = f"{worker} has been running it for {served.for_s:.2f} s, on thread {state.thread}"
    if state.at is not None:
        text += f", now at {state.at.file}:{state.at.line} in {state.at.function}"
    if state.waits_for is not None:
        call = state.waits_for
        text += f", where it has waited {call.for_s:.2f} s for {call.to} to answer {call.title}()"
    return text + " (`farcall stacks` shows all workers; options(timeout=...) gives a call more time)"
