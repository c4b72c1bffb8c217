"""The future of a call: an `Outcome` whose waiting thread reads the link itself, and that can cancel the call.

Callbacks are user code, and the thread that reads a link must never run user code that may take long. So a worker
thread completes a future that has Python callbacks, or whose value names classes; the reader completes all others at
once. (Chains that torch makes in C++, such as ``collect_all``, are invisible here. They run on the reader, and
`reader.py` watches how long they take.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall.errors import Cancelled, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, Frame
from farcall.rpc.call import encode_request, read_answer, send
from farcall.rpc.outcome import Opens, Outcome, running_loop
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout, check_wait
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.observing.counters import name_of
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import has_devices, read_value, withdraw

if TYPE_CHECKING:
    from farcall.runtime.node import Runtime

T = TypeVar("T")
S = TypeVar("S")
_make_future = torch._C.Future.__init__
_NONE_YET: Any = object()


class Future(Outcome[T], PendingCall):
    """The outcome of one asynchronous call.

    Mutable: ``arrived``, the value or error, once; ``_waiters``, gates to open then; ``_frame``, an answer that a
    worker is to read.
    """

    settle: Callable[[Any, Any], None] = staticmethod(torch._C.Future.set_result)
    """How a future gets its value. `farcall.torchscript` replaces it, so that TorchScript can use the value."""
    thread_id: int  # of the thread that waits
    _value: Any = _NONE_YET
    """A copy of the result that torch's future holds: to ask torch for it takes four times as long."""

    def __init__(self, node: Runtime, peer: Peer, what: Callable[..., Any], timeout_s: float) -> None:
        _make_future(self, [])
        self._stamp: Stamp | None = None
        self._node: Runtime = node
        self._waiters: list[Opens] = []
        self.peer = peer
        self.what = what
        self.timeout_s = timeout_s
        now = monotonic()
        self.started_at: float = now
        self.deadline: float = now + timeout_s if timeout_s else NEVER
        self.arrived: bool = False
        self.call_id = 0

    def __repr__(self) -> str:
        left = f", {max(0.0, self.deadline - monotonic()):.3g} s left" if self.timeout_s and not self.done() else ""
        return f"<Future of {name_of(self.what)}() on {self.peer.info.name!r}: {self._state()}{left}>"

    def wait(self, timeout: float | None = None) -> T:
        """Block until the call is done; return its result or raise its error.

        With a ``timeout``, wait that many seconds at most, then raise ``TimeoutError``: the call itself goes on.
        """
        limit_s = NEVER if timeout is None else check_wait(timeout)
        if self._value is _NONE_YET and not self.done():
            self.thread_id = get_ident()
            until = monotonic() + limit_s
            with self._node.calls.waiting():
                if not self.arrived:
                    self._node.calls.wait(self, until)
                if self._value is _NONE_YET and not self.done():
                    # Not torch's own wait: Ctrl-C does not interrupt it.
                    finished = Gate()
                    self.when_done(finished)
                    finished.wait(-1 if until == NEVER else max(0.0, until - monotonic()))
                    if not self.done():
                        with suppress(ValueError):  # `_wake` has just taken it
                            self._waiters.remove(finished)  # a program may ask again and again
                        raise TimeoutError(
                            f"{self.peer.info.name} has not answered {name_of(self.what)}() within {timeout:g} s; "
                            "the call continues (cancel() ends it)"
                        )
        if self._stamp is not None:
            self._stamp.wait()  # blocks the current device streams, not this thread
        return torch.futures.Future.wait(self) if self._value is _NONE_YET else self._value

    def when_done(self, gate: Opens) -> None:
        self._waiters.append(gate)
        self._want_told()
        if self.done():  # checked after the append: `_wake` may have run just before it
            self._wake()

    def _want_told(self) -> None:
        """Somebody is to be told when the answer comes: a worker takes it at once."""
        if not self.is_told:
            self.is_told = True
            self._node.calls.tell(self)

    def _add(self, act: Callable[[Any], None]) -> None:
        super()._add(act)
        self._want_told()

    def value(self) -> T:
        """Return the result of a future that is done, or raise its error."""
        if self._stamp is not None:
            self._stamp.wait()
        return super().value()

    def _loop_for_callbacks(self) -> asyncio.AbstractEventLoop | None:
        return running_loop() if self._node.options.inherit else None  # torch.distributed.rpc knows no event loops

    def cancel(self) -> bool:
        """Cancel the call; the future fails with `Cancelled`. False: the call was done already.

        A function that has not begun never runs; one that runs can see it (`farcall.current_call`).
        """
        if self._node.calls.claim(self.call_id) is None:
            return False
        self.unwanted = True  # a thread that is still sending a large request tells the callee again
        self.peer.cancel(self.call_id)
        self._end(Cancelled(f"{name_of(self.what)}() on {self.peer.info.name} was cancelled"))
        return True

    def _end(self, error: Cancelled) -> None:
        """Fail with ``error`` on this thread."""
        if self.profile is not None:
            self.profile.ended()
        self.arrived = True
        self.fail(error)
        self._node.something_ended()

    # ------------------------------------------------------------------ as a pending call

    def on_answer(self, frame: Frame) -> None:
        """The answer came, on a worker or on the thread that waits."""
        self.arrived = True
        self.complete(frame)

    def complete(self, frame: Frame) -> None:
        """Read the answer and become done."""
        devices = self._node.devices
        if devices is None or self.thread_id == get_ident() or not has_devices(frame.payload):
            self._complete(frame)  # the waiting thread itself: tensors go to its own current streams
        else:
            devices.answers.run(lambda: self._complete(frame))

    def _complete(self, frame: Frame) -> None:
        try:
            value = read_answer(frame, self.peer) if frame.kind == FAILURE else read_value(frame, self.peer)
            if self._node.device_list and has_devices(frame.payload):
                self._stamp = stamp(value, self._node.device_list, fresh=True)
        except BaseException as error:
            self.fail(error)
        else:
            self.settle(self, value)
            self._value = value  # after the stamp: a thread that sees the value must also see its stamp
            if self._waiters:
                self._wake()

    def fail(self, error: BaseException) -> None:
        """Become done with an error."""
        super().fail(error)
        self._wake()

    def _wake(self) -> None:
        # Runs after the result is set. A waiter appends its gate first and checks done() then, so no wake-up is lost.
        # Popping is atomic, so each gate opens exactly once; `combine.py` relies on that.
        waiters = self._waiters
        while waiters:
            try:
                finished = waiters.pop(0)
            except IndexError:
                return  # another thread popped the last gate
            finished.open()

    def on_failure(self, error: RpcError) -> None:
        """No answer will come."""
        if self.profile is not None:
            self.profile.ended()
        self.arrived = True
        fail = partial(self.fail, error)
        self._node.executor.submit(FunctionTask(fail, fail))


def call_async(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float | None,
    kind: str = "async",
) -> Future[Any]:
    """Call ``func`` on ``to``; return a future of its result. A network error fails the future.

    Errors in the arguments are raised here. ``kind`` names the call in profiles.
    """
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    profile = PROFILING.begin_call(node, peer, kind, func, None) if is_profiled() or PROFILING.everywhere else None
    frame = encode_request(peer, func, args, kwargs)
    try:
        future: Future[Any] = Future(node, peer, func, timeout_s)
        future.profile = profile
        send(node.calls, future, frame)
    except BaseException:
        withdraw(frame)  # Ctrl-C may come before `send` can do so
        raise
    return future
