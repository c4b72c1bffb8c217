"""The future of a call: an `Outcome` whose wait reads the answer itself, and that can end the call.

Callbacks are user code, and the thread that reads an answer must never run user code that may take long: so a future
that Python callbacks were attached to, or whose value names classes, is completed by a worker thread, and only others
by the reader at once. (Chains that torch makes in C++, such as ``collect_all``, are invisible here; they run on the
reader, under the watch of `reader.py`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall.errors import Cancelled, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, Frame
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout, encode_request, read_answer, send
from farcall.rpc.outcome import (
    DerivedFuture,
    Opens,
    Outcome,
    check_callable,
    in_present_context,
    profiled,
    running_loop,
)
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import PendingCall, name_of
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import has_devices, read_value, takes_long

if TYPE_CHECKING:
    from farcall.runtime.node import Runtime

T = TypeVar("T")
S = TypeVar("S")
_make_future = torch._C.Future.__init__
_NONE_YET: Any = object()


class Future(Outcome[T], PendingCall):
    """The outcome of one call that goes on while its caller does something else."""

    settle: Callable[[Any, Any], None] = staticmethod(torch._C.Future.set_result)
    """How a future is given its value: so that TorchScript can use it, where that is in use."""
    thread_id: int  # of the thread that waits
    _value: Any = _NONE_YET
    """The result once it is there, as torch has it too: to ask torch for it takes four times as long."""

    def __init__(self, node: Runtime, peer: Peer, what: Callable[..., Any], timeout_s: float) -> None:
        _make_future(self, [])
        self._stamp: Stamp | None = None
        self._node = node
        self._frame: Frame | None = None
        self._has_callbacks = False
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
        # Never the value itself: it may be large, and its own repr may be anything.
        if not self.done():
            state = f"pending, {max(0.0, self.deadline - monotonic()):.3g} s left" if self.timeout_s else "pending"
        else:
            try:
                state = f"done, {type(torch.futures.Future.wait(self)).__name__}"
            except BaseException as error:
                state = f"failed, {type(error).__name__}: {error}"
        return f"<Future of {name_of(self.what)}() on {self.peer.info.name!r}: {state}>"

    def wait(self, timeout: float | None = None) -> T:
        """Block until the call is done; return its result or raise its error.

        With a ``timeout``, wait that many seconds at most, then raise ``TimeoutError``: the call itself goes on.
        """
        if self._value is _NONE_YET and not self.done():
            self.thread_id = get_ident()
            until = NEVER if timeout is None else monotonic() + timeout
            with self._node.calls.waiting():
                if not self.arrived:
                    self.peer.help_until(self, self.deadline if self.deadline < until else until)
                if self._value is _NONE_YET and not self.done():
                    # Not torch's own wait: it does not listen to Ctrl-C.
                    finished = Gate()
                    self.when_done(finished)
                    finished.wait(-1 if timeout is None else max(0.0, until - monotonic()))
                    if not self.done():
                        raise TimeoutError(
                            f"{self.peer.info.name} has not answered {name_of(self.what)}() within {timeout:g} s; "
                            "the call continues (cancel() ends it)"
                        )
        if self._stamp is not None:
            self._stamp.wait()  # the current streams do, the host does not
        return torch.futures.Future.wait(self) if self._value is _NONE_YET else self._value

    def when_done(self, gate: Opens) -> None:
        self._waiters.append(gate)
        if self.done():  # `_wake` may have looked before
            self._wake()

    def value(self) -> T:
        """The result of a future that is done, or its error, raised."""
        if self._stamp is not None:
            self._stamp.wait()
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """A future of ``callback(self)``; it runs on a worker thread, or here if this one is done."""
        check_callable(callback)
        derived: DerivedFuture[S] = DerivedFuture(self._node.device_list)
        self._has_callbacks = True
        torch.futures.Future.add_done_callback(self, in_present_context(derived.completing(profiled(callback))))
        return derived

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run ``callback(self)`` when done: on a worker thread, or here if this one is done.

        Added by code on a running event loop, it runs there.
        """
        self._has_callbacks = True
        super().add_done_callback(callback)

    def _loop_for_callbacks(self) -> asyncio.AbstractEventLoop | None:
        return running_loop() if self._node.options.inherit else None  # torch knows no loops

    def cancel(self) -> bool:
        """End the call; the result is `Cancelled`. True: it had not ended before.

        A function that has not begun never does; one that runs is told (`farcall.current_call`).
        """
        if self._node.calls.claim(self.call_id) is None:
            return False
        self.peer.cancel(self.call_id)
        self._end(Cancelled(f"{name_of(self.what)}() on {self.peer.info.name} was cancelled"))
        return True

    def _end(self, error: Cancelled) -> None:
        """Fail with ``error``, here and now."""
        if self.profile is not None:
            self.profile.ended()
        self.arrived = True
        self.fail(error)
        self._node.something_ended()

    # ------------------------------------------------------------------ as a pending call

    def on_answer(self, frame: Frame) -> None:
        """The answer came: complete now, or on a worker if that means user code or long work."""
        self.arrived = True
        if self._has_callbacks or takes_long(frame.payload):
            self._frame = frame
            self._node.executor.submit(FunctionTask(self._read_frame, self._read_frame))
            return
        self.peer.watch()  # chains that torch makes in C++ are the user's code, too
        if self._node.devices is None:
            self._complete(frame)
        else:
            self.complete(frame)

    def _read_frame(self) -> None:
        """On a worker; or where the node ended first, since threads may wait for this future."""
        frame, self._frame = self._frame, None
        assert frame is not None
        self.complete(frame)

    def complete(self, frame: Frame) -> None:
        """Read the answer and become done."""
        devices = self._node.devices
        if devices is None or self.thread_id == get_ident() or not has_devices(frame.payload):
            self._complete(frame)  # this thread waits for it: on its own streams
        else:
            devices.answers.run(lambda: self._complete(frame))

    def _complete(self, frame: Frame) -> None:
        try:
            value = read_answer(frame, self.peer) if frame.kind == FAILURE else read_value(frame, self.peer)
        except BaseException as error:
            self.fail(error)
        else:
            if self._node.device_list and has_devices(frame.payload):
                self._stamp = stamp(value, self._node.device_list, fresh=True)
            self.settle(self, value)
            self._value = value  # after its stamp: a thread that sees the value waits for the stamp
            if self._waiters:
                self._wake()

    def fail(self, error: BaseException) -> None:
        """Become done with an error."""
        super().fail(error)
        self._wake()

    def _wake(self) -> None:
        # After the result is set: a waiter appends its gate first and then looks at done(). Popping is atomic, so each
        # gate is opened once: those of `combine.py` count on that.
        waiters = self._waiters
        while waiters:
            try:
                finished = waiters.pop(0)
            except IndexError:
                return  # another thread was faster
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
    """Call ``func`` on ``to``; the future holds its result, or the error of the network.

    Errors of the arguments are raised here. ``kind`` is how the call is named in profiles.
    """
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s)
    profile = PROFILING.begin_call(node, peer, kind, func, None) if is_profiled() or PROFILING.everywhere else None
    frame = encode_request(peer, func, args, kwargs)
    future: Future[Any] = Future(node, peer, func, timeout_s)
    future.profile = profile
    send(node.calls, future, frame)
    return future
