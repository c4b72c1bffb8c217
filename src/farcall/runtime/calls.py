"""Calls that wait for their answer: the pending table and its deadlines.

Knows nothing of functions, arguments or results: `remote/call.py` makes the requests and reads the answers.

Thread rules
- A pending call is claimed by whoever pops it from the table: the reader of its answer, the ticker at its deadline, the
  caller that gives up, or the end of its link. Popping is atomic, so exactly one of them completes it; a late answer
  finds nothing and is dropped.
- ``_next_deadline`` is only ever lowered under the lock, when a call has a nearer deadline than all before it; so
  calls with the same timeout never take the lock nor wake the I/O thread.
- A thread about to wait first stops being a reader (`abdicate`) and, if it runs a user function, stops counting as
  a busy worker (`Executor.park`); then it reads the link itself if nobody else does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from farcall.errors import Delivery, NetworkError, RpcError, RpcTimeout
from farcall.protocol.frames import REQUEST, Arrived
from farcall.runtime.executor import Executor
from farcall.runtime.loop import NEVER, Loop
from farcall.runtime.peers import Peer
from farcall.runtime.role import abdicate


class PendingCall:
    """One request whose answer has not come yet; subclasses say what its outcome does.

    ``arrived`` is set, by the thread that claimed the call, before its outcome is handed out.
    """

    arrived: bool
    cancellable = True
    """Need the function not begin once nobody waits for this call any more?"""
    peer: Peer
    what: Callable[..., Any]
    deadline: float
    timeout_s: float
    call_id: int

    def on_answer(self, frame: Arrived) -> None:
        """The answer came."""
        raise NotImplementedError

    def on_failure(self, error: RpcError) -> None:
        """No answer will come."""
        raise NotImplementedError


class SyncCall(PendingCall):
    """A call whose caller sleeps on a lock until it is done."""

    __slots__ = ("arrived", "call_id", "deadline", "error", "frame", "lock", "peer", "timeout_s", "what")

    def __init__(self, peer: Peer, what: Callable[..., Any], timeout_s: float) -> None:
        self.peer = peer
        self.what = what
        self.timeout_s = timeout_s
        self.deadline = monotonic() + timeout_s if timeout_s else NEVER
        self.arrived = False
        self.call_id = 0
        self.frame: Arrived | None = None
        self.error: RpcError | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def on_answer(self, frame: Arrived) -> None:
        self.frame = frame
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
        abdicate()
        worker = self._executor.current_worker()
        self._worker = None if worker is None or worker.parked else worker
        if self._worker is not None:
            self._executor.park(self._worker)

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._executor.unpark(self._worker)


class CallTable:
    """The calls of one node that wait for an answer."""

    def __init__(self, loop: Loop, executor: Executor) -> None:
        self._loop = loop
        self._executor = executor
        self._pending: dict[int, PendingCall] = {}
        self._next_id = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._next_deadline = NEVER
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, call: PendingCall) -> int:
        """Give ``call`` its id and put it into the table."""
        call.call_id = call_id = self._next_id()
        self._pending[call_id] = call
        self.last_id = call_id  # after the line above: whoever sees the old number may believe the table
        return call_id

    def watch_deadline(self, call: PendingCall) -> None:
        """Have the I/O thread fail ``call`` at its deadline. Not needed where the caller itself waits."""
        if call.deadline < self._next_deadline:
            with self._lock:
                if call.deadline < self._next_deadline:
                    self._next_deadline = call.deadline
            self._loop.attend_by(call.deadline)

    def claim(self, call_id: int) -> PendingCall | None:
        """Take a call out of the table; whoever gets it completes it."""
        return self._pending.pop(call_id, None)

    def tick(self, now: float) -> float:
        """On the I/O thread: fail the calls whose time is up."""
        if now < self._next_deadline:
            return self._next_deadline
        with self._lock:
            self._next_deadline = NEVER
            nearest = NEVER
            overdue = []
            for call in list(self._pending.values()):
                if call.deadline <= now:
                    overdue.append(call)
                elif call.deadline < nearest:
                    nearest = call.deadline
            self._next_deadline = min(self._next_deadline, nearest)
        for call in overdue:
            if self.claim(call.call_id) is not None:
                if call.cancellable:
                    call.peer.cancel(call.call_id)
                call.on_failure(self.timed_out(call))
        return nearest

    def waiting(self) -> Waiting:
        """Around every wait for a call: the thread stops being a reader or a busy worker meanwhile."""
        return Waiting(self._executor)

    def exchange(
        self, call: SyncCall, function: bytes, notes: bytes, payload: bytes, buffers: Sequence[memoryview]
    ) -> None:
        """Send the request of ``call`` and block until it is done; at its deadline, fail it."""
        abdicate()
        worker = self._executor.current_worker()
        if worker is not None:
            self._executor.park(worker)
        peer = call.peer
        try:
            call_id = self.register(call)
            peer.send(REQUEST, 0, call_id, function, notes, payload, buffers, call.deadline, False, call)
            if not call.arrived:
                if peer.broken:
                    self._fail_lost(call)
                remaining = call.deadline - monotonic()
                bound = -1 if remaining == NEVER else max(0.0, min(remaining, threading.TIMEOUT_MAX))
                if not call.lock.acquire(True, bound):
                    if self.claim(call.call_id) is not None:
                        raise self.timed_out(call)
                    call.lock.acquire()  # claimed a moment ago by another thread, which is about to release it
        except BaseException:
            # Not sent, too late, or interrupted: nobody waits for the answer any more. First of all, and without a
            # Python function: another Ctrl-C may come.
            self._pending.pop(call.call_id, None)
            self._loop.attend_by(0.0)  # a shutdown may be waiting for this call to end
            peer.cancel(call.call_id)
            raise
        finally:
            if worker is not None:
                self._executor.unpark(worker)

    def send(
        self,
        call: PendingCall,
        function: bytes,
        notes: bytes,
        payload: bytes,
        buffers: Sequence[memoryview],
        flags: int = 0,
    ) -> None:
        """Send the request of ``call``, whose outcome somebody else waits for; a failure leaves nothing behind."""
        try:
            call_id = self.register(call)
            call.peer.send(REQUEST, flags, call_id, function, notes, payload, buffers, call.deadline)
            if call.peer.broken:
                self._fail_lost(call)
            self.watch_deadline(call)
        except (NetworkError, RpcTimeout):
            if self.claim(call.call_id) is None:
                return  # its deadline, or the end of the link, claimed it a moment ago and fails it: once is enough
            self._loop.attend_by(0.0)
            raise
        except BaseException:
            self._pending.pop(call.call_id, None)  # as above
            self._loop.attend_by(0.0)
            raise

    def _fail_lost(self, call: PendingCall) -> None:
        """The link is broken. If the table was swept before ``call`` was in it, nobody else would end the call."""
        if self.claim(call.call_id) is not None:
            call.on_failure(call.peer.lost(Delivery.UNKNOWN))

    def timed_out(self, call: PendingCall) -> RpcTimeout:
        """The error for a call whose deadline has passed."""
        name = getattr(call.what, "__qualname__", None) or repr(call.what)
        return RpcTimeout(
            f"RPC ran for more than set timeout ({int(call.timeout_s * 1000)} ms): "
            f"{call.peer.info.name} has not answered {name}()"
        )

    def fail_all(self, error: Callable[[PendingCall], RpcError], peer: Peer | None = None) -> int:
        """Fail every call to ``peer`` (or to anybody); how many there were."""
        failed = 0
        for call in list(self._pending.values()):
            if (peer is None or call.peer is peer) and self.claim(call.call_id) is not None:
                failed += 1
                call.on_failure(error(call))
        return failed

    def snapshot(self) -> list[PendingCall]:
        """The calls waiting now, oldest first."""
        return list(self._pending.values())
