"""The pool of threads that run user functions.

Owns the worker threads. Their queue is the core's: requests that came, answers that somebody is told of, and tasks of
this process (`submit`). How many functions run at a time the core decides (docs/design/CORE.md); here is how many
threads there are:

- One that waits for work is always kept, up to ``size``: a worker that takes work as the last idle one starts another.
- The pool grows beyond ``size`` when progress needs it (`on_starved`): all workers wait in farcall and work is queued, or
  nothing has ended for 50 ms. One thread is added each time, up to MOST_EXTRA_THREADS.
- Workers beyond ``size`` end after they were idle for IDLE_END_S.

``submit`` may be called from any thread, destructors included, and never blocks.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from farcall.core.contract import Arrived, Core, CoreError

logger: logging.Logger = logging.getLogger("farcall")

IDLE_END_S = 10.0
MOST_EXTRA_THREADS = 1000


class Task(Protocol):
    """Something for a worker to run; never raises."""

    def run(self, more: bool) -> None:
        """Run it. ``more``: other tasks wait behind this one."""

    def drop(self) -> None:
        """The executor stopped before the task ran: release whatever waits for it. On any thread."""


class FunctionTask:
    """A task that runs one function; ``on_drop`` is called if the executor stops first."""

    __slots__ = ("_function", "_on_drop")

    def __init__(self, function: Callable[[], object], on_drop: Callable[[], object] | None = None) -> None:
        self._function = function
        self._on_drop = on_drop

    def run(self, more: bool) -> None:
        self._function()

    def drop(self) -> None:
        if self._on_drop is not None:
            self._on_drop()


def _nobody(arrived: Arrived) -> None:
    raise AssertionError("the node does not run yet")


class Executor:
    """A pool of daemon threads that grows when all of them wait."""

    def __init__(
        self,
        name: str,
        size: int,
        core: Core,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        # Mutable. Any thread, in single atomic operations: the sets of threads. Under the lock: when threads start.
        self._name = name
        self._size = size
        self.core: Core = core
        self._core = core
        self.on_arrived: Callable[[Any], None] = _nobody
        """Handles on a worker what came over a link; set once, while the node starts."""
        self._on_thread_start = on_thread_start
        self._starts = 0
        self._workers: set[threading.Thread] = set()
        self._idle: set[threading.Thread] = set()
        self._parked: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._started = False
        self._stopping = False
        self._interrupted = False
        self._starved = False  # did the last start of a thread fail?
        self._here = threading.local()

    @property
    def waiting(self) -> int:
        """Requests and tasks that no worker has taken yet."""
        try:
            return self._core.counts().queued
        except CoreError:
            return 0

    @property
    def busy(self) -> int:
        """How many workers have something to do, parked ones included.

        Read ``waiting`` first, then this: no task escapes both, because a worker is busy before it takes a task.
        """
        return len(self._workers.copy() - self._idle)

    @property
    def size(self) -> int:
        """How many threads the pool keeps for functions that do not wait for nested calls."""
        return self._size

    @property
    def parked(self) -> int:
        """Workers that wait for nested calls."""
        return len(self._parked)

    @property
    def threads(self) -> int:
        """Live worker threads."""
        return len(self._workers)

    def start(self) -> None:
        """Begin to run tasks, including those submitted before."""
        self._started = True
        self._spawn(0)

    def renew(self) -> None:
        """Each worker calls ``on_thread_start`` once more, before its next task."""
        self._starts += 1

    def submit(self, task: Task) -> None:
        """Queue ``task``."""
        if self._stopping:
            self._drop(task)
            return
        try:
            self._core.work(task)
        except CoreError:
            self._drop(task)

    def _drop(self, task: Task) -> None:
        try:
            task.drop()
        except Exception:
            logger.exception("a task could not be dropped; please report this")

    def on_starved(self) -> None:
        """On the I/O thread: work waits, and no worker can take it."""
        self._spawn(self._size + MOST_EXTRA_THREADS)

    def _spawn(self, most: int) -> None:
        """Start a worker if there are fewer than ``most``; 0: if there are fewer than the pool's size and none is idle."""
        with self._lock:
            if self._stopping or not self._started:
                return
            if len(self._workers) >= (most or self._size) or (not most and self._idle):
                return
            thread = threading.Thread(target=self._work, name=f"farcall-worker-{self._name}", daemon=True)
            self._workers.add(thread)
            self._idle.add(thread)  # it is about to be
            try:
                thread.start()
            except RuntimeError as error:
                self._workers.discard(thread)
                self._idle.discard(thread)
                if not self._starved:
                    logger.warning("%s: calls wait for a thread: %s", self._name, error)
                self._starved = True
            else:
                self._starved = False

    def _work(self) -> None:
        me = threading.current_thread()
        self._here.thread = me
        starts = self._starts
        self._on_thread_start()
        take, idle, workers = self._core.next, self._idle, self._workers
        try:
            while True:
                idle.add(me)
                surplus = len(workers) > self._size
                try:
                    found = take(monotonic() + IDLE_END_S) if surplus else take()
                except CoreError:
                    return
                idle.discard(me)
                if found is None:
                    if self._stopping or surplus:
                        return
                    continue
                if not idle and len(workers) < self._size:
                    self._spawn(0)
                if starts != self._starts:
                    starts = self._starts
                    self._on_thread_start()
                try:
                    if hasattr(found, "kind"):
                        self.on_arrived(found)
                    elif found is _Stop:
                        return
                    elif self._stopping:
                        found.drop()
                    else:
                        found.run(False)
                except BaseException as error:
                    if not (self._interrupted and isinstance(error, SystemExit)):
                        logger.exception("a task failed outside the user's function; please report this")
                    # else `interrupt` hit just after the user's function, and the process ends anyway
                del found  # else its arguments would live until the next one
        finally:
            workers.discard(me)
            idle.discard(me)

    # ------------------------------------------------------------------ waits for nested calls

    def park(self) -> bool:
        """The calling thread begins to wait, if it is a worker that does not wait already: another may run meanwhile."""
        me = getattr(self._here, "thread", None)
        if me is None or me in self._parked:
            return False
        self._parked.add(me)
        try:
            self._core.begin_wait()
        except CoreError:
            pass  # it has stopped
        return True

    def unpark(self) -> None:
        """The wait is over."""
        self._parked.discard(self._here.thread)
        try:
            self._core.end_wait()
        except CoreError:
            pass

    # ------------------------------------------------------------------ the end

    def interrupt(self) -> None:
        """Raise SystemExit in the running functions, at their next Python instruction.

        For the end of the process: before Python 3.14, a thread that returns from torch after the interpreter has ended
        is unwound through C++ code that forbids unwinding, and so takes the process down with SIGABRT.
        """
        self._interrupted = True
        with self._lock:
            for thread in self._workers.copy():
                if thread is not threading.current_thread() and thread.ident is not None and thread not in self._idle:
                    number = ctypes.c_ulong(thread.ident)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))

    def stop(self, timeout_s: float) -> list[str]:
        """End idle workers and wait for the others; returns the names of threads still inside user functions."""
        with self._lock:
            self._stopping = True
        workers = self._workers.copy()
        # Whatever is queued is dropped by the workers that are left, or by `Core.stop`'s caller.
        for _ in workers:
            try:
                self._core.work(_Stop)
            except CoreError:
                break
        deadline = monotonic() + timeout_s
        stuck = []
        for thread in workers:
            if thread is threading.current_thread():
                continue
            if thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
            if thread.is_alive() and thread not in self._idle:
                stuck.append(thread.name)
        return stuck


class _Stop:
    """Itself a task, which wakes a worker that is to end."""

    @staticmethod
    def drop() -> None: ...
