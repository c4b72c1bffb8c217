"""Calls to the owner of a value, on the side of the reference's holder: creating calls and questions.

Owns how such a call is sent and what its failure means: a dead owner makes the reference lost, and the error of a
failed creation replaces the value. The owner runs the functions of `owned_values.py`; `method_calls.py` makes the
requests for methods of the value. Must not know how references are counted: that is `references.py`.

    a creation   event                    becomes     with
    (none)       sent                     pending
    pending      answered                 done        the fork is confirmed
    pending      its time is up           failed      uses raise RpcTimeout; the owner is asked about the creation
    pending      not sent, peer gone      failed      uses raise ReferenceLost
    pending      refused                  failed      uses raise Overloaded; the owner never had the reference

Everything here may run on any thread of the program; `ask` is the hot path of methods called through references.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from farcall.errors import Cancelled, Delivery, NetworkError, Overloaded, ReferenceLost, RpcError, RpcTimeout
from farcall.protocol.frames import FAILURE, Frame
from farcall.protocol.notes import REFUSED
from farcall.protocol.references.messages import Fork
from farcall.rpc.call import read_answer, refusal, send
from farcall.rpc.future import Future
from farcall.rpc.outcome import DerivedFuture
from farcall.rpc.owned_values import Owned
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import PendingCall, SyncCall
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import name_of
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, withdraw

if TYPE_CHECKING:
    from farcall.rpc.references import NodeReferences
    from farcall.rpc.rref import RRef

_MOST_LOOKS = 100
"""How often a failed creation looks whether the calls that it must fail have been sent by now."""

# One lock for all creations, held for an instant. Re-entrant: a garbage collection under the lock may run user code.
_lock = threading.RLock()


class Creation(PendingCall):
    """A creating call, at its creator. It is in the table of calls until the owner has answered.

    The answer says that the owner has the reference and that the function is done. An error of the function stays at
    the owner, in the place of the value, and surfaces at first use. Mutable: its outcome, once, and ``_waiting`` and
    ``_future``, under the module's lock.
    """

    is_told = True
    cancellable = False  # other members may hold the reference and wait for the value

    __slots__ = (
        "_future",
        "_looks",
        "_references",
        "_waiting",
        "arrived",
        "call_id",
        "deadline",
        "error",
        "fork",
        "keeps",
        "outcome",
        "peer",
        "started_at",
        "timeout_s",
        "what",
    )

    def __init__(
        self,
        references: NodeReferences,
        fork: Fork,
        peer: Peer,
        what: Callable[..., Any],
        timeout_s: float,
        keeps: object,
    ) -> None:
        self._references = references
        self._future: torch.futures.Future[None] | None = None
        self._looks = _MOST_LOOKS
        self._waiting: list[PendingCall] | None = None  # calls that use the value, and fail if this one does
        self.fork: Fork = fork
        self.peer: Peer = peer
        self.what: Callable[..., Any] = what
        self.timeout_s: float = timeout_s
        now = monotonic()
        self.started_at: float = now
        self.deadline: float = now + timeout_s if timeout_s else NEVER
        self.arrived: bool = False
        self.call_id: int = 0
        self.keeps: object = keeps  # a reference that the function needs at the owner; held until the answer comes
        self.error: RpcError | None = None
        """Why the owner may not have the reference."""
        self.outcome: BaseException | None = None
        """The error that the function raised."""

    def on_answer(self, frame: Frame) -> None:
        """The owner has the reference and the function is done; or the owner has refused the call."""
        if frame.kind == FAILURE:
            if frame.flags & REFUSED:
                self.on_failure(refusal(frame, self.peer))
                return
            self.outcome = decode_failure(frame, self.peer)
        self.arrived = True
        self.keeps = None
        self._waiting = None
        self._references.confirm_created(self.fork)
        if self._future is not None:
            self._finish_future()

    def on_failure(self, error: RpcError) -> None:
        """No answer will come."""
        if self.profile is not None:
            self.profile.ended()
        name = self.peer.info.name
        if isinstance(error, RpcTimeout):
            self.error = RpcTimeout(f"the RRef creation on {name} was not confirmed in time: {error}")
            self._references.withdraw_creation(self.fork)
        elif isinstance(error, Overloaded):
            self.error = Overloaded(
                f"the RRef creation was refused: {error}", error.delivery, error.worker, error.queued, error.limit
            )
            self._references.refused_creation(self.fork, error)
        elif isinstance(error, NetworkError):
            self.error = ReferenceLost(f"the RRef creation on {name} failed: {error}", error.delivery)
            if error.delivery is Delivery.NOT_SENT:
                self._references.refused_creation(self.fork, error)
            else:
                self._references.withdraw_creation(self.fork)
        else:
            self.error = error
        self.arrived = True
        self.keeps = None
        self.fail_waiting()
        if self._future is not None:
            self._finish_future()

    def attach(self, call: PendingCall, frame: Frame) -> None:
        """Fail ``call``, which is about to be sent as ``frame``, if this creation fails.

        The request follows the creating call on the same link; without this it would wait for a value that never
        comes. Raises if the creation has failed already: then the frame is not sent.
        """
        try:
            call.is_attached = True
            with _lock:
                if not self.arrived:
                    if self._waiting is None:
                        self._waiting = []
                    self._waiting.append(call)
            if self.error is not None:
                raise copy.copy(self.error)
        except BaseException:
            withdraw(frame)
            raise

    def fail_waiting(self) -> None:
        """Fail the attached calls: the value will not come."""
        assert self.error is not None
        with _lock:
            waiting, self._waiting = self._waiting, None
        unsent = []
        for call in waiting or ():
            if call.call_id == 0:
                # Race: the call is attached, but its thread has not put it into the table of calls yet. Look again
                # in a moment.
                unsent.append(call)
            elif self._references.node.calls.claim(call.call_id) is not None:
                call.on_failure(copy.copy(self.error))
                call.peer.cancel(call.call_id)  # wakes its caller, which waits in the core
        if unsent and self._looks:
            self._looks -= 1
            self._waiting = unsent
            self._references.fail_waiting_soon(self)

    def future(self) -> torch.futures.Future[None]:
        """Return a future that completes when the creating call is done."""
        with _lock:
            future = self._future
            if future is None:
                future = self._future = DerivedFuture(self._references.node)
        if self.arrived:
            self._finish_future()
        return future

    def _finish_future(self) -> None:
        with _lock:
            # Drop the future here: its error may hold the frames that hold this object, a cycle through C++.
            future, self._future = self._future, None
        if future is None:
            return
        error = self.error or self.outcome
        if error is None:
            finish: Callable[[], object] = partial(future.set_result, None)
        else:
            finish = partial(future.set_exception, copy.copy(error))  # type: ignore[arg-type]
        self._references.node.executor.submit(FunctionTask(finish, finish))  # callbacks are user code


# ---------------------------------------------------------------------- questions


def ask(rref: RRef[Any], peer: Peer, what: Callable[..., Any], frame: Frame, timeout_s: float | None) -> Any:
    """Send ``frame``, a request for a function of `owned_values.py`, to ``peer``, the owner; return the result."""
    node = rref._references.node
    if rref._serial and rref._owned is not None:
        try:
            _check_not_within(rref._owned, what)
        except BaseException:
            withdraw(frame)
            raise
    call = SyncCall(peer, what, node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s))
    creation = rref._creation
    if creation is not None and not (creation.arrived and creation.error is None):
        creation.attach(call, frame)
    profile = PROFILING.begin_call(node, peer, "sync", what, None) if is_profiled() or PROFILING.everywhere else None
    if profile is not None:
        call.profile = profile
    try:
        answer = node.calls.exchange(call, frame)
    except NetworkError as error:
        raise _lost(rref, error) from error
    try:
        return read_answer(answer, peer)
    except (Overloaded, ReferenceLost):
        # The owner refused the creation just before this request came: the creation's error says more.
        if creation is not None and creation.error is not None:
            raise copy.copy(creation.error) from None
        raise


def _check_not_within(owned: Owned, what: Callable[..., Any]) -> None:
    """Raise if a method of a serial object waits for another method of the same object: a deadlock."""
    scope = CURRENT.get()
    request = None if scope is None else scope.served
    if isinstance(request, Request) and owned.turns is not None and request.frame.turns is owned.turns:
        inner, outer = name_of(what), request.function_name
        raise RpcError(
            f"{outer}() waits for {inner}() of its own object, whose calls run one at a time: neither can continue. "
            f"Call self.{inner}(), or await the call from an async def"
        )


def ask_async(
    rref: RRef[Any], peer: Peer, what: Callable[..., Any], frame: Frame, timeout_s: float | None
) -> Future[Any]:
    """Like `ask`, but return a future of the result at once."""
    node = rref._references.node
    future = _Answer(node, peer, what, node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s), rref)
    creation = rref._creation
    if creation is not None and not (creation.arrived and creation.error is None):
        creation.attach(future, frame)
    if is_profiled() or PROFILING.everywhere:
        future.profile = PROFILING.begin_call(node, peer, "async", what, None)
    send(node.calls, future, frame)
    return future


def _lost(rref: RRef[Any], error: NetworkError) -> RpcError:
    ended = rref._references.node.why_ended
    if ended is not None:
        return ended  # this node ended; the owner may be alive
    if isinstance(error, ReferenceLost | Overloaded):
        return error
    return ReferenceLost(f"{error}; the value was there: create it again (docs/restart.md)", error.delivery)


class _Answer(Future[Any]):
    """The future of a call to a reference's owner; it holds the reference until the answer comes."""

    def __init__(self, node: Runtime, peer: Peer, what: Callable[..., Any], timeout_s: float, rref: RRef[Any]) -> None:
        super().__init__(node, peer, what, timeout_s)
        self._rref: RRef[Any] | None = rref
        self._creation = rref._creation

    def on_answer(self, frame: Frame) -> None:
        self._rref = None
        super().on_answer(frame)

    def on_failure(self, error: RpcError) -> None:
        rref, self._rref = self._rref, None
        if rref is not None and isinstance(error, NetworkError):
            error = _lost(rref, error)
        super().on_failure(error)

    def _end(self, error: Cancelled) -> None:
        self._rref = None
        super()._end(error)

    def fail(self, error: BaseException) -> None:
        creation, self._creation = self._creation, None
        if creation is not None and creation.error is not None and isinstance(error, Overloaded | ReferenceLost):
            error = copy.copy(creation.error)  # as in `ask`
        super().fail(error)
