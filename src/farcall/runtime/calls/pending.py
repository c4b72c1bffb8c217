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
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from threading import get_ident
from time import monotonic
from typing import Any, TypeAlias

from farcall.core.contract import ENDED, FAILURE, NOT_SENT, OVERDUE, REFUSABLE, RESPONSE, Arrived, Core, CoreError
from farcall.errors import Cancelled, Delivery, NetworkError, RpcError, RpcTimeout
from farcall.protocol.frames import Frame
from farcall.protocol.notes import Inherited, write_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.scope import CURRENT, Served, inherit
from farcall.runtime.io.reader import in_event_loop, is_interrupted, may_wait, reading, stop_reading
from farcall.runtime.io.sigint import Gate, deliver, enter, here, leave, look
from farcall.runtime.io.timers import NEVER, Callback, Timer
from farcall.runtime.observing import event_log
from farcall.runtime.observing.counters import LOST, TIMED_OUT, Counters, counters_of, name_of
from farcall.runtime.observing.observer_connection import Questions
from farcall.runtime.observing.profiling import CallProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decline, discard, tie, withdraw

FEWEST_DEADLINES = 1024
"""The heap of deadlines is made anew, without calls that have ended, when it has this many more than twice the rest."""
EXPLAIN_S = 0.5
"""The longest delay of an error for the sake of its explanation."""


Receive: TypeAlias = "Callable[[Peer, Arrived, PendingCall], Frame | None]"


def _not_yet(peer: Peer, arrived: Arrived, call: PendingCall) -> Frame | None:
    raise AssertionError("the node does not run yet")


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
    is_attached: bool = False
    """Does it use the value of a creation, whose failure ends it?"""
    is_told: bool = False
    """Is a worker to take the answer at once?"""
    in_core: bool = False
    """Does the core know it?"""
    unwanted: bool = False
    """Was it cancelled, or is it overdue? The callee is told so; again if the request was still being sent."""

    def progress(self) -> str:
        """Its progress in words, shown behind its name; empty if there is nothing to report."""
        return ""

    def waited_s(self, now: float) -> float:
        """How long its caller has waited for what comes next."""
        return now - self.started_at

    def on_answer(self, frame: Frame) -> object:
        """The answer arrived. Returns what a thread gets that waits for it in the core."""
        raise NotImplementedError

    def on_failure(self, error: RpcError) -> None:
        """No answer will arrive."""
        raise NotImplementedError


class SyncCall(PendingCall):
    """A call whose caller waits in the core. ``error``: why it ended, if another thread has ended it."""

    __slots__ = (
        "arrived",
        "call_id",
        "counters",
        "deadline",
        "error",
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
        self.error: RpcError | None = None

    def on_answer(self, frame: Frame) -> object:
        self.arrived = True
        return frame  # a worker has taken it: its caller waits in the core, unless it is a destructor's

    def on_failure(self, error: RpcError) -> None:
        self.error = error
        self.arrived = True


class Waiting:
    """A context around a wait: the calling thread is not a busy worker inside it."""

    __slots__ = ("_executor", "_parked")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        stop_reading()
        self._parked = self._executor.park()

    def __exit__(self, *_: object) -> None:
        if self._parked:
            self._executor.unpark()


class CallTable:
    """The calls of one node that wait for an answer, by id."""

    def __init__(
        self,
        core: Core,
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
        self._core = core
        self.receive: Receive = _not_yet
        """Makes of what the core has for a waiting caller the message that came; set once, while the node starts."""
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
        core = self._core
        ended = 0
        answer: Frame | None = None
        try:
            self._prepare(call, frame, refusable)
            head, pieces = peer.encode(frame, call.deadline)
            frame.handed_over = True
            if call.parent is not None and call.parent.cancelled:
                self.cancel(call)  # the parent was cancelled before this call was in the table
            if call.error is not None:
                raise call.error
            guard = here.guard
            if not guard.depth:
                look()
            guard.depth += 1  # Ctrl-C may cut the wait, and not what the answer brings
            try:
                arrived: Any
                if call.parent is None and not call.is_attached:
                    arrived = core.call(peer.way, head, pieces, call.deadline)
                else:  # another thread may end it: it finds the call in the core, or its error is found here
                    try:
                        core.post(peer.way, head, pieces, call.deadline)
                    except CoreError:
                        ended = NOT_SENT
                        raise
                    if call.error is not None:
                        raise call.error
                    arrived = core.wait(call.call_id, call.deadline)
                kind = arrived.kind
                while kind in (RESPONSE, FAILURE):
                    answer = arrived if arrived.__class__ is Frame else self.receive(peer, arrived, call)
                    if answer is not None:
                        self.pending.pop(call.call_id, None)
                        return answer
                    arrived = core.wait(call.call_id, call.deadline)  # it was deferred
                    kind = arrived.kind
            finally:
                guard.depth -= 1
                if guard.held is not None:
                    deliver()
            ended = arrived.flags
            if call.error is not None:
                raise call.error
            if kind == OVERDUE:
                raise self._unread(call) if ended & NOT_SENT else self._explained(call)
            if self._ended is not None:
                raise copy.copy(self._ended)
            call.counters[LOST] += 1
            lost = peer.lost(Delivery.NOT_SENT if ended & NOT_SENT else Delivery.UNKNOWN)
            if not peer.broken:
                ended = 0  # what goes in its place over another connection has its tickets
            raise lost
        except BaseException as error:
            self.pending.pop(call.call_id, None)
            self._on_given_up()
            if call.call_id:
                peer.cancel(call.call_id)
            if ended & NOT_SENT:
                peer.take_back(frame)
            withdraw(frame)
            if answer is not None:  # Ctrl-C was held back while it was taken
                decline(answer, peer)
                discard(answer.payload, peer)
            if isinstance(error, CoreError):  # cancelled from elsewhere, or the node has ended
                raise self._why_over(call, ended) from None
            raise
        finally:
            if profile is not None:
                profile.ended()  # does nothing if an answer has ended it

    def _unread(self, call: PendingCall) -> RpcTimeout:
        """`timed_out`, of a call whose request did not leave in time."""
        error = self.timed_out(call)
        _add(error, f"{call.peer.info.name} did not read all of the request: it is stopped, or too busy")
        error.delivery = Delivery.NOT_SENT
        return error

    def _why_over(self, call: PendingCall, ended: int) -> RpcError:
        if isinstance(call, SyncCall) and call.error is not None:
            failure, call.error = call.error, None
            return failure
        if self._ended is not None:
            return copy.copy(self._ended)
        if call.peer.broken:
            return call.peer.lost(Delivery.NOT_SENT if ended & NOT_SENT else Delivery.UNKNOWN)
        return self._unread(call) if ended & NOT_SENT else Cancelled("the call was cancelled")

    def _prepare(
        self, call: PendingCall, frame: Frame, refusable: bool = True, created: Fork | None = None, origin: str = ""
    ) -> None:
        """Write the notes of a request, enter its call, and give it its number."""
        profile = call.profile
        inherited: Inherited | None = None
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
            frame.marked = bool(created or frame.serial or frame.forks or frame.flags)
        if refusable:
            frame.flags |= self._flags
        frame.call_id = self.register(call, frame.function)
        if frame.undo:
            tie(frame)

    def send(self, call: PendingCall, frame: Frame, created: Fork | None = None, origin: str = "") -> None:
        """Send ``frame``, the request of ``call``, without waiting for the outcome.

        If this raises, the call is not in the table. ``created``: the callee keeps the result as the value of that
        fork's reference, which the program creates at ``origin``.
        """
        call_id = 0
        try:
            frame.marked = bool(frame.flags)
            self._prepare(call, frame, True, created, origin)
            call_id = call.call_id
            if call.deadline != NEVER:
                heappush(self._due, (call.deadline, call_id))
            head, pieces = call.peer.encode(frame, call.deadline)
            frame.handed_over = True
            try:
                self._core.post(call.peer.way, head, pieces, call.deadline, told=call.is_told, patient=may_wait())
            except BaseException:
                call.peer.take_back(frame)
                raise
            call.in_core = True
            if call.unwanted:
                call.peer.cancel(call_id)  # again: the core may not have known the call yet
            if call.is_told:
                self.tell(call)  # it may have been asked for meanwhile
            if call.parent is not None and call.parent.cancelled:
                self.cancel(call)  # the parent was cancelled before this call was in the table
            if call.deadline < self._deadlines.due:
                self._deadlines.at(call.deadline)  # `exchange` needs no timer: its caller watches the clock
            elif len(self._due) > self._most_due:
                self._deadlines.at(call.started_at)  # now: to forget those that have ended
        except BaseException as error:
            claimed = self.pending.pop(call_id, None)
            withdraw(frame)
            self._on_given_up()
            if isinstance(error, CoreError):
                if self._ended is not None:
                    raise copy.copy(self._ended) from None
                if call.peer.broken:
                    raise call.peer.lost(Delivery.NOT_SENT) from None
                raise RpcTimeout(
                    f"{call.peer.info.name} did not read the request in time: it is stopped, or too busy",
                    Delivery.NOT_SENT,
                ) from None
            if call_id and claimed is None and isinstance(error, NetworkError | RpcTimeout):
                return  # another thread claimed the call, at its deadline or its link's end, and reports the failure
            raise

    def wait(self, call: PendingCall, until: float) -> None:
        """Wait for the answer of ``call``, an asynchronous one, until then or its deadline; complete it here.

        Returns early where another thread completes it.
        """
        enter()  # Ctrl-C may cut the wait, and not what the answer brings
        try:
            self._wait(call, until)
        finally:
            leave()

    def _wait(self, call: PendingCall, until: float) -> None:
        core, peer = self._core, call.peer
        while True:
            try:
                arrived = core.wait(call.call_id, min(until, call.deadline))
            except CoreError:
                return  # it is over: another thread has it
            if arrived is None or arrived.kind == OVERDUE:
                return
            if arrived.kind == ENDED:
                if self.claim(call.call_id) is not None:
                    call.counters[LOST] += 1
                    delivery = Delivery.NOT_SENT if arrived.flags & NOT_SENT else Delivery.UNKNOWN
                    call.on_failure(copy.copy(self._ended) if self._ended is not None else peer.lost(delivery))
                return
            frame = self.receive(peer, arrived, call)
            if frame is not None:
                break  # else it was deferred
        if self.answered(frame) is not None:
            call.on_answer(frame)
        else:
            decline(frame, peer)
            discard(frame.payload, peer)

    def look_for_lost(self, peer: Peer) -> None:
        """On the I/O thread: the link to ``peer`` has ended. Fail the calls of which the core tells nobody."""
        for call in list(self.pending.values()):
            if call.peer is peer and call.in_core and not call.is_told:
                self.wait(call, 0.0)

    def tell(self, call: PendingCall) -> None:
        """Somebody is to be told of the answer."""
        if call.in_core:
            try:
                self._core.tell(call.call_id)
            except CoreError:
                pass  # the node has ended

    def on_ended(self, number: int, flags: int) -> None:
        """On the I/O thread: there will be no answer for a call of which somebody is to be told."""
        call = self.claim(number)
        if call is not None:
            call.counters[LOST] += 1
            delivery = Delivery.NOT_SENT if flags & NOT_SENT else Delivery.UNKNOWN
            call.on_failure(copy.copy(self._ended) if self._ended is not None else call.peer.lost(delivery))
            self._on_given_up()
        try:
            self._core.settle(number, None)
        except CoreError:
            pass  # it has stopped

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
                if call.cancellable:
                    call.peer.cancel(call.call_id)
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
