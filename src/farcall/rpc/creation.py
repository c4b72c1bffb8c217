"""The creating call of a reference, at both ends.

At its creator a `Creation` waits in the table of calls until the owner has answered; at its owner a `KeptRequest`
runs the function and keeps the outcome. The answer says only that the owner has the reference, and that the function
is done; its error is kept in the value's place, and surfaces at first use.

    a creation   event                    becomes     with
    (none)       sent                     pending
    pending      the answer               done        the fork is confirmed
    pending      its time is up           failed      uses raise RpcTimeout; the owner is asked what became of it
    pending      not sent, peer gone      failed      uses raise ReferenceLost
    pending      refused                  failed      uses raise Overloaded; the owner never had the reference
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from farcall.errors import Cancelled, NetworkError, Overloaded, ReferenceLost, RpcError, RpcTimeout
from farcall.protocol.frames import FAILURE, RESPONSE, Frame
from farcall.protocol.notes import REFUSED
from farcall.protocol.references.messages import Fork
from farcall.rpc.call import refusal
from farcall.rpc.owned_value import Owned
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.calls.serving import Request, Server, StoredFailure
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, encode_failure

if TYPE_CHECKING:
    from farcall.rpc.references import NodeReferences

# One for all: it is held for an instant. Re-entrant, since a garbage collection inside may run user code.
_lock = threading.RLock()


class Creation(PendingCall):
    """A creating call, at its creator."""

    cancellable = False  # others may hold the reference, and wait for the value

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
        "tally",
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
        self._looks = 100
        self._waiting: list[PendingCall] | None = None  # calls that make no sense if this one fails
        self.fork: Fork = fork
        self.peer: Peer = peer
        self.what: Callable[..., Any] = what
        self.timeout_s: float = timeout_s
        now = monotonic()
        self.started_at: float = now
        self.deadline: float = now + timeout_s if timeout_s else NEVER
        self.arrived: bool = False
        self.call_id: int = 0
        self.keeps: object = keeps  # what the call needs at the owner: it must not be released before the answer
        self.error: RpcError | None = None
        """Why the owner may not have the reference."""
        self.outcome: BaseException | None = None
        """What the function raised."""

    def on_answer(self, frame: Frame) -> None:
        """The owner has the reference, and the function is done; or it has refused."""
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
            self._references.withdraw_creation(self.fork)
        else:
            self.error = error
        self.arrived = True
        self.keeps = None
        self.fail_waiting()
        if self._future is not None:
            self._finish_future()

    def attach(self, call: PendingCall) -> None:
        """Fail ``call``, which is about to be sent, if this creation fails; raises if it has."""
        with _lock:
            if not self.arrived:
                if self._waiting is None:
                    self._waiting = []
                self._waiting.append(call)
        if self.error is not None:
            raise copy.copy(self.error)

    def fail_waiting(self) -> None:
        """Fail what waits for the value although it will not come."""
        assert self.error is not None
        with _lock:
            waiting, self._waiting = self._waiting, None
        unsent = []
        for call in waiting or ():
            if call.call_id == 0:
                unsent.append(call)
            elif self._references.node.calls.claim(call.call_id) is not None:
                call.on_failure(copy.copy(self.error))
        if unsent and self._looks:
            self._looks -= 1
            self._waiting = unsent
            self._references.fail_waiting_soon(self)

    def future(self) -> torch.futures.Future[None]:
        """A future that completes when the creating call is done."""
        with _lock:
            future = self._future
            if future is None:
                future = self._future = torch.futures.Future()
        if self.arrived:
            self._finish_future()
        return future

    def _finish_future(self) -> None:
        with _lock:
            future, self._future = self._future, None  # a done one may hold, by its error, whoever holds this
        if future is not None:
            self._references.node.executor.submit(_FutureEnd(future, self.error or self.outcome))


class _FutureEnd:
    """The end of a creation's future, as a task for a worker thread: callbacks are user code."""

    __slots__ = ("_error", "_future")

    quick = False

    def __init__(self, future: torch.futures.Future[None], error: BaseException | None) -> None:
        self._future = future
        self._error = error

    def run(self, more: bool) -> None:
        if self._error is not None:
            self._future.set_exception(copy.copy(self._error))  # type: ignore[arg-type]
        else:
            self._future.set_result(None)

    def drop(self) -> None:
        self.run(False)


class KeptRequest(Request):
    """A creating call, at its owner: the outcome stays here."""

    __slots__ = ("_flush_soon", "_owned")

    def __init__(
        self, server: Server, peer: Peer, frame: Frame, owned: Owned, flush_soon: Callable[[Peer], None]
    ) -> None:
        super().__init__(server, peer, frame)
        self._owned = owned
        self._flush_soon = flush_soon

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Keep the result, and tell the creator, in a moment: nobody waits for that, and company is likely to come."""
        self._owned.made_by = self.frame.function
        self._owned.resolve(outcome.pop(), self.server.devices)
        if self.quick:
            self._send(Frame(RESPONSE), True)
            self._flush_soon(self.peer)
        else:
            self._send(Frame(RESPONSE), False)

    def _fail(self, error: BaseException) -> None:
        # Without a peer, because nobody knows yet who will ask: references inside the exception stay behind.
        failure = error.frame if type(error) is StoredFailure else encode_failure(error, self.server.worker)
        self._owned.fail(failure)
        self._send(Frame(FAILURE, payload=failure.payload, buffers=failure.buffers), False)

    def drop(self) -> None:
        why = Cancelled(f"{self.server.worker.name} shut down before the value was made")
        self._owned.fail(encode_failure(why, self.server.worker))
        super().drop()
