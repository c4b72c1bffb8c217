"""Calls that wait for their answer: the pending table and its deadlines.

Knows nothing of functions, arguments or results: `rpc/call.py` makes the requests and reads the answers.

Thread rules
- A pending call is claimed by whoever pops it from the table: the reader of its answer, the I/O thread at its
  deadline, the caller that gives up, or the end of its link. Popping is atomic, so exactly one of them completes it; a
  late answer finds nothing and is dropped.
- Calls share one timer, set to the nearest deadline: calls with the same timeout do not touch it.
- A thread that calls a peer which has said that its queue is full waits for room before it sends (`admission.py`),
  unless calls are to be refused instead. The call is not in the table yet, but it counts as under way.
- A thread about to wait first stops being a reader (`stop_reading`) and, if it runs a user function, stops counting as
  a busy worker (`Executor.park`); then it reads the link itself if nobody else does.

Over 400 lines: a call at its caller, from its request to its end, passes through this one file.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any

from farcall.errors import Cancelled, Delivery, NetworkError, RpcError, RpcTimeout
from farcall.protocol.frames import Frame
from farcall.protocol.notes import REFUSABLE
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.notes import write_notes
from farcall.runtime.calls.scope import CURRENT, Inherited, Served, inherit
from farcall.runtime.io.reader import in_event_loop, stop_reading
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER, Callback, Timer
from farcall.runtime.observing import event_log
from farcall.runtime.observing.counters import LOST, TIMED_OUT, Counters, counters_of
from farcall.runtime.observing.observer_connection import Questions
from farcall.runtime.observing.profiling import CallProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import tie, withdraw

EXPLAIN_S = 0.5
"""An error is never held up for longer than this to say more."""


class PendingCall:
    """One request whose answer has not come yet; subclasses say what its outcome does.

    ``arrived`` is set, by the thread that claimed the call, before its outcome is handed out.
    """

    arrived: bool
    cancellable = True
    """Need the function not begin once nobody waits for this call any more?"""
    peer: Peer
    what: Callable[..., Any]
    started_at: float
    deadline: float
    timeout_s: float
    call_id: int
    profile: CallProfile | None = None
    counters: Counters
    """Where its end is counted; set when it is sent."""
    thread_id: int = 0
    """The thread that waits for it, as far as that is known."""
    parent: Served | None = None
    """The request whose function made it, if it is cancelled with that."""
    unwanted: bool = False
    """Was it cancelled, or did its time end? Its callee is told; once more if its request was still being sent."""

    def progress(self) -> str:
        """How far it is, in words behind its name; empty where there is nothing to tell."""
        return ""

    def on_answer(self, frame: Frame) -> None:
        """The answer came."""
        raise NotImplementedError

    def on_failure(self, error: RpcError) -> None:
        """No answer will come."""
        raise NotImplementedError


class SyncCall(PendingCall):
    """A call whose caller sleeps on a lock until it is done."""

    __slots__ = (
        "answer",
        "arrived",
        "call_id",
        "counters",
        "deadline",
        "error",
        "lock",
        "peer",
        "started_at",
        "thread_id",
        "timeout_s",
        "what",
    )

    def __init__(self, peer: Peer, what: Callable[..., Any], timeout_s: float) -> None:
        self.peer: Peer = peer
        self.what: Callable[..., Any] = what
        self.timeout_s: float = timeout_s
        now = monotonic()
        self.started_at: float = now
        self.deadline: float = now + timeout_s if timeout_s else NEVER
        self.arrived: bool = False
        self.call_id: int = 0
        self.thread_id: int = get_ident()
        self.answer: Frame | None = None
        self.error: RpcError | None = None
        self.lock: threading.Lock = threading.Lock()
        self.lock.acquire()

    def on_answer(self, frame: Frame) -> None:
        self.answer = frame
        self.arrived = True
        self.lock.release()

    def on_failure(self, error: RpcError) -> None:
        self.error = error
        self.arrived = True
        self.lock.release()


class Waiting:
    """The calling thread waits."""

    __slots__ = ("_executor", "_worker")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        stop_reading()
        worker = self._executor.current_worker()
        self._worker = None if worker is None or worker.parked else worker
        if self._worker is not None:
            self._executor.park(self._worker)

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._executor.unpark(self._worker)


class CallTable:
    """The calls of one node that wait for an answer."""

    def __init__(
        self,
        timer: Callable[[Callback], Timer],
        executor: Executor,
        when_overloaded: str = "wait",
        *,
        on_given_up: Callable[[], None] = lambda: None,
        default_timeout_s: float | None = None,
        log: event_log.EventLog | None = None,
    ) -> None:
        """``on_given_up``, from any thread: a call has ended without an answer, perhaps the last one under way.

        ``default_timeout_s``: a timeout that nobody chose. None: calls inherit nothing.
        """
        self._inherits = default_timeout_s is not None
        self._default_s = default_timeout_s or 0.0
        self._deadlines = timer(self.fail_overdue)
        self._on_given_up = on_given_up
        self._executor = executor
        self._flags = REFUSABLE if when_overloaded == "fail" else 0
        self._ended: RpcError | None = None
        self._held: dict[int, PendingCall] = {}  # those that wait before they are sent, by id()
        self._pending: dict[int, PendingCall] = {}
        self._next_id = itertools.count(1).__next__
        self.last_id: int = 0
        self._log = event_log.EventLog() if log is None else log
        self.questions: Questions | None = None
        """Explains timeouts; given once, while the node starts."""

    def __len__(self) -> int:
        return len(self._pending) + len(self._held)

    def register(self, call: PendingCall, function: bytes = b"") -> int:
        """Give ``call`` its id and put it into the table."""
        try:
            call.counters = call.peer.called[function]
        except KeyError:
            call.counters = counters_of(call.peer.called, function)
        call.call_id = call_id = self._next_id()
        self._pending[call_id] = call
        self.last_id = call_id  # after the line above: whoever sees the old number may believe the table
        return call_id

    def claim(self, call_id: int) -> PendingCall | None:
        """Take a call out of the table; whoever gets it completes it."""
        return self._pending.pop(call_id, None)

    def find(self, call_id: int) -> PendingCall | None:
        """The call of that number, if it still waits for its answer."""
        return self._pending.get(call_id)

    def fail_overdue(self, now: float) -> float:
        """On the I/O thread: fail the calls whose time is up; returns when the next is due."""
        nearest = NEVER
        overdue = []
        for call in list(self._pending.values()):
            if call.deadline <= now:
                overdue.append(call)
            elif call.deadline < nearest:
                nearest = call.deadline
        for call in overdue:
            if self.claim(call.call_id) is not None:
                error = self.timed_out(call)
                if self.questions is None:
                    call.on_failure(error)
                else:
                    self.questions.explain(call, partial(_fail_explained, call, error))
                if call.cancellable:
                    call.unwanted = True
                    call.peer.cancel(call.call_id)
        if overdue:
            self._on_given_up()
        return nearest

    def cancel(self, call: PendingCall) -> bool:
        """End ``call``, here and at its callee; False: it has ended, or must not."""
        if not call.cancellable or self.claim(call.call_id) is None:
            return False
        call.unwanted = True
        call.on_failure(Cancelled(f"{name_of(call.what)}() on {call.peer.info.name} was cancelled"))
        call.peer.cancel(call.call_id)  # last: nobody else ends a claimed call, whatever becomes of this message
        self._on_given_up()
        return True

    def waiting(self) -> Waiting:
        """Around every wait for a call: the thread stops being a reader or a busy worker meanwhile."""
        return Waiting(self._executor)

    def exchange(self, call: SyncCall, frame: Frame, refusable: bool = True) -> Frame:
        """Send ``frame``, the request of ``call``, and wait for its answer; raises where none comes in time.

        ``refusable``: the callee may refuse it if that was chosen for this node's calls. What was noted while the
        arguments were written, forks of references above all, is sent or withdrawn.
        """
        peer = call.peer
        profile = call.profile
        worker = self._executor.current_worker()
        parked = False
        inherited: Inherited | None = None
        try:
            scope = CURRENT.get()
            if (scope is not None or call.timeout_s != self._default_s) and self._inherits:
                inherited = inherit(call, scope, self._default_s)
            if peer.full is not None:
                self._wait_for_room(call)
            stop_reading()
            if worker is not None:
                self._executor.park(worker)
                parked = True
            if (
                inherited
                or profile is not None
                or frame.recording is not None
                or frame.forks
                or frame.telemetry
                or frame.serial
            ):
                wanted = None if profile is None else profile.sends(frame.payload, frame.buffers)
                write_notes(frame, profile=wanted, inherited=inherited)
            frame.flags = self._flags if refusable else 0
            frame.call_id = self.register(call, frame.function)
            if frame.undo:
                tie(frame)
            peer.send(frame, call.deadline, False, call)
            if call.unwanted:
                peer.cancel(call.call_id)  # the first word of that may have passed a large request, and found nothing
            if not call.arrived:
                if call.parent is not None and call.parent.cancelled:
                    self.cancel(call)  # a moment ago, before the call was in the table
                if peer.broken:
                    self._fail_lost(call)
                remaining = call.deadline - monotonic()
                bound = -1 if remaining == NEVER else max(0.0, min(remaining, threading.TIMEOUT_MAX))
                if not call.lock.acquire(True, bound):
                    if self.claim(call.call_id) is not None:
                        raise self._explained(call)
                    call.lock.acquire()  # claimed a moment ago by another thread, which is about to release it
        except BaseException:
            # Not sent, too late, or interrupted: nobody waits for the answer any more. First of all, and without a
            # Python function: another Ctrl-C may come.
            self._pending.pop(call.call_id, None)
            self._on_given_up()
            if call.call_id:
                peer.cancel(call.call_id)
            withdraw(frame)
            raise
        finally:
            if parked and worker is not None:
                self._executor.unpark(worker)
            if profile is not None:
                profile.ended()  # if no answer has done so
        if call.error is not None:
            failure, call.error = call.error, None
            try:
                raise failure
            finally:
                del failure  # or the traceback would hold this frame, the frame the error, and both the arguments
        assert call.answer is not None
        return call.answer

    def send(self, call: PendingCall, frame: Frame, created: Fork | None = None, origin: str = "") -> None:
        """Send ``frame``, the request of ``call``, whose outcome somebody else waits for.

        A failure leaves nothing behind. ``created``: the callee keeps the result as the value of that fork's
        reference, which the program creates at ``origin``.
        """
        profile = call.profile
        call_id = 0
        inherited: Inherited | None = None
        try:
            scope = CURRENT.get()
            if (scope is not None or call.timeout_s != self._default_s) and self._inherits:
                inherited = inherit(call, scope, self._default_s)
            if call.peer.full is not None:
                self._wait_for_room(call)
            if (
                inherited
                or created
                or profile is not None
                or frame.recording is not None
                or frame.forks
                or frame.telemetry
                or frame.serial
            ):
                wanted = None if profile is None else profile.sends(frame.payload, frame.buffers)
                write_notes(frame, created=created, origin=origin, profile=wanted, inherited=inherited)
            frame.flags |= self._flags
            frame.call_id = call_id = self.register(call, frame.function)
            if frame.undo:
                tie(frame)
            call.peer.send(frame, call.deadline)
            if call.unwanted:
                call.peer.cancel(call_id)  # the first word of that may have passed a large request, and found nothing
            if call.parent is not None and call.parent.cancelled:
                self.cancel(call)  # a moment ago, before the call was in the table
            if call.peer.broken:
                self._fail_lost(call)
            if call.deadline < self._deadlines.due:
                self._deadlines.at(call.deadline)  # not needed where the caller itself waits
        except BaseException as error:
            claimed = self._pending.pop(call_id, None)
            withdraw(frame)
            self._on_given_up()
            if call_id and claimed is None and isinstance(error, NetworkError | RpcTimeout):
                return  # its deadline, or the end of the link, claimed it a moment ago and fails it: once is enough
            raise

    def _wait_for_room(self, call: PendingCall) -> None:
        """The callee has said that too many calls wait there: wait with this one until it has room again."""
        if self._flags or in_event_loop():
            return  # it is to be refused instead; or waiting here would hold up all that runs on that loop
        full = call.peer.full
        try:
            self._held[id(call)] = call
            with self.waiting():
                while full is not None and not call.peer.broken:
                    if not full.wait(call.deadline):
                        raise RpcTimeout(
                            f"RPC ran for more than set timeout ({int(call.timeout_s * 1000)} ms): "
                            f"{name_of(call.what)}() was not sent to {call.peer.info.name}, which is overloaded: "
                            f"{full.queued} calls were waiting there for a thread, and its "
                            f"max_queued_calls is {full.limit}",
                            Delivery.NOT_SENT,
                        )
                    full = call.peer.full
            if self._ended is not None:
                raise self._ended
            if call.peer.broken:
                raise call.peer.lost(Delivery.NOT_SENT)
        finally:
            self._held.pop(id(call), None)
            self._on_given_up()

    def _fail_lost(self, call: PendingCall) -> None:
        """The link is broken. If the table was swept before ``call`` was in it, nobody else would end the call."""
        if self.claim(call.call_id) is not None:
            call.counters[LOST] += 1
            call.on_failure(call.peer.lost(Delivery.UNKNOWN))

    def timed_out(self, call: PendingCall) -> RpcTimeout:
        """The error for a call whose deadline has passed."""
        call.counters[TIMED_OUT] += 1
        self._log.note(event_log.TIMED_OUT, call.peer.info.name, name_of(call.what), f"after {call.timeout_s:g} s")
        return RpcTimeout(
            f"RPC ran for more than set timeout ({int(call.timeout_s * 1000)} ms): "
            f"{call.peer.info.name} has not answered {name_of(call.what)}()"
        )

    def _explained(self, call: SyncCall) -> RpcTimeout:
        """The same, with what the callee does; the calling thread, which is not the I/O thread, waits for that."""
        error = self.timed_out(call)
        if self.questions is not None:
            told = Gate()
            texts: list[str] = []

            def take(text: str) -> None:
                texts.append(text)
                told.open()

            self.questions.explain(call, take)
            told.wait(EXPLAIN_S)
            _add(error, "".join(texts))
        return error

    def end(self, why: RpcError) -> None:
        """The node ends: fail every call; who waits for room fails when it is told of some."""
        self._ended = why
        self.fail_all(lambda call: why)

    def fail_all(self, error: Callable[[PendingCall], RpcError], peer: Peer | None = None) -> int:
        """Fail every call to ``peer`` (or to anybody); how many there were."""
        failed = 0
        for call in list(self._pending.values()):
            if (peer is None or call.peer is peer) and self.claim(call.call_id) is not None:
                failed += 1
                call.counters[LOST] += 1
                call.on_failure(error(call))
        return failed

    def snapshot(self) -> list[PendingCall]:
        """The calls waiting now, oldest first."""
        return list(self._pending.values())


def name_of(what: Callable[..., Any]) -> str:
    """What a function is called in messages to users."""
    found = getattr(what, "__qualname__", None)
    name = found if isinstance(found, str) and found else type(what).__name__
    return name.replace("_VariableFunctionsClass.", "torch.")  # the class that ``torch.add`` and others are found in


def _add(error: RpcTimeout, text: str) -> None:
    if text:
        error.args = (f"{error}; {text}",)


def _fail_explained(call: PendingCall, error: RpcTimeout, text: str) -> None:
    _add(error, text)
    call.on_failure(error)
