"""What every future of farcall can do beyond torch's own: bounded waits, ``await``, callbacks that can be taken off.

Owns the two ways in which something learns that a future is done: callbacks, which are user code, and gates, which only
wake whoever waits. Knows nothing of calls: `future.py` has the future of one, `combine.py` those of several.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from farcall.errors import Cancelled
from farcall.runtime.calls.pending import Waiting
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.reader import stop_reading
from farcall.runtime.io.sigint import Gate
from farcall.runtime.node import runtime_of_thread
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.serialize import RECORDING

T = TypeVar("T")
S = TypeVar("S")
AT_ONCE = 100
"""Gates that a loop lets pass before it does something else."""
_OF_THREAD = threading.local()
"""``opened``: the `_OpenedGates` of the loop that runs on this thread."""


class Opens(Protocol):
    """Something that waits at a gate."""

    def open(self) -> None:
        """It need not wait any more. From any thread, the reader of a link too: never blocks."""


class LoopGate:
    """A gate at which a coroutine waits. To be made on the loop that it waits on."""

    __slots__ = ("_opened", "passed")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        opened: _OpenedGates | None = getattr(_OF_THREAD, "opened", None)
        if opened is None or opened.loop is not loop:
            opened = _OF_THREAD.opened = _OpenedGates(loop)
        self._opened = opened
        self.passed: asyncio.Future[None] = loop.create_future()

    def open(self) -> None:
        self._opened.add(self.passed)


class _OpenedGates:
    """The gates of one event loop that other threads have opened. One wake of the loop lets many pass.

    Mutable: ``_passed``, to which any thread appends; and ``_is_awake``: will the loop look at it by itself?
    """

    __slots__ = ("_is_awake", "_passed", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._passed: deque[asyncio.Future[None]] = deque()
        self._is_awake = False

    def add(self, passed: asyncio.Future[None]) -> None:
        """Have the loop let one pass. From any thread; never blocks."""
        self._passed.append(passed)  # first: `_let_pass` lowers the flag before it looks
        if not self._is_awake:
            self._is_awake = True
            try:
                self.loop.call_soon_threadsafe(self._let_pass)
            except RuntimeError:
                pass  # the loop was closed: nobody waits any more

    def _let_pass(self) -> None:
        self._is_awake = False
        for _ in range(AT_ONCE):
            try:
                passed = self._passed.popleft()
            except IndexError:
                return
            if not passed.done():
                passed.set_result(None)
        self._is_awake = True
        self.loop.call_soon(self._let_pass)


class Outcome(torch.futures.Future[T]):
    """A future of torch's, with what ``concurrent.futures`` and ``asyncio`` have."""

    _added: list[_Callback] | None = None

    def result(self, timeout: float | None = None) -> T:
        """The result, or the error, raised; with a ``timeout`` in seconds, ``TimeoutError`` if it is not there then."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> T:
        """The same as `result`."""
        raise NotImplementedError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, None if there is none; waits as `result` does."""
        try:
            self.wait(timeout)
        except BaseException as error:
            if not self.done():
                raise
            return error
        return None

    def cancel(self) -> bool:
        """End what the outcome is of; the result is `Cancelled`. True: it had not ended before."""
        raise NotImplementedError

    def cancelled(self) -> bool:
        """Is it done, because it was cancelled?"""
        return self.done() and isinstance(self.exception(), Cancelled)

    def when_done(self, gate: Opens) -> None:
        """Open ``gate`` once this is done, on the thread that makes it so; at once if it is."""
        raise NotImplementedError

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run ``callback(self)`` when done; here if this one is done. Added on a running event loop, it runs there."""
        check_callable(callback)
        entry = _Callback(callback, in_present_context(profiled(callback)), self._loop_for_callbacks())
        if not self.done():
            if self._added is None:
                self._added = []
            self._added.append(entry)
        super().add_done_callback(entry)

    def _loop_for_callbacks(self) -> asyncio.AbstractEventLoop | None:
        """Where callbacks that are added here and now run; None: where this one becomes done."""
        return running_loop()

    def remove_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> int:
        """Take off a callback that has not run yet; how many of that kind there were."""
        return sum(entry.take_off() for entry in self._added or () if entry.given == callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            gate = LoopGate(asyncio.get_running_loop())
            self.when_done(gate)
            try:
                yield from gate.passed
            except BaseException:  # the task that waits was cancelled: nobody wants the result any more
                self.cancel()
                raise
        return self.wait()

    def fail(self, error: BaseException) -> None:
        """Become done with an error."""
        # What the C++ future holds no garbage collector sees. So it must hold no frames, which may hold the future:
        # neither those that read the error, nor those of whoever waits, to each of whom a copy is raised.
        error.__traceback__ = None
        self._set_unwrap_func(raise_copy)
        torch._C.Future.set_result(self, error)


class _Callback:
    """A callback until it has run, or was taken off."""

    __slots__ = ("_act", "_loop", "given")

    def __init__(
        self, given: Callable[[Any], None], act: Callable[[Any], None], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.given: Callable[[Any], None] | None = given
        self._act: list[Callable[[Any], None]] = [act]
        self._loop = loop

    def take_off(self) -> bool:
        return self._take() is not None

    def _take(self) -> Callable[[Any], None] | None:
        self.given = None
        try:
            return self._act.pop()  # atomic: it is run or taken off, never both
        except IndexError:
            return None

    def __call__(self, future: Any) -> None:
        act = self._take()
        if act is None:
            return
        loop = self._loop
        if loop is None or loop is running_loop():
            act(future)
        else:
            try:
                loop.call_soon_threadsafe(act, future)
            except RuntimeError:
                pass  # the loop was closed, and all that ran on it ended


class DerivedFuture(Outcome[T]):
    """A future that other futures complete: what ``then`` and ``gather`` return."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        """``devices``: those of a node, on which the result may be."""
        super().__init__()
        self._devices = devices
        self._stamp: Stamp | None = None

    def completing(self, callback: Callable[[Any], T]) -> Callable[[Any], None]:
        """A callback that completes this future with what ``callback`` returns or raises."""

        def run(done: Any) -> None:
            try:
                value = callback(done)
            except BaseException as error:
                self.set_exception(_as_runtime_error(error))  # type: ignore[arg-type]
            else:
                if self._devices:
                    self._stamp = stamp(value, self._devices)
                self.set_result(value)

        return run

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is done; return its result or raise its error. See `Future.wait`."""
        if not self.done():
            finished = Gate()
            self.when_done(finished)
            with waiting_here():
                finished.wait(-1 if timeout is None else max(0.0, timeout))
            if not self.done():
                raise TimeoutError(f"not done within {timeout:g} s; the calls it waits for continue")
        if self._stamp is not None:
            self._stamp.wait()
        return torch.futures.Future.wait(self)

    def when_done(self, gate: Opens) -> None:
        torch.futures.Future.add_done_callback(self, lambda _: gate.open())

    def cancel(self) -> bool:
        """A callback's result cannot be cancelled: False. Cancel the call that it waits for."""
        return False

    def value(self) -> T:
        """The result of a future that is done, or its error, raised."""
        if self._stamp is not None:
            self._stamp.wait()
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """A future of ``callback(self)``."""
        check_callable(callback)
        derived: DerivedFuture[S] = DerivedFuture(self._devices)
        torch.futures.Future.add_done_callback(self, derived.completing(profiled(callback)))
        return derived


def check_callable(callback: object) -> None:
    """Raise where ``callback`` cannot be called, in torch's words."""
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback must be callable, not {type(callback).__name__}")


def _as_runtime_error(error: BaseException) -> BaseException:
    """``error``, as a RuntimeError too: that is what torch makes of any error of a callback. Its own type is kept."""
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    kind = type(error)
    try:
        both: type[Exception] = type(kind.__name__, (kind, RuntimeError), {"__module__": kind.__module__})
        fresh = both(*error.args)
        if str(fresh) != str(error):
            return error
    except Exception:
        return error  # its class cannot be made so easily
    fresh.__cause__ = error
    return fresh


def profiled(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """``callback``, to be profiled as this thread is. What it does is known before a future is told of its result."""
    return PROFILING.carry(callback) if is_profiled() or PROFILING.everywhere else callback


def in_present_context(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """``callback``, to be run in the distributed autograd context that this thread is in, if any."""
    recording = RECORDING.get()
    if recording is None:
        return callback

    def run(future: Any) -> S:
        outside = recording.enter()
        try:
            return callback(future)
        finally:
            RECORDING.set(outside)

    return run


def raise_copy(error: BaseException) -> NoReturn:
    """Raise a copy of ``error``, or itself where its class cannot be made so easily."""
    try:
        fresh = copy.copy(error)
        fresh.__cause__ = error.__cause__
        if type(fresh) is not type(error) or str(fresh) != str(error):
            fresh = error
    except Exception:
        fresh = error
    raise fresh


def waiting_here() -> Waiting | nullcontext[None]:
    """Around a wait: a thread of a node stops being a reader or a busy worker meanwhile."""
    stop_reading()
    node = runtime_of_thread()
    return nullcontext() if node is None else node.calls.waiting()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that the calling code runs on, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
