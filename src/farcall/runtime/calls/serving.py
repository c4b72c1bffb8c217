"""The callee's side: a request becomes a user function's run, and its outcome an answer.

Whatever goes wrong with a request (no such function, arguments that cannot be rebuilt, a result that
cannot be sent) becomes a failure answer: the caller learns of it and both sides live on.

A request whose function is expected to be quick, or brief and alone, is run by the I/O thread itself (`run_inline.py`),
all others by workers. Answers of quick functions that run one after the other travel together, HOLD_S at most.

A plain value is answered at once; a future when it completes, by the thread that completes it; a coroutine when it has
ended on the node's event loop (`results.py`, `coroutines.py`).

Over 400 lines: a call at its callee, from its frame to its answer, passes through this one file.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from sys import audit
from time import perf_counter, process_time, thread_time
from typing import Any, Protocol

import torch

from farcall.errors import NotAllowed, RpcError, SerializationError
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.frames import FAILURE, LARGE_BYTES, RESPONSE, Frame
from farcall.protocol.notes import KEEP, STREAM, Notes
from farcall.runtime.calls.coroutines import CoroutineRunner
from farcall.runtime.calls.executor import UNKNOWN_S, Executor, FunctionTask, Task
from farcall.runtime.calls.notes import write_notes
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.results import (
    ASYNC_MARK,
    COMPLETING,
    LATER,
    Later,
    MarkedResult,
    Resumption,
    StoredFailure,
    answers_later,
)
from farcall.runtime.calls.run_inline import QUICK_S, InlineFunctions
from farcall.runtime.calls.scope import CURRENT, NOTHING, Dependents
from farcall.runtime.devices.streams import StreamCoroutine, StreamPool, StreamTask
from farcall.runtime.io.timers import NEVER
from farcall.runtime.observing import event_log
from farcall.runtime.observing.counters import BOUNDS_S, FAILED, counters_of
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

logger: logging.Logger = logging.getLogger("farcall")

HOLD_S = 200e-6
HOLD_BYTES = 64 * 1024
"""Answers that travel together wait no longer than this for each other, and are not larger."""


SPECIAL = KEEP | STREAM


class ReferenceKeeper(Protocol):
    """The references of a node, as seen by the messages that carry some: `rpc/references.py`."""

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        """Turn the forks in the notes of ``frame`` into references; False: the frame must not be read, or not now.

        A request with the flag REFUSED will not run, and creates nothing.
        """

    def take_turns(self, peer: Peer, frame: Frame, ref: RefId) -> bool:
        """Find the mailbox of the object ``ref``, for the request ``frame``; False: the request must wait."""

    def kept_request(self, server: Server, peer: Peer, frame: Frame) -> Request:
        """The request of a frame with the flag KEEP, whose result stays here."""


class NoReferences:
    """The `ReferenceKeeper` of a node without references."""

    def take_forks(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        return True

    def take_turns(self, peer: Peer, frame: Frame, ref: RefId) -> bool:
        return True

    def kept_request(self, server: Server, peer: Peer, frame: Frame) -> Request:
        return Request(server, peer, frame)


class Server:
    """Runs requests and answers them."""

    def __init__(
        self,
        worker: WorkerInfo,
        executor: Executor,
        on_thread_start: Callable[[], None] = lambda: None,
        *,
        log: event_log.EventLog,
        nested: CallTable | None = None,
    ) -> None:
        """``nested``: the calls that functions make, which end with them. None: what has begun is not cancelled."""
        self.worker = worker
        self._nested = nested
        self._executor = executor
        self.inline: InlineFunctions = InlineFunctions()
        self.unanswered: dict[tuple[int, int], Request] = {}
        self.event_log: event_log.EventLog = log
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told, where it was raised, of every error that goes to a caller. Set by the layer above."""
        self._queue = executor.tasks
        self._computing: set[Request] = set()  # those inside their functions
        self._corked: set[Peer] = set()
        self._corked_at: float = 0.0
        self._corked_bytes: int = 0
        self.stream_pool: StreamPool | None = None
        """The streams that functions run on, in a node with devices."""
        self.devices: Sequence[torch.device] = ()
        self.coroutines: CoroutineRunner = CoroutineRunner(worker.name, on_thread_start)
        self._next_number = itertools.count(1).__next__
        self.last_accepted: int = 0
        self.on_answered: Callable[[], None] | None = None
        """Called after each answer; set once the node is leaving."""
        self.references: ReferenceKeeper = NoReferences()
        """The references of the node; the layer above sets them once, before the first message comes."""
        self.stream_request: Callable[[Server, Peer, Frame], Request] = Request
        """Makes the request of a frame with the flag STREAM; set once by the layer above, like ``references``."""
        self.wrap: Callable[[Request], Task] | None = None
        """Makes what is run for a request, where that is not the request itself; set by the layer above."""

    @property
    def active(self) -> list[Request]:
        """Requests that have come and are not answered yet."""
        return list(self.unanswered.values())

    def find(self, peer: Peer, call_id: int) -> Request | None:
        """The request of that number, if it is not answered yet."""
        return self.unanswered.get((peer.number, call_id))

    @property
    def awaited(self) -> int:
        """How many requests are unanswered, less those that have no thread and nobody who waits for their answer.

        A function that returned a future which never completes must not hold up a shutdown after its caller gave up.
        """
        return sum(not (request.deferred and (request.cancelled or request.peer.broken)) for request in self.active)

    def accept(self, peer: Peer, frame: Frame) -> None:
        """Take a request: run it at once if it is expected to be quick and we may, else queue it for a worker."""
        if frame.flags & SPECIAL:
            make = self.references.kept_request if frame.flags & KEEP else self.stream_request
            request = make(self, peer, frame)
        else:
            request = Request(self, peer, frame)
        self.unanswered[peer.number, frame.call_id] = request
        self.last_accepted = self._next_number()  # after the line above, see CallTable.register
        function = frame.function
        task: Task = request if self.wrap is None else self.wrap(request)
        if frame.turns is not None:
            request.queued_at = perf_counter()
            if not frame.turns.enter(task):
                return
            task = frame.turns
        at_once = function in self.inline.quick or self._best_in_turn(function)
        if at_once or (function in self.inline.brief and not self._computing and not self._queue):
            kept = peer.run_inline(task if self.stream_pool is None else StreamTask(task, self.stream_pool), at_once)
            if kept is not None:
                if not kept:
                    self.inline.ban(function)
                    # This thread lost the reader role. Its successor may be asleep, so flush here.
                    self.flush()
                return
        request.queued_at = perf_counter()
        self.submit(task)

    def _best_in_turn(self, function: bytes) -> bool:
        """Is ``function`` one of those that were seen to be in each other's way on workers?"""
        inline = self.inline
        return function in inline.brief and self._executor.at_peace and function not in inline.sleepers

    def submit(self, task: Task) -> None:
        """Have a worker run ``task``; in a node with devices, on streams of its own."""
        self._executor.submit(task if self.stream_pool is None else StreamTask(task, self.stream_pool))

    def cancel(self, peer: Peer, call_id: int) -> None:
        """The caller no longer waits: do not begin what has not begun, cancel what has."""
        request = self.unanswered.get((peer.number, call_id))
        if request is not None:
            self._cancel(request)

    def cancel_all(self, peer: Peer | None = None) -> None:
        """``peer`` is gone, or (None) this node ends: nobody waits for the answers."""
        for request in self.active:
            if (peer is None or request.peer is peer) and request.cancellable:
                self._cancel(request)

    def _cancel(self, request: Request) -> None:
        if self._nested is None:
            request.cancelled = True
            request.stop_writing()
        else:
            for call in Dependents.cancel(request):
                self._nested.cancel(call)
        if self.on_answered is not None:
            self.on_answered()  # a shutdown may be waiting for nothing else

    def hold_back(self, peer: Peer, size_bytes: int, now: float) -> None:
        """An answer of so many bytes to ``peer`` is in the outbox; send it soon, with others."""
        if not self._corked:
            self._corked_at, self._corked_bytes = now, 0
        self._corked_bytes += size_bytes
        self._corked.add(peer)
        if self._corked_bytes >= HOLD_BYTES or now - self._corked_at > HOLD_S:
            self.flush()

    def flush(self) -> bool:
        """Send the answers that were held back to travel together."""
        while self._corked:
            try:
                peer = self._corked.pop()
            except KeyError:
                break
            peer.flush()
        return False

    def answered(self, request: Request) -> None:
        """Book-keeping at the end of a request."""
        self.unanswered.pop((request.peer.number, request.frame.call_id), None)
        if self.on_answered is not None:
            self.on_answered()


class Request:
    """One request, from its arrival to its answer. A task of the executor."""

    __slots__ = (
        "cancelled",
        "deferred",
        "dependents",
        "expected_s",
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

    def __init__(self, server: Server, peer: Peer, frame: Frame) -> None:
        self.profile: RunProfile | None = None
        self.server: Server = server
        self.peer: Peer = peer
        self.frame: Frame = frame
        self.expected_s: float = server.inline.expected_s.get(frame.function, UNKNOWN_S)
        """How long its function is expected to take; once it has run, the next time."""
        self.cancelled: bool = False
        self.deferred: bool = False  # it returned, and will answer later
        self.function_name: str = ""
        self.queued_at: float = 0.0  # if a worker was to run it
        self.started_at: float = 0.0
        self.thread_id: int = 0
        self.dependents: Dependents | None = None

    def stop_writing(self) -> None:
        """Its caller is gone or has lost interest, and its function is not cancelled; nobody reads what it sends."""

    def progress(self) -> str:
        """How far it is, in words behind its name; empty where there is nothing to tell."""
        return ""

    # What its function's own calls inherit, see scope.py.

    @property
    def served(self) -> Request:
        return self

    @property
    def is_open(self) -> bool:
        """Is it still to be answered?"""
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
        # The two clocks cost a system call each: not for a quick function that is alone.
        all_before_s = process_time() if server._computing else -1.0
        own_before_s = thread_time() if all_before_s >= 0 or self.expected_s >= QUICK_S else -1.0
        server._computing.add(self)
        started = self.started_at = perf_counter()
        if self.expected_s >= QUICK_S:
            server.flush()  # this function may take long: answers that were held back go first
        try:
            if function:
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
                started = perf_counter()  # the copies that a device makes say nothing about the function
            self.function_name = getattr(func, "__qualname__", "") or repr(func)
            audit("farcall.call", self.peer.info.name, func)
            # The request keeps no memory: an argument that the function drops is freed at once.
            frame.payload = b""
            frame.buffers = frame.forks = ()
            # In a list, which `answer` empties: a result that nobody else holds can be handed over without a copy.
            if self.profile is not None:
                outcome = [self.profile.run(func, args, kwargs)]
            else:
                outcome = [func(*args, **kwargs) if kwargs else func(*args)]
            del args, kwargs
            # `answers_later`, without the calls: this is on the way of every request.
            if (
                outcome[0].__class__ in LATER
                or hasattr(func, ASYNC_MARK)
                or (func.__class__ is partial and answers_later(func, outcome[0]))
            ):
                self._answer_later(func, outcome[0])
                return
        except BaseException as error:
            self._fail(error)
            return
        finally:
            took_s = perf_counter() - started
            server._computing.discard(self)
            try:
                counters = self.peer.served[function]
            except KeyError:
                counters = counters_of(self.peer.served, function)
            counters[bisect_right(BOUNDS_S, took_s)] += 1
            if function:
                self.expected_s = server.inline.ran(
                    function,
                    took_s,
                    thread_time() - own_before_s if own_before_s >= 0 else -1.0,
                    process_time() - all_before_s if all_before_s >= 0 else -1.0,
                )
            if recording is not None:
                RECORDING.set(outside)
            CURRENT.reset(outer)
        # Behind a function that may take long no answer is held back.
        self.answer(outcome, more and self.expected_s < QUICK_S)

    def drop(self) -> None:
        """The node ended first, or nobody waits for the answer any more."""
        discard(self.frame.payload, self.peer)
        decline(self.frame, self.peer)
        self.server.answered(self)

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Send the only item of ``outcome`` to the caller; the list is empty afterwards.

        ``more``: other answers follow at once, or somebody flushes: a small one may wait for them.
        """
        if self.cancelled:
            self.server.answered(self)  # nobody waits for it
            return
        frame = Frame(RESPONSE, recording=self.frame.recording)
        try:
            write_value(frame, outcome[0], self.peer)
        except Exception as error:
            self._fail(error)
            return
        outcome.clear()
        if more:
            size_bytes = len(frame.payload)
            for buffer in frame.buffers:
                if buffer.nbytes < LARGE_BYTES:  # others travel beside the frame, or at once
                    size_bytes += buffer.nbytes
            if size_bytes < HOLD_BYTES:
                self._send(frame, True)
                # After it is in the outbox: a flush by another thread in between would take the mark and find nothing.
                self.server.hold_back(self.peer, size_bytes, perf_counter())
                return
        self._send(frame, False)

    def _fail(self, error: BaseException) -> None:
        if self.cancelled:
            self.server.answered(self)
        else:
            self._send(self.failure(error), False)

    def failure(self, error: BaseException) -> Frame:
        """``error``, written down for the caller; counted and logged here."""
        if type(error) is StoredFailure:
            frame = Frame(FAILURE, payload=error.frame.payload, buffers=error.frame.buffers)
        else:
            if isinstance(error, SerializationError) and not hasattr(error, "remote_traceback"):
                # Ours, about a message, not the user's: the caller must learn whose side it is about.
                error.args = (f"on {self.server.worker.name}, serving {self.function_name or 'a call'}: {error}",)
            counters_of(self.peer.served, self.frame.function)[FAILED] += 1
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
                None  # to its caller an answer belongs to a context only if gradients may come back for it
            )
        if frame.forks or profiled or frame.message_id:
            write_notes(frame, profiled=profiled)
        try:
            self.peer.send(frame, more=more)
        except RpcError as error:
            withdraw(frame)
            logger.info("the answer of %s to %s was not sent: %s", self.function_name, self.peer.info.name, error)
        finally:
            self.server.answered(self)

    def _answer_later(self, func: Callable[..., Any], result: Any) -> None:
        self.deferred = True
        if result.__class__ is Later:
            finish = result.finish
            result.subscribe(lambda: self.server.submit(Resumption(self, finish)))
            return
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

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run ``coroutine`` on the node's event loop, on the streams of this call, and answer when it ends."""
        stream_pool, done = self.server.stream_pool, self._on_done
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

        Dependents.watch(self, self.server.coroutines.run(coroutine, answer))

    def _on_done(self, future: Any) -> None:
        try:
            value = future.value() if isinstance(future, torch._C.Future) else future.result()
        except BaseException as error:
            self._fail(error)
            return
        self.answer([value], getattr(future, COMPLETING, 0) == threading.get_ident())
