"""The base of all futures of farcall. It adds to torch's: bounded waits, ``await``, callbacks that can be removed.

Owns the two ways in which a future announces that it is done: callbacks, which are user code, and gates, which only
wake a waiter. Every callback, however it was added, runs in the autograd context in which it was added, and on no
thread that reads a link. Must not know calls: `future.py` has the future of one call, `combine.py` those of several.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch

from farcall.errors import Cancelled
from farcall.rpc.timeouts import check_wait
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import Waiting
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.reader import is_reader, stop_reading
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import runtime_of_thread
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.serialize import RECORDING

if TYPE_CHECKING:
    from farcall.runtime.node import Runtime

logger: logging.Logger = logging.getLogger("farcall")

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E", bound=BaseException)
AT_ONCE = 100
"""How many coroutines a loop resumes before it does other work."""
_OF_THREAD = threading.local()
"""``opened``: the `_OpenedGates` of the loop that runs on this thread."""


class Opens(Protocol):
    """A gate: opening it wakes the one waiter behind it."""

    def open(self) -> None:
        """Wake the waiter. Called on any thread, also the reader of a link: never blocks."""


class LoopGate:
    """A gate at which a coroutine waits. Make it on the loop of that coroutine."""

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
    """The gates of one event loop that other threads have opened. One wake-up of the loop serves many gates.

    Mutable: ``_passed``, to which any thread appends; and ``_is_awake``: is a run of `_let_pass` scheduled?
    """

    __slots__ = ("_is_awake", "_passed", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._passed: deque[asyncio.Future[None]] = deque()
        self._is_awake = False

    def add(self, passed: asyncio.Future[None]) -> None:
        """Have the loop resume the coroutine behind ``passed``. From any thread; never blocks."""
        self._passed.append(passed)  # before the flag is read: `_let_pass` lowers the flag before it reads the deque
        if not self._is_awake:
            self._is_awake = True
            try:
                self.loop.call_soon_threadsafe(self._let_pass)
            except RuntimeError:
                pass  # the loop was closed, and its coroutines with it

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
    """A torch future with the methods of ``concurrent.futures`` and ``asyncio`` futures."""

    _added: list[_Callback] | None = None
    _has_callbacks = False
    _node: Runtime | None = None
    """The node whose workers run the callbacks that its readers must not run."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._state()}>"

    def _state(self) -> str:
        """Never the value itself: it may be large, and its repr may run any code."""
        if not self.done():
            return "pending"
        try:
            return f"done, {type(torch.futures.Future.wait(self)).__name__}"
        except BaseException as error:
            return f"failed, {type(error).__name__}: {error}"

    def result(self, timeout: float | None = None) -> T:
        """Wait; return the result or raise the error. After ``timeout`` seconds without one, raise ``TimeoutError``."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> T:
        """Do the same as `result`."""
        raise NotImplementedError

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does; return the error, or None if there is none."""
        if timeout is not None:
            check_wait(timeout)  # here, too: its error would count as that of the future
        try:
            self.wait(timeout)
        except BaseException as error:
            if not self.done():
                raise
            return error
        return None

    def cancel(self) -> bool:
        """Cancel the call or calls behind this future, which fails with `Cancelled`. False: it was done already."""
        raise NotImplementedError

    def cancelled(self) -> bool:
        """Is this future done because it was cancelled?"""
        return self.done() and isinstance(self.exception(), Cancelled)

    def when_done(self, gate: Opens) -> None:
        """Open ``gate`` when this future is done, on the thread that completes it; at once if it is done."""
        raise NotImplementedError

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Run ``callback(self)`` when done; now if it is done. Added on a running event loop, it runs on that loop."""
        check_callable(callback)
        entry = _Callback(callback, in_present_context(profiled(callback)), self._loop_for_callbacks())
        if not self.done():
            if self._added is None:
                self._added = []
            self._added.append(entry)
        self._add(entry)

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """Return a future of ``callback(self)``, which runs on a worker thread, or here if this future is done."""
        check_callable(callback)
        derived: DerivedFuture[S] = DerivedFuture(self._node)
        self._add(derived.completing(in_present_context(profiled(callback))))
        return derived

    def _add(self, act: Callable[[Any], None]) -> None:
        """Have ``act(self)`` run when this future is done; here and now if it is done already."""
        if self.done():
            _call_back(act, self)  # not by torch, which drops what comes out of a callback, Ctrl-C included
            return
        node = self._node
        adding = [get_ident()]

        # Must not hold this object: a future that is never done would hold itself, through C++.
        def run(future: Any) -> None:
            # Mostly the future was completed on a worker, since it has callbacks. But this one may have come when a
            # reader had looked for some already, and was about to complete it.
            if node is None or not is_reader() or adding == [get_ident()]:
                act(future)
            else:
                task = partial(_call_back, act, future)
                node.executor.submit(FunctionTask(task, task))

        self._has_callbacks = True
        torch.futures.Future.add_done_callback(self, run)
        adding.clear()

    def _loop_for_callbacks(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop for callbacks added by the current code; None: the completing thread runs them."""
        return running_loop()

    def remove_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> int:
        """Remove a callback that has not run yet; return how often it was registered."""
        return sum(entry.take_off() for entry in self._added or () if entry.given == callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            gate = LoopGate(asyncio.get_running_loop())
            self.when_done(gate)
            try:
                yield from gate.passed
            except BaseException:  # the waiting task was cancelled, so the result is not needed
                self.cancel()
                raise
        return self.wait()

    def fail(self, error: BaseException) -> None:
        """Become done with an error."""
        # No garbage collector sees what the C++ future holds. So the error must hold no stack frames, which may hold
        # the future: not those of the thread that read the error, nor those of a waiter. Each waiter raises a copy.
        error.__traceback__ = None
        self._set_unwrap_func(raise_copy)
        torch._C.Future.set_result(self, error)


class _Callback:
    """A callback that runs at most once, unless it is removed before."""

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
            return self._act.pop()  # atomic: the callback is run or removed, never both
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
                pass  # the loop was closed, and its tasks with it


class DerivedFuture(Outcome[T]):
    """A future that other futures complete: the result of ``then`` and of ``gather``.

    Mutable: ``_gates``, to open when it is done; ``_opens_gates``, once: has torch's future the callback for that?
    """

    def __init__(self, node: Runtime | None = None) -> None:
        super().__init__()
        self._node = node
        self._stamp: Stamp | None = None
        self._gates: list[Opens] = []
        self._opens_gates = False

    def completing(self, callback: Callable[[Any], T]) -> Callable[[Any], None]:
        """Wrap ``callback``: its result, or its error, completes this future."""

        def run(done: Any) -> None:
            try:
                value = callback(done)
                if self._node is not None and self._node.device_list:
                    self._stamp = stamp(value, self._node.device_list)
            except BaseException as error:
                self.set_exception(_as_runtime_error(error))  # type: ignore[arg-type]
            else:
                self.set_result(value)

        return run

    def wait(self, timeout: float | None = None) -> T:
        """Block until this future is done; return its result or raise its error. See `Future.wait`."""
        limit_s = check_wait(timeout)
        if not self.done():
            finished = Gate()
            self.when_done(finished)
            with waiting_here():
                finished.wait(-1 if limit_s == NEVER else limit_s)
            if not self.done():
                with suppress(ValueError):  # `_open_all` has just taken it
                    self._gates.remove(finished)  # a program may ask again and again
                raise TimeoutError(f"not done within {timeout:g} s; the calls it waits for continue")
        if self._stamp is not None:
            self._stamp.wait()
        return torch.futures.Future.wait(self)

    def when_done(self, gate: Opens) -> None:
        # One callback for all gates, since torch's future keeps each until it is done. It must not hold this object: a
        # future that is never done would hold itself, through C++, which no garbage collector sees.
        self._gates.append(gate)
        if not self._opens_gates:
            torch.futures.Future.add_done_callback(self, partial(_open_all, self._gates))
            self._opens_gates = True  # after the line above: another thread relies on it
        elif self.done():  # checked after the append: the callback may have run just before it
            _open_all(self._gates)

    def cancel(self) -> bool:
        """Return False: a callback's result cannot be cancelled. Cancel the call that it waits for."""
        return False

    def value(self) -> T:
        """Return the result of a future that is done, or raise its error."""
        if self._stamp is not None:
            self._stamp.wait()
        return super().value()


def _open_all(gates: list[Opens], _: object = None) -> None:
    while gates:
        try:
            gate = gates.pop(0)  # atomic: each gate is opened once
        except IndexError:
            return
        gate.open()


def _call_back(act: Callable[[Any], None], future: object) -> None:
    try:
        act(future)
    except Exception:  # torch, too, only reports it
        logger.exception("a callback of a future failed")


def check_callable(callback: object) -> None:
    """Raise torch's error if ``callback`` cannot be called."""
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback must be callable, not {type(callback).__name__}")


def _as_runtime_error(error: BaseException) -> BaseException:
    """Make ``error`` a RuntimeError too, as torch does with any error of a callback; its own type stays a base."""
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    kind = type(error)
    try:
        both: type[Exception] = type(kind.__name__, (kind, RuntimeError), {"__module__": kind.__module__})
        fresh = both(*error.args)
        if str(fresh) != str(error):
            return error
    except Exception:
        return error  # the class does not accept its own args, or cannot be combined with RuntimeError
    fresh.__cause__ = error
    return fresh


def profiled(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """Wrap ``callback`` in this thread's profiling. Its profile is complete before its future gets the result."""
    return PROFILING.carry(callback) if is_profiled() or PROFILING.everywhere else callback


def in_present_context(callback: Callable[[Any], S]) -> Callable[[Any], S]:
    """Wrap ``callback`` to run in this thread's distributed autograd context; if there is none, in none."""
    recording = RECORDING.get()

    def run(future: Any) -> S:
        outside = RECORDING.get()
        if outside is recording:
            return callback(future)
        try:
            RECORDING.set(recording)
            return callback(future)
        finally:
            RECORDING.set(outside)

    return run


def raise_copy(error: BaseException) -> NoReturn:
    """Raise a copy of ``error``, or ``error`` itself if it cannot be copied."""
    raise copied(error)


def copied(error: E) -> E:
    """Copy ``error`` for one of several receivers; return ``error`` itself if it cannot be copied faithfully."""
    try:
        fresh = copy.copy(error)
        fresh.__cause__ = error.__cause__
        if type(fresh) is not type(error) or str(fresh) != str(error):
            fresh = error
    except Exception:
        fresh = error
    return fresh


def waiting_here() -> Waiting | nullcontext[None]:
    """Enter this around a wait: the thread gives up the reader role and does not count as a busy worker meanwhile."""
    stop_reading()
    node = runtime_of_thread()
    return nullcontext() if node is None else node.calls.waiting()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that the calling code runs on, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
