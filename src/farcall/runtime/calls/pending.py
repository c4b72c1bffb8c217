"""The caller's side of a call: the table of calls that wait for an answer, and their deadlines.

Knows nothing of functions, arguments or results: `rpc/call.py` makes the requests and reads the answers.

Thread rules
- A thread claims a pending call by popping it from the table: the reader of its answer, the I/O thread at its deadline,
  the caller that gives up, or the thread that sees its link end. Popping is atomic, so exactly one thread completes the
  call; a late answer finds no call and is dropped.
- All calls share one timer, set to the nearest deadline: a row of calls with the same timeout does not touch it. Their
  deadlines are in a heap, to which any thread adds; only the I/O thread takes from it, calls that have ended included.
- A peer may have reported that its queue is full. A thread that calls it then waits for room before it sends
  (`admission.py`), unless calls are to be refused instead. The call is not in the table yet, but counts as under way.
- A thread about to wait first gives up the reader role (`stop_reading`) and, if it runs a user function, stops counting
  as a busy worker (`Executor.park`); then it reads the link itself if no other thread does.

Over 400 lines: a call at its caller, from its request to its end, passes through this one file.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from threading import get_ident
from time import monotonic
from typing import Any

from farcall.errors import Cancelled, Delivery, NetworkError, RpcError, RpcTimeout
from farcall.protocol.frames import Frame
from farcall.protocol.notes import REFUSABLE, Inherited, write_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.scope import CURRENT, Served, inherit
from farcall.runtime.io.reader import in_event_loop, is_interrupted, reading, stop_reading
from farcall.runtime.io.sigint import SLICE_S, Gate
from farcall.runtime.io.timers import NEVER, Callback, Timer
from farcall.runtime.observing import event_log
from farcall.runtime.observing.counters import LOST, TIMED_OUT, Counters, counters_of, name_of
from farcall.runtime.observing.observer_connection import Questions
from farcall.runtime.observing.profiling import CallProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import tie, withdraw

FEWEST_DEADLINES = 1024
"""The heap of deadlines is made anew, without calls that have ended, when it has this many more than twice the rest."""
EXPLAIN_S = 0.5
"""The longest delay of an error for the sake of its explanation."""


class PendingCall:
    """One call whose answer has not arrived yet; subclasses deliver its outcome.

    The thread that claimed the call sets ``arrived`` before it hands out the outcome.
    """

    arrived: bool
    cancellable = True
    """May the callee drop or cancel it once the caller no longer waits?"""
    peer: Peer
    what: Callable[..., Any]
    started_at: float
    deadline: float
    timeout_s: float
    call_id: int
    profile: CallProfile | None = None
    counters: Counters
    """The counters of its outcome; set when it is sent."""
    thread_id: int = 0
    """The thread that waits for it; 0 if unknown."""
    parent: Served | None = None
    """The request whose function made it; None if it is not cancelled with one."""
    unwanted: bool = False
    """Was it cancelled, or is it overdue? The callee is told so; again if the request was still being sent."""

    def progress(self) -> str:
        """Its progress in words, shown behind its name; empty if there is nothing to report."""
        return ""

    def waited_s(self, now: float) -> float:
        """How long its caller has waited for what comes next."""
        return now - self.started_at

    def on_answer(self, frame: Frame) -> None:
        """The answer arrived."""
        raise NotImplementedError

    def on_failure(self, error: RpcError) -> None:
        """No answer will arrive."""
        raise NotImplementedError


class SyncCall(PendingCall):
    """A call whose caller sleeps on ``lock`` until the call ends: the claiming thread releases it, once."""

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
    """A context around a wait: the calling thread is neither a reader nor a busy worker inside it."""

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
    """The calls of one node that wait for an answer, by id."""

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
        """``on_given_up`` is called, on any thread, when a call has ended without an answer: perhaps the last one.

        ``default_timeout_s``: the timeout of calls that name none. None: calls inherit nothing from their scope.
        """
        # Mutable, from any thread: ``pending`` and ``_held``, in single atomic operations; ``last_id``; ``_ended``.
        self._inherits = default_timeout_s is not None
        self._default_s = default_timeout_s or 0.0
        self._deadlines = timer(self.fail_overdue)
        self._due: list[tuple[float, int]] = []  # a heap of deadlines and ids; of calls that have ended, too
        self._most_due = FEWEST_DEADLINES
        self._on_given_up = on_given_up
        self._executor = executor
        self._flags = REFUSABLE if when_overloaded == "fail" else 0
        self._ended: RpcError | None = None
        self._held: dict[int, PendingCall] = {}  # unsent calls that wait for room at their callee, by id()
        self.pending: dict[int, PendingCall] = {}
        """The calls by id, for the one who claims them at their answer."""
        self._next_id = itertools.count(1).__next__
        self.last_id: int = 0
        self._log = event_log.EventLog() if log is None else log
        self.questions: Questions | None = None
        """Asks callees to explain timeouts; set once, while the node starts."""

    def __len__(self) -> int:
        return len(self.pending) + len(self._held)

    def register(self, call: PendingCall, function: bytes = b"") -> int:
        """Give ``call`` its id and counters and put it into the table."""
        try:
            call.counters = call.peer.called[function]
        except KeyError:
            call.counters = counters_of(call.peer.called, function, name_of(call.what))
        call.call_id = call_id = self._next_id()
        self.pending[call_id] = call
        # After the line above. A shutdown that finds the table empty and ``last_id`` unchanged has missed no call.
        self.last_id = call_id
        return call_id

    def claim(self, call_id: int) -> PendingCall | None:
        """Take a call out of the table: the calling thread must complete it. None: another thread does, or did."""
        return self.pending.pop(call_id, None)

    def answered(self, frame: Frame) -> PendingCall | None:
        """`claim` the call that ``frame`` answers."""
        return self.pending.pop(frame.call_id, None)

    def find(self, call_id: int) -> PendingCall | None:
        """The call ``call_id``, if it still waits for its answer."""
        return self.pending.get(call_id)

    def fail_overdue(self, now: float) -> float:
        """On the I/O thread: fail the calls whose deadline has passed; returns the next deadline."""
        nearest = NEVER
        overdue = []
        if len(self._due) > self._most_due:
            self._forget_ended()
        due = self._due
        while due:
            entry = heappop(due)
            call = self.pending.get(entry[1])
            if call is not None and entry[0] > now:
                heappush(due, entry)
                nearest = entry[0]
                break
            if call is not None:
                overdue.append(call)
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

    def _forget_ended(self) -> None:
        """On the I/O thread: make the heap anew, of the calls that still wait.

        Take a new heap first. A thread that pushes onto the old one entered its call into the table before it looked.
        """
        due = self._due = []
        for call in list(self.pending.values()):
            if call.deadline != NEVER:
                heappush(due, (call.deadline, call.call_id))
        self._most_due = 2 * len(due) + FEWEST_DEADLINES

    def cancel(self, call: PendingCall) -> bool:
        """End ``call``, here and at its callee; False: it has ended already, or may not be cancelled."""
        if not call.cancellable or self.claim(call.call_id) is None:
            full = call.peer.full
            if full is not None and id(call) in self._held:
                full.look_again()  # its thread waits for room, and finds that the call is not wanted
            return False
        call.unwanted = True
        call.on_failure(Cancelled(f"{name_of(call.what)}() on {call.peer.info.name} was cancelled"))
        call.peer.cancel(call.call_id)  # after on_failure: no other thread ends a claimed call if this raises
        self._on_given_up()
        return True

    def waiting(self) -> Waiting:
        """A context for every wait for a call: see `Waiting`."""
        return Waiting(self._executor)

    def exchange(self, call: SyncCall, frame: Frame, refusable: bool = True) -> Frame:
        """Send ``frame``, the request of ``call``, and wait for its answer; raises if none arrives in time.

        ``refusable``: an overloaded callee may refuse it, if the node's options say so. The side effects of encoding
        the arguments, above all forks of references, are sent with the frame or withdrawn.
        """
        peer = call.peer
        if reading.interrupted is not None and is_interrupted():
            self.send(call, frame)  # the destructor's effect is wanted, and nobody can wait for an answer here
            stop_reading()  # raises
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
                # Again: control messages overtake large requests, so the first cancellation may have found no request.
                peer.cancel(call.call_id)
            if not call.arrived:
                if call.parent is not None and call.parent.cancelled:
                    self.cancel(call)  # the parent was cancelled before this call was in the table
                if peer.broken:
                    self._fail_lost(call)
                overdue = False
                # In slices, as `Gate` does: the main thread notices a signal that came just before its sleep only then.
                while not call.lock.acquire(
                    True, SLICE_S if overdue else max(0.0, min(SLICE_S, call.deadline - monotonic()))
                ):
                    if not overdue and monotonic() >= call.deadline:
                        if self.claim(call.call_id) is not None:
                            raise self._explained(call)
                        overdue = True  # another thread has just claimed the call, and is about to release the lock
        except BaseException:
            # Not sent, overdue, or interrupted: stop waiting for the answer. Pop first, and without a Python function,
            # since a second Ctrl-C may arrive inside one.
            self.pending.pop(call.call_id, None)
            self._on_given_up()
            if call.call_id:
                peer.cancel(call.call_id)
            withdraw(frame)
            raise
        finally:
            if parked and worker is not None:
                self._executor.unpark(worker)
            if profile is not None:
                profile.ended()  # does nothing if an answer has ended it
        if call.error is not None:
            failure, call.error = call.error, None
            try:
                raise failure
            finally:
                del failure  # break the cycle of traceback, stack frame and error, which would keep the arguments alive
        assert call.answer is not None
        return call.answer

    def send(self, call: PendingCall, frame: Frame, created: Fork | None = None, origin: str = "") -> None:
        """Send ``frame``, the request of ``call``, without waiting for the outcome.

        If this raises, the call is not in the table. ``created``: the callee keeps the result as the value of that
        fork's reference, which the program creates at ``origin``.
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
            if call.deadline != NEVER:
                heappush(self._due, (call.deadline, call_id))
            if frame.undo:
                tie(frame)
            call.peer.send(frame, call.deadline)
            if call.unwanted:
                call.peer.cancel(call_id)  # again, as in `exchange`: the first one may have overtaken the request
            if call.parent is not None and call.parent.cancelled:
                self.cancel(call)  # the parent was cancelled before this call was in the table
            if call.peer.broken:
                self._fail_lost(call)
            if call.deadline < self._deadlines.due:
                self._deadlines.at(call.deadline)  # `exchange` needs no timer: its caller watches the clock
            elif len(self._due) > self._most_due:
                self._deadlines.at(call.started_at)  # now: to forget those that have ended
        except BaseException as error:
            claimed = self.pending.pop(call_id, None)
            withdraw(frame)
            self._on_given_up()
            if call_id and claimed is None and isinstance(error, NetworkError | RpcTimeout):
                return  # another thread claimed the call, at its deadline or its link's end, and reports the failure
            raise

    def _wait_for_room(self, call: PendingCall) -> None:
        """The callee has reported a full queue: wait until it reports room. Raises at the call's deadline."""
        if self._flags or in_event_loop():
            return  # the callee is to refuse the call instead; or a wait here would block a whole event loop
        full = call.peer.full
        try:
            self._held[id(call)] = call
            with self.waiting():
                while full is not None and not call.peer.broken:
                    if not full.wait(call.deadline, call):
                        raise RpcTimeout(
                            f"RPC ran for more than set timeout ({int(call.timeout_s * 1000)} ms): "
                            f"{name_of(call.what)}() was not sent to {call.peer.info.name}, which is overloaded: "
                            f"{full.queued} calls were waiting there for a thread, and its "
                            f"max_queued_calls is {full.limit}",
                            Delivery.NOT_SENT,
                        )
                    if call.parent is not None and call.parent.cancelled:
                        raise Cancelled(
                            f"the call that {call.parent.function_name}() serves was cancelled", Delivery.NOT_SENT
                        )
                    full = call.peer.full
            if self._ended is not None:
                raise copy.copy(self._ended)
            if call.peer.broken:
                raise call.peer.lost(Delivery.NOT_SENT)
        finally:
            self._held.pop(id(call), None)
            self._on_given_up()

    def _fail_lost(self, call: PendingCall) -> None:
        """Fail ``call``: its link is broken, perhaps since before `fail_all` could find the call in the table."""
        if self.claim(call.call_id) is not None:
            call.counters[LOST] += 1
            call.on_failure(call.peer.lost(Delivery.UNKNOWN))

    def timed_out(self, call: PendingCall) -> RpcTimeout:
        """Count and log a call whose deadline has passed; returns its error."""
        call.counters[TIMED_OUT] += 1
        self._log.note(event_log.TIMED_OUT, call.peer.info.name, name_of(call.what), f"after {call.timeout_s:g} s")
        return RpcTimeout(
            f"RPC ran for more than set timeout ({int(call.timeout_s * 1000)} ms): "
            f"{call.peer.info.name} has not answered {name_of(call.what)}()"
        )

    def _explained(self, call: SyncCall) -> RpcTimeout:
        """`timed_out`, with what the callee does now: the calling thread, not the I/O thread, waits for that report."""
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
        """The node ends: fail every call. A caller that waits for room fails when its wait ends."""
        self._ended = why
        self.fail_all(lambda call: copy.copy(why))  # each thread raises its own: a traceback belongs to one of them

    def fail_all(self, error: Callable[[PendingCall], RpcError], peer: Peer | None = None) -> int:
        """Fail every call to ``peer`` (None: to any peer); returns how many."""
        failed = 0
        for call in list(self.pending.values()):
            if (peer is None or call.peer is peer) and self.claim(call.call_id) is not None:
                failed += 1
                call.counters[LOST] += 1
                call.on_failure(error(call))
        return failed

    def snapshot(self) -> list[PendingCall]:
        """The calls that wait for an answer now, oldest first."""
        return list(self.pending.values())


def _add(error: RpcTimeout, text: str) -> None:
    if text:
        error.args = (f"{error}; {text}",)


def _fail_explained(call: PendingCall, error: RpcTimeout, text: str) -> None:
    _add(error, text)
    call.on_failure(error)
