"""The callee's side of a call: a request runs a user function, and the outcome becomes an answer.

Every error in serving a request (unknown function, arguments that cannot be deserialized, a result that cannot be
sent) becomes a failure answer: the caller gets the error, and both processes carry on.

A plain value is sent at once; a future's value by the thread that completes the future; a coroutine's result when the
coroutine ends on the node's event loop (`results.py`, `coroutines.py`).

Over 400 lines: a call at its callee, from its frame to its answer, passes through this one file.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from sys import audit
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from farcall.core.contract import CoreError
from farcall.errors import NotAllowed, RpcError, SerializationError
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.frames import FAILURE, RESPONSE, Frame
from farcall.protocol.notes import KEEP, REFUSED, STREAM, Notes, write_notes
from farcall.runtime.calls.coroutines import Concluded, CoroutineRunner
from farcall.runtime.calls.executor import Executor, FunctionTask, Task
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.results import (
    ASYNC_MARK,
    LATER,
    Entrusted,
    Later,
    MarkedResult,
    Resumption,
    StoredFailure,
    answers_later,
)
from farcall.runtime.calls.scope import CURRENT, NOTHING, Dependents
from farcall.runtime.devices.streams import StreamCoroutine, StreamPool, StreamTask
from farcall.runtime.io.timers import NEVER
from farcall.runtime.observing import event_log
from farcall.runtime.observing.counters import BOUNDS_S, FAILED, counters_of, name_of
from farcall.runtime.observing.profiling import PROFILING, RunProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import (
    RECORDING,
    decline,
    decode_function,
    discard,
    encode_failure,
    has_devices,
    in_one_line,
    read_value,
    withdraw,
    write_value,
)
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.functions import BY_VALUE

if TYPE_CHECKING:
    from farcall.runtime.calls.arriving_code import ArrivingCode
    from farcall.serialize.units import LoadedUnit

logger: logging.Logger = logging.getLogger("farcall")

SPECIAL = KEEP | STREAM


class ReferenceKeeper(Protocol):
    """The references of a node, as the handling of messages needs them: `rpc/references.py`."""

    def defers(self, peer: Peer, number: int, notes: Notes, defer: Callable[[], None]) -> bool:
        """Must the message ``number`` wait, for word of an owner or behind another one? Then ``defer`` it."""

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        """Turn the forks in the notes of ``frame`` into references; False: do not handle the frame.

        A request with the flag REFUSED will not run, and creates no reference.
        """

    def take_turns(self, peer: Peer, frame: Frame, ref: RefId) -> None:
        """Find the mailbox of the object ``ref``, for the request ``frame``."""

    def kept_request(self, server: Server, peer: Peer, frame: Frame) -> Request:
        """Make the request of a frame with the flag KEEP: this node keeps its result."""


class NoReferences:
    """The `ReferenceKeeper` of a node without references."""

    def defers(self, peer: Peer, number: int, notes: Notes, defer: Callable[[], None]) -> bool:
        return False

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        return True

    def take_turns(self, peer: Peer, frame: Frame, ref: RefId) -> None:
        pass

    def kept_request(self, server: Server, peer: Peer, frame: Frame) -> Request:
        return Request(server, peer, frame)


class Server:
    """The requests that one node serves: accepts them, has their functions run, and sends the answers."""

    code: ArrivingCode | None = None
    """The code by value of callers; made at the first call of such a function."""

    def __init__(
        self,
        worker: WorkerInfo,
        executor: Executor,
        on_thread_start: Callable[[], None] = lambda: None,
        *,
        log: event_log.EventLog,
        nested: CallTable | None = None,
    ) -> None:
        """``nested``: the table of the calls that served functions make, which are cancelled with their function.

        None: a function that has begun is never cancelled.
        """
        # Mutable, from any thread: ``unanswered`` and ``_computing``, in single atomic operations; the ``_corked``
        # fields, the batch of held-back answers. What the layer above sets does not change afterwards.
        self.worker = worker
        self._nested = nested
        self._executor = executor
        self.unanswered: dict[tuple[int, int], Request] = {}
        self.event_log: event_log.EventLog = log
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with every error that goes to a caller, on the thread that raised it. Set by the layer above."""
        self.stream_pool: StreamPool | None = None
        """The CUDA streams that functions run on; None in a node without devices."""
        self.devices: Sequence[torch.device] = ()
        self.coroutines: CoroutineRunner = CoroutineRunner(worker.name, on_thread_start)
        self._next_number = itertools.count(1).__next__
        self.last_accepted: int = 0
        self.on_answered: Callable[[], None] | None = None
        """Called after each answer; set once the node is leaving."""
        self.references: ReferenceKeeper = NoReferences()
        """The references of the node; the layer above sets them once, before the first message arrives."""
        self.stream_request: Callable[[Server, Peer, Frame], Request] = Request
        """Makes the request of a frame with the flag STREAM; set once by the layer above, like ``references``."""
        self.wrap: Callable[[Request], Task] | None = None
        """Makes the task that runs in the place of a request; None: the request itself. Set by the layer above."""

    @property
    def active(self) -> list[Request]:
        """The requests that have arrived and are not answered yet."""
        return list(self.unanswered.values())

    def find(self, peer: Peer, call_id: int) -> Request | None:
        """The request ``call_id`` of ``peer``; None if it is answered, or unknown."""
        return self.unanswered.get((peer.number, call_id))

    @property
    def awaited(self) -> int:
        """How many unanswered requests a shutdown waits for: all but deferred ones whose caller gave up or is gone.

        A function may have returned a future that never completes: it must not hold up a shutdown for ever.
        """
        return sum(not (request.deferred and (request.cancelled or request.peer.broken)) for request in self.active)

    def accept(self, peer: Peer, frame: Frame) -> Task | None:
        """Take a request. Returns the task that the calling worker is to run now; None: it runs later."""
        if frame.flags & SPECIAL:
            make = self.references.kept_request if frame.flags & KEEP else self.stream_request
            request = make(self, peer, frame)
        else:
            request = Request(self, peer, frame)
        self.unanswered[peer.number, frame.call_id] = request
        self.last_accepted = self._next_number()  # after the line above, see CallTable.register
        if frame.function[:1] == BY_VALUE and not (self.code or self._make_code()).is_here(request):
            return None
        request.queued_at = perf_counter()
        if frame.turns is None and self.wrap is None and self.stream_pool is None:
            return request  # the usual case
        return self._task_of(request)

    def accept_again(self, request: Request) -> None:
        """The code that an accepted request waited for has come."""
        task = self._task_of(request)
        if task is not None:
            self.run_later(task)

    def run_later(self, task: Task) -> None:
        """What `accept` returned was not accepted by the worker that is to run it."""
        self._executor.submit(task)

    def _task_of(self, request: Request) -> Task | None:
        task: Task = request if self.wrap is None else self.wrap(request)
        turns = request.frame.turns
        request.queued_at = perf_counter()
        if turns is not None:
            if not turns.enter(task):
                return None  # the mailbox submits itself when the turn of this request comes
            task = turns
        return task if self.stream_pool is None else StreamTask(task, self.stream_pool)

    def _make_code(self) -> ArrivingCode:
        from farcall.runtime.calls.arriving_code import ArrivingCode  # programs whose functions have names need none

        made: ArrivingCode = vars(self).setdefault("code", ArrivingCode(self))  # one step: several links may be read
        return made

    def submit(self, task: Task) -> None:
        """Queue ``task`` for a worker; in a node with devices it runs on its own streams."""
        self._executor.submit(task if self.stream_pool is None else StreamTask(task, self.stream_pool))

    def cancel(self, peer: Peer, call_id: int) -> None:
        """The caller no longer waits: drop the request if it is still queued, cancel its function if that runs."""
        request = self.unanswered.get((peer.number, call_id))
        if request is not None:
            self._cancel(request)

    def cancel_all(self, peer: Peer | None = None) -> None:
        """Cancel the requests of ``peer``, which is gone, or all (None): this node ends."""
        for request in self.active:
            if (peer is None or request.peer is peer) and request.cancellable:
                self._cancel(request)
        if self.code is not None:
            self.code.forget(peer)

    def _cancel(self, request: Request) -> None:
        if self._nested is None:
            request.cancelled = True
            request.stop_writing()
        else:
            for call in Dependents.cancel(request):
                self._nested.cancel(call)
        if self.on_answered is not None:
            self.on_answered()  # `awaited` may just have become 0, and a shutdown waits for that

    def on_starved(self) -> None:
        """On the I/O thread: requests wait, and no worker takes them."""
        self._executor.on_starved()

    def ended(self, request: Request) -> None:
        """``request`` gets no answer."""
        try:
            self._executor.core.finished(request.peer.back, request.frame.call_id)
        except CoreError:
            pass  # the node ends
        self.answered(request)

    def answered(self, request: Request) -> None:
        """Forget ``request``, which has been answered or dropped."""
        self.unanswered.pop((request.peer.number, request.frame.call_id), None)
        if self.on_answered is not None:
            self.on_answered()


class Request:
    """One request, from its arrival to its answer. A task of the executor."""

    __slots__ = (
        "cancelled",
        "deferred",
        "dependents",
        "frame",
        "function_name",
        "peer",
        "profile",
        "queued_at",
        "server",
        "started_at",
        "thread_id",
    )

    cancellable = True
    is_ordered = False
    """Must its answer not pass what was sent before it?"""

    def __init__(self, server: Server, peer: Peer, frame: Frame) -> None:
        self.profile: RunProfile | None = None
        self.server: Server = server
        self.peer: Peer = peer
        self.frame: Frame = frame
        self.cancelled: bool = False
        self.deferred: bool = False  # the function has returned, and the answer comes later
        self.function_name: str = ""
        self.queued_at: float = 0.0  # 0.0: it was never queued for a worker
        self.started_at: float = 0.0
        self.thread_id: int = 0
        self.dependents: Dependents | None = None

    def stop_writing(self) -> None:
        """The caller is gone or gave up, and the function runs on: send no more items of a stream."""

    def progress(self) -> str:
        """Its progress in words, shown behind its name; empty if there is nothing to report."""
        return ""

    # The `Served` and `Scope` of scope.py: what the function's own calls inherit.

    @property
    def served(self) -> Request:
        return self

    @property
    def is_open(self) -> bool:
        """Is it still unanswered?"""
        return self.server.find(self.peer, self.frame.call_id) is self

    @property
    def caller(self) -> WorkerInfo:
        return self.peer.info

    @property
    def deadline(self) -> float:
        return NEVER if self.frame.scope is None else self.frame.scope[0]

    @property
    def metadata(self) -> Mapping[str, str]:
        return NOTHING if self.frame.scope is None else self.frame.scope[1]

    def watch(self, on_cancel: Callable[[], None]) -> None:
        Dependents.watch(self, lambda: self.server.submit(FunctionTask(on_cancel)))

    def run(self, more: bool) -> None:
        """Run the function and answer; never raises. ``more``: other requests wait behind this one."""
        server = self.server
        if self.cancelled:
            self.drop()
            return
        frame = self.frame
        function = frame.function
        recording = frame.recording
        outside = None if recording is None else recording.enter()
        if frame.profile is not None or PROFILING.everywhere:
            self.profile = PROFILING.begin_run(server.worker, frame.profile)
        self.thread_id = threading.get_ident()
        outer = CURRENT.set(self)
        started = self.started_at = perf_counter()
        entrusted: Entrusted | None = None
        failure: Frame | None = None
        try:
            if frame.code is not None:
                func, args, kwargs = self._read_by_value(frame.code)
            elif function:
                try:
                    func = decode_function(function)
                except BaseException:
                    # Nobody will read the arguments: a backward pass must not wait for their gradients.
                    decline(frame, self.peer)
                    discard(frame.payload, self.peer)
                    raise
                args, kwargs = read_value(frame, self.peer) if frame.payload else ((), None)
            else:
                func, args, kwargs = read_value(frame, self.peer)
                if INSTALLED.allowance is not None:
                    raise NotAllowed(f"{func!r} was sent by value, and this worker serves named functions only")
            if server.stream_pool is not None and has_devices(frame.payload):
                started = perf_counter()  # do not count the copies to the device as the function's time
            self.function_name = getattr(func, "__qualname__", "") or name_of(func)
            audit("farcall.call", self.peer.info.name, func)
            # Drop the request's own references: an argument that the function drops must be freed at once.
            frame.payload = b""
            frame.buffers = frame.forks = ()
            # In a list, which `answer` empties: a result without another owner is handed over without a copy.
            if self.profile is not None:
                outcome = [self.profile.run(func, args, kwargs)]
            else:
                outcome = [func(*args, **kwargs) if kwargs else func(*args)]
            args = kwargs = None
            # `answers_later`, inlined: every request passes here.
            if (
                outcome[0].__class__ in LATER
                or hasattr(func, ASYNC_MARK)
                or (func.__class__ is partial and answers_later(func, outcome[0]))
            ):
                entrusted = self._answer_later(func, outcome[0])
        except BaseException as error:
            failure = self._wanted_failure(error)
            if failure is None:
                return
            args = kwargs = None  # which the traceback holds, too: their memory is released ahead of the answer
        finally:
            took_s = perf_counter() - started
            try:
                counters = self.peer.served[function]
            except KeyError:
                counters = counters_of(self.peer.served, function, self.function_name)
            counters[bisect_right(BOUNDS_S, took_s)] += 1
            if recording is not None:
                RECORDING.set(outside)
            CURRENT.reset(outer)
        if failure is not None:
            self._send(failure, False)
            return
        if self.deferred:
            if entrusted is not None:
                self.entrust(entrusted)  # after the timing above: it may run other functions, with times of their own
            return
        self.answer(outcome)

    def _read_by_value(self, code: LoadedUnit | Exception) -> tuple[Callable[..., Any], Any, Any]:
        """Read a call of a function by value."""
        frame = self.frame
        if isinstance(code, Exception):
            decline(frame, self.peer)
            discard(frame.payload, self.peer)
            raise copy.copy(code) from code.__cause__  # each call raises its own
        read: Any = read_value(frame, self.peer) if frame.payload else ((), None)
        if code.function is not None:
            args, kwargs = read
            return code.function, args, kwargs
        values, args, kwargs = read
        return code.make(values), args, kwargs

    def entrust(self, entrusted: Entrusted) -> None:
        """Hand the request over to ``entrusted``, which answers it; answer with the error if that raises."""
        try:
            entrusted.take(self)
        except BaseException as error:
            self.fail(error)

    def drop(self) -> None:
        """End the request without a run and without an answer: the node ends, or the caller gave up."""
        discard(self.frame.payload, self.peer)
        decline(self.frame, self.peer)
        self.server.ended(self)

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Send the only item of ``outcome`` to the caller; the list is empty afterwards.

        ``more``: other answers or a flush follow at once, so a small answer may wait for them.
        """
        if self.cancelled:
            self.server.ended(self)  # the caller no longer waits
            return
        frame = Frame(RESPONSE, recording=self.frame.recording)
        try:
            write_value(frame, outcome[0], self.peer)
        except BaseException as error:  # a value's own reduction may raise anything: CancelledError, SystemExit
            self.fail(error)
            return
        outcome.clear()
        self._send(frame, more)

    def fail(self, error: BaseException) -> None:
        """Answer with ``error``."""
        failure = self._wanted_failure(error)
        if failure is not None:
            self._send(failure, False)

    def _wanted_failure(self, error: BaseException) -> Frame | None:
        """The answer of a request that ends with ``error``; None if nobody waits for it any more."""
        if self.cancelled:
            self.server.ended(self)
            return None
        return self.failure(error)

    def failure(self, error: BaseException) -> Frame:
        """Encode ``error`` for the caller; count it and log it here."""
        if type(error) is StoredFailure:
            stored = error.frame
            frame = Frame(FAILURE, stored.flags & REFUSED, payload=stored.payload, buffers=stored.buffers)
        else:
            if isinstance(error, SerializationError) and not hasattr(error, "remote_traceback"):
                # Raised by farcall here, not received from elsewhere: say on which side of the call it happened.
                error.args = (f"on {self.server.worker.name}, serving {self.function_name or 'a call'}: {error}",)
            counters_of(self.peer.served, self.frame.function, self.function_name)[FAILED] += 1
            if self.server.on_failure is not None:
                self.server.on_failure(error)
            frame = encode_failure(error, self.server.worker, self.peer)
            self.server.event_log.note(
                event_log.FAILED, self.peer.info.name, self.function_name or "a call", in_one_line(error)
            )
        return frame

    def _send(self, frame: Frame, more: bool) -> None:
        frame.call_id = self.frame.call_id
        profiled = b"" if self.profile is None else self.profile.finish(self.function_name)
        if not frame.message_id:
            frame.recording = (
                None  # an answer is part of the caller's autograd context only if gradients may come back for it
            )
        if frame.forks or profiled or frame.message_id:
            write_notes(frame, profiled=profiled)
        frame.marked = self.is_ordered
        try:
            self.peer.send(frame, more=more)
        except RpcError as error:
            withdraw(frame)
            logger.info("the answer of %s to %s was not sent: %s", self.function_name, self.peer.info.name, error)
        except BaseException as error:
            # No memory for a copy of the result, say. The link is fine, so the caller must not wait for an answer.
            withdraw(frame)
            if frame.kind == FAILURE or frame.handed_over:
                raise
            self._send(self.failure(error), False)
        finally:
            self.server.answered(self)

    def _answer_later(self, func: Callable[..., Any], result: Any) -> Entrusted | None:
        """Arrange the answer that ``result`` stands for.

        An `Entrusted` is returned: the caller hands the request over to it once the function's time is measured.
        """
        self.deferred = True
        if result.__class__ is Entrusted:
            return result
        if result.__class__ is Later:
            finish = result.finish
            result.subscribe(lambda: self.server.submit(Resumption(self, finish)))
            return None
        if result.__class__ is MarkedResult:
            result = result.value
        if inspect.iscoroutine(result):
            self._run_coroutine(result if self.profile is None else self.profile.steps(result))
        elif isinstance(result, torch._C.Future):  # what collect_all returns is not a torch.futures.Future
            result.add_done_callback(self._on_done)
        else:
            raise RuntimeError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                f"{self.function_name} returned {type(result).__name__} (the decorator is functions.async_execution)"
            )
        return None

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run ``coroutine`` on the node's event loop, on this call's streams, and answer when it ends."""
        stream_pool = self.server.stream_pool
        done: Callable[[Any], None] = self._on_done
        if self.frame.turns is not None:
            # Encoded in the turn of its last step: the next call may change the object's tensors.
            coroutine = concluded = Concluded(coroutine, done)
            done = concluded.on_task
        call_streams = None if stream_pool is None else stream_pool.keep()
        if call_streams is not None:
            coroutine = StreamCoroutine(coroutine, call_streams)
        if self.frame.turns is not None:
            coroutine = self.frame.turns.steps(coroutine, within=True)
        if stream_pool is None or call_streams is None:
            Dependents.watch(self, self.server.coroutines.run(coroutine, done))
            return

        def answer(finished: Any) -> None:
            try:
                with call_streams:
                    done(finished)
            finally:
                stream_pool.leave(call_streams)

        try:
            cancel = self.server.coroutines.run(coroutine, answer)
        except BaseException:
            stream_pool.leave(call_streams)
            raise
        Dependents.watch(self, cancel)

    def _on_done(self, future: Any) -> None:
        try:
            value = future.value() if isinstance(future, torch._C.Future) else future.result()
        except BaseException as error:
            self.fail(error)
            return
        self.answer([value])


def asking_peer() -> Peer:
    """The member whose request the calling function serves."""
    scope = CURRENT.get()
    assert scope is not None
    assert isinstance(scope.served, Request)
    return scope.served.peer
