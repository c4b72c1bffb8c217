"""`Retry`: repeats calls that the network failed, for functions that may run twice.

farcall runs a request at most once. Links repair a broken connection, invisibly to calls (`runtime/link`). Three
failures remain: a large message that was in transit when a connection broke, a dead peer, and a peer that refuses
calls because its queue is full (`runtime/calls/admission.py`). A program that knows that a function may run twice says
so with ``retry=``, call by call; all other calls get the error.

    what is known of the failed call         tried again
    not sent, or refused: it did not run     yes
    unknown                                  yes
    executed: its answer was lost, or it     if ``executed`` is True
    failed with a NetworkError of its own

Each attempt resolves the destination and encodes the arguments anew. All attempts share the call's timeout.

Over 400 lines: synchronous calls, futures and creations are tried again by the same few rules.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import SystemRandom
from time import monotonic
from typing import Any

from farcall.errors import Cancelled, Delivery, NetworkError, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Frame
from farcall.protocol.notes import KEEP
from farcall.rpc.call import call_sync, encode_request, send
from farcall.rpc.future import Future
from farcall.rpc.owner_calls import Creation
from farcall.rpc.references import NodeReferences
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import name_of
from farcall.runtime.observing.profiling import PROFILING, CallProfile, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import RECORDING, withdraw

_RANDOM = SystemRandom()  # not the global generator: jitter must not disturb a program's seeded sequence


@dataclass(frozen=True)
class Retry:
    """How often, and when, to call again a function that may run more than once.

    Args:
        attempts: the number of calls, the first included.
        backoff_s: the pause before the second attempt.
        factor: each further pause is this many times as long as the one before.
        longest_backoff_s: the upper bound of a pause.
        jitter: the largest fraction by which chance shortens a pause, so that many callers do not return at once.
        executed: call again even if the function ran and its answer was lost.
    """

    attempts: int = 3
    backoff_s: float = 0.1
    factor: float = 2.0
    longest_backoff_s: float = 5.0
    jitter: float = 0.5
    executed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ValueError(f"attempts must be a whole number, at least 1, not {self.attempts!r}")
        if not (self.backoff_s >= 0 and self.longest_backoff_s >= 0 and self.factor >= 1):
            raise ValueError(
                "backoff_s and longest_backoff_s must not be negative, and factor must be at least 1, not "
                f"{self.backoff_s!r}, {self.longest_backoff_s!r} and {self.factor!r}"
            )
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be from 0 to 1, not {self.jitter!r}")

    def pause_s(self, attempt: int, error: BaseException, deadline: float) -> float | None:
        """Return how long to wait after the ``attempt``-th call failed with ``error``; None: do not call again."""
        if attempt >= self.attempts or not isinstance(error, NetworkError):
            return None
        # The function itself raised an error with a remote traceback: its delivery is that of a call inside.
        delivery = Delivery.EXECUTED if hasattr(error, "remote_traceback") else error.delivery
        if delivery is Delivery.EXECUTED and not self.executed:
            return None
        longest = min(self.longest_backoff_s, self.backoff_s * self.factor ** (attempt - 1))
        pause = longest * (1.0 - self.jitter * _RANDOM.random())
        return pause if monotonic() + pause < deadline else None


Destination = str | int | WorkerInfo
Function = Callable[..., Any]
Arguments = Sequence[Any] | None
Keywords = Mapping[str, Any] | None


def sync_with(
    retry: Retry,
    node: Runtime,
    to: Destination,
    func: Function,
    args: Arguments,
    kwargs: Keywords,
    timeout_s: float | None,
) -> Any:
    """`call_sync`, with retries."""
    check_retry(retry)
    limit_s, deadline = _bounds(node, timeout_s)
    for attempt in itertools.count(1):
        try:
            left_s = max(1e-3, deadline - monotonic()) if limit_s else timeout_s
            return call_sync(node, to, func, args, kwargs, left_s)
        except NetworkError as error:
            pause_s = retry.pause_s(attempt, error, deadline)
            if pause_s is None:
                raise
            failure = error
        with node.calls.waiting():
            Gate().wait(pause_s)
        if monotonic() >= deadline:
            raise failure  # the pause overran on a busy machine: this error says more than a timeout
    raise AssertionError("unreachable")


class _Surroundings:
    """The autograd context and the scope of the first attempt; later attempts enter them and inherit the same."""

    def __init__(self) -> None:
        self._recording = RECORDING.get()
        self._scope = CURRENT.get()

    @contextmanager
    def entered(self) -> Iterator[None]:
        # Saved in locals, not in fields: another thread may still be inside, with an earlier attempt.
        outside = None if self._recording is None else self._recording.enter()
        outer = CURRENT.set(self._scope)
        try:
            yield
        finally:
            CURRENT.reset(outer)
            if self._recording is not None:
                RECORDING.set(outside)


class RetryingFuture(Future[Any]):
    """A future that repeats its call when the network fails it. Its mutable fields describe the last attempt."""

    peer: Peer
    profile: CallProfile | None = None
    started_at: float

    def __init__(
        self,
        retry: Retry,
        node: Runtime,
        to: Destination,
        func: Function,
        args: Arguments,
        kwargs: Keywords,
        timeout: float,
    ) -> None:
        super().__init__(node, node.peer(to), func, timeout)
        self._retry = retry
        self._to = to
        self._attempt = 0
        self._request = (func, args, kwargs)
        self._surroundings = _Surroundings()
        # During a pause, the error of the last attempt. The thread that pops it decides what follows: retry or cancel.
        self._paused: list[BaseException] = []
        # Cleared by `cancel`, before it looks for the attempt or the pause to end. A thread between the two looks at
        # this after it has entered the next one, so one of the two sees the other.
        self._is_wanted = True

    def send(self) -> None:
        """Make the call; a network error fails this future, or leads to another attempt."""
        self._attempt += 1
        peer = self.peer = self._node.peer(self._to)
        self.profile = None
        if is_profiled() or PROFILING.everywhere:
            self.profile = PROFILING.begin_call(self._node, peer, "async", self._request[0], None)
        frame = encode_request(peer, *self._request)
        self.arrived = self.in_core = False
        self.started_at = monotonic()  # metrics count and time each attempt by itself
        send(self._node.calls, self, frame)

    def fail(self, error: BaseException) -> None:
        """Become done with an error, unless another attempt follows."""
        pause_s = self._retry.pause_s(self._attempt, error, self.deadline) if self._node.running else None
        if pause_s is not None:
            self._paused.append(error)
            if self._is_wanted:
                self._node.part(Pauses).after(pause_s, self._again, self._give_up)
                return
            if self._leave_pause() is None:
                return  # `cancel` found the pause, and ends this future
        self._request = (self.what, None, None)
        super().fail(error)

    def cancel(self) -> bool:
        """Cancel the call and all further attempts; see `Future.cancel`. False also if an attempt is just ending."""
        self._is_wanted = False
        if super().cancel():
            return True
        if self._leave_pause() is None:
            return False
        self._request = (self.what, None, None)
        self._end(Cancelled(f"{name_of(self.what)}() was cancelled before it was called again", Delivery.UNKNOWN))
        return True

    def _leave_pause(self) -> BaseException | None:
        try:
            return self._paused.pop()  # atomic
        except IndexError:
            return None

    def _give_up(self, error: BaseException) -> None:
        if self._leave_pause() is not None:
            super().fail(error)

    def _again(self) -> None:
        failure = self._leave_pause()
        if failure is None:
            return  # cancelled during the pause
        if monotonic() >= self.deadline:
            super().fail(failure)  # the pause overran on a busy machine: this error says more than a timeout
            return
        try:
            with self._surroundings.entered():
                self.send()
        except BaseException as error:
            super().fail(error)
        else:
            if not self._is_wanted:
                super().cancel()


def async_with(
    retry: Retry,
    node: Runtime,
    to: Destination,
    func: Function,
    args: Arguments,
    kwargs: Keywords,
    timeout_s: float | None,
) -> Future[Any]:
    """`call_async`, with retries. Errors in the arguments are raised here."""
    check_retry(retry)
    future = RetryingFuture(retry, node, to, func, args, kwargs, _bounds(node, timeout_s)[0])
    future.send()
    return future


class RetryingCreation(Creation):
    """A creating call that is repeated while its owner lives and did not get it. It creates the reference once."""

    __slots__ = ("_attempt", "_gates", "_request", "_retry", "_surroundings")

    started_at: float  # of the last attempt

    def __init__(self, retry: Retry, request: tuple[Function, Arguments, Keywords], *creation: Any) -> None:
        super().__init__(*creation)
        self._retry = retry
        self._request = request
        self._attempt = 1
        self._gates: list[Gate] = []
        self._surroundings = _Surroundings()

    def attach(self, call: PendingCall, frame: Frame) -> None:
        """Wait until the owner has answered: a use that overtook the second attempt would find no value."""
        try:
            if not self.arrived:
                self._wait_for_owner(call)
        except BaseException:
            withdraw(frame)
            raise
        super().attach(call, frame)

    def _wait_for_owner(self, call: PendingCall) -> None:
        done = Gate()
        self._gates.append(done)
        if not self.arrived:
            with self._references.node.calls.waiting():
                in_time = done.wait(-1 if call.deadline == NEVER else max(0.0, call.deadline - monotonic()))
            if not in_time:
                raise RpcTimeout(
                    f"{call.peer.info.name} did not create the value that the call is for within {call.timeout_s:g} s",
                    Delivery.NOT_SENT,
                )

    def on_answer(self, frame: Frame) -> None:
        super().on_answer(frame)
        if self.arrived:  # otherwise the owner refused the call, and another attempt follows
            self._open_gates()

    def _open_gates(self) -> None:
        for gate in self._gates:
            gate.open()

    def _give_up(self, error: RpcError) -> None:
        super().on_failure(error)
        self._open_gates()

    def on_failure(self, error: RpcError) -> None:
        if self.profile is not None:
            self.profile.ended()  # the profile covers the first attempt only
        pause_s = self._retry.pause_s(self._attempt, error, self.deadline)
        node = self._references.node
        if pause_s is None or self.peer.broken or not node.running:
            self._give_up(error)
        else:
            node.part(Pauses).after(pause_s, self._again, self._give_up)

    def _again(self) -> None:
        self._attempt += 1
        node = self._references.node
        try:
            with self._surroundings.entered():
                self.profile: CallProfile | None = None
                frame = encode_request(self.peer, *self._request)
                frame.flags = KEEP
                self.started_at = monotonic()
                node.calls.send(self, frame, self.fork)
        except BaseException as error:
            if not isinstance(error, RpcError):
                error = RpcError(f"cannot send the call to {self.peer.info.name} again: {error}")
            self.on_failure(error)


def remote_with(
    retry: Retry,
    node: Runtime,
    to: Destination,
    func: Function,
    args: Arguments,
    kwargs: Keywords,
    timeout_s: float | None,
    *,
    serial: bool = False,
) -> RRef[Any]:
    """`call_remote`, with retries. Uses of the reference wait until its owner has answered."""
    check_retry(retry)
    peer = node.peer(to)
    timeout_s = _bounds(node, timeout_s)[0]
    request = (func, args, kwargs)
    return node.part(NodeReferences).create(
        peer,
        func,
        encode_request(peer, *request),
        timeout_s,
        make=lambda *creation: RetryingCreation(retry, request, *creation),
        serial=serial,
    )


def check_retry(retry: object) -> None:
    """Raise if ``retry`` is not a `Retry`."""
    if not isinstance(retry, Retry):
        raise TypeError(f"retry must be a farcall.Retry, not {type(retry).__name__}")


def _bounds(node: Runtime, timeout_s: float | None) -> tuple[float, float]:
    timeout_s = node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    return timeout_s, monotonic() + timeout_s if timeout_s else NEVER


class Pauses:
    """Delayed functions of one node: the I/O thread hands each to a worker when its time comes."""

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None], Callable[[RpcError], None]]] = []
        self._lock = threading.Lock()
        self._has_ended = False
        node.hooks.unsettled.append(lambda: len(self._waiting))
        node.hooks.ended.append(self._end)
        self._timer = node.timer(self._submit_due)

    def after(self, pause_s: float, act: Callable[[], None], give_up: Callable[[RpcError], None]) -> None:
        """Have a worker call ``act`` in ``pause_s``, or ``give_up`` if the node ends first. From any thread."""
        when = monotonic() + pause_s
        with self._lock:
            if not self._has_ended:
                heapq.heappush(self._waiting, (when, next(self._order), act, give_up))
                self._timer.at(when)
                return
        give_up(_ended())

    def _submit_due(self, now: float) -> float:
        while True:
            with self._lock:
                if not self._waiting or self._waiting[0][0] > now:
                    return self._waiting[0][0] if self._waiting else NEVER
                _, _, act, give_up = self._waiting[0]
                self._node.executor.submit(FunctionTask(act, partial(give_up, _ended())))
                heapq.heappop(self._waiting)  # after submit: a shutdown must find it in the executor or in the heap

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, []
        for _, _, _, give_up in waiting:
            give_up(_ended())


def _ended() -> Cancelled:
    return Cancelled("the node shut down before the call was made again")
