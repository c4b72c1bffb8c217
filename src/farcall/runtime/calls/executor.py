"""The pool of threads that run user functions.

Owns the worker threads and their task queue. Knows nothing of frames or links: a task is something to run, with an
expected run time. A *brief* task is expected to take less than BRIEF_S.

Thread rules
- ``submit`` may be called from any thread and never blocks; also from a destructor that a garbage collection runs on a
  thread which holds the lock.
- A task that the I/O thread submits wakes a worker only just before that thread sleeps (``before_sleep``): a worker
  woken earlier would only wait for the interpreter.
- Brief tasks run in turn, on no more workers than really compute in parallel: sixteen threads for sixteen small
  functions only fight for the interpreter. So a burst of them wakes one worker; while tasks wait, the I/O thread looks
  in every TICK_S (``look_in``) and wakes one more if that helps (`parallelism.py`), or lets one stand down.
- A worker that takes a task that is not brief first wakes another worker for the rest of the queue.
- The pool grows past ``size`` when progress needs it: a worker that waits for a nested call is *parked* and does not
  count, so calls may nest to any depth; and when tasks have waited STALLED_S while no task ended and no thread computed
  (functions that block in ways farcall cannot see), one thread is added, up to MOST_EXTRA_THREADS.
- Workers beyond ``size`` end after they were idle for IDLE_END_S.

A worker is in one of these states:

    state    means                                 leaves by
    idle     asleep on its own lock                submit or look_in wakes it -> hunting; too long -> ended
    hunting  takes tasks; brief ones run meanwhile another task -> running; no task, or too many hunters -> idle
    running  inside a user function                the function ends -> hunting; it waits for a call -> parked
    parked   waiting for a nested call             the call is done -> running

Over 400 lines: states and rules are one argument about one lock.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic, process_time
from typing import Protocol

from farcall.destructors import whole
from farcall.runtime.calls.parallelism import Parallelism
from farcall.runtime.io.reader import is_interrupted, reading
from farcall.runtime.io.timers import NEVER, Callback, Timer

logger: logging.Logger = logging.getLogger("farcall")

TICK_S = 0.002
STALLED_S = 0.05
BRIEF_S = 0.002
"""Tasks that are expected to take less are brief, and run in turn."""
UNKNOWN_S = NEVER
"""The expected time of tasks that were never timed."""
IDLE_END_S = 10.0
MOST_EXTRA_THREADS = 1000


class Task(Protocol):
    """One user function to run; never raises."""

    @property
    def expected_s(self) -> float:
        """How long it is expected to take."""

    def run(self, more: bool) -> None:
        """Run it. ``more``: other tasks wait behind this one, so its answer need not be flushed at once."""

    def drop(self) -> None:
        """The executor stopped before the task ran: release whatever waits for it. On any thread."""


class FunctionTask:
    """A task that runs one function of unknown run time; ``on_drop`` is called if the executor stops first."""

    __slots__ = ("_function", "_on_drop")

    expected_s = UNKNOWN_S

    def __init__(self, function: Callable[[], object], on_drop: Callable[[], object] | None = None) -> None:
        self._function = function
        self._on_drop = on_drop

    def run(self, more: bool) -> None:
        self._function()

    def drop(self) -> None:
        if self._on_drop is not None:
            self._on_drop()


class _Worker:
    """One worker thread and its state; it sleeps on ``lock``. The executor's lock guards ``hunting`` and ``parked``."""

    __slots__ = ("busy", "executor", "hunting", "lock", "parked", "thread")

    def __init__(self, executor: Executor) -> None:
        self.executor: Executor = executor
        self.lock: threading.Lock = threading.Lock()
        self.lock.acquire()
        self.busy: bool = False
        self.hunting: bool = True
        self.parked: bool = False
        self.thread: threading.Thread | None = None


class Executor:
    """A pool of daemon threads that grows when all of them wait."""

    def __init__(
        self,
        name: str,
        size: int,
        timer: Callable[[Callback], Timer],
        on_io_thread: Callable[[], bool] = lambda: False,
        before_idle: Callable[[], object] = lambda: None,
        on_thread_start: Callable[[], None] = lambda: None,
        processors: int = 0,
    ) -> None:
        # Mutable, under the lock: the sets of workers and their counts. Without it: ``tasks``, whose operations are
        # atomic; ``_finished``, where a lost update does no harm; the ``_seen`` fields, the I/O thread's own.
        self._name = name
        self._size = size
        self._timer = timer(self.look_in)
        self._on_io_thread = on_io_thread
        self._before_idle = before_idle
        self._on_thread_start = on_thread_start
        self._starts = 0
        self.tasks: deque[Task] = deque()
        """Tasks that no worker has taken yet; other classes only look whether it is empty."""
        # Re-entrant: while a thread is made under it, a garbage collection may run a destructor that submits a task.
        # `submit` does not notice that where the collection began in code of others, as in a profiler's `Thread.start`.
        self._lock = threading.RLock()
        self._starting: threading.Thread | None = None  # under the lock: the thread that `_spawn` waits for
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._hunters = 0
        self._parallelism = Parallelism(processors)
        self._parked = 0
        self._finished = 0
        self._started = False
        self._stopping = False
        self._interrupted = False
        self._starved = False  # did the last start of a thread fail?
        self._seen_finished = -1
        self._seen_at = 0.0
        self._seen_used_s = 0.0
        self._local = threading.local()

    @property
    def waiting(self) -> int:
        """Tasks that no worker has taken yet."""
        return len(self.tasks)

    @property
    def busy(self) -> int:
        """How many workers have a task, parked ones included, or are about to look for one.

        Read ``waiting`` first, then this: no task escapes both, because a worker is busy before it takes a task.
        """
        with self._lock:
            return sum(worker.busy for worker in list(self._workers))

    @property
    def at_peace(self) -> bool:
        """Did brief tasks slow each other down lately, so that one thread runs them best?"""
        return monotonic() < self._parallelism.peace_until

    @property
    def size(self) -> int:
        """How many threads the pool keeps for functions that do not wait for nested calls."""
        return self._size

    @property
    def parked(self) -> int:
        """Workers that wait for nested calls."""
        return self._parked

    @property
    def threads(self) -> int:
        """Live worker threads."""
        return len(self._workers)

    def start(self) -> None:
        """Begin to run tasks, including those submitted before."""
        with self._lock:
            self._started = True
        if self.tasks:
            self._rouse()

    def renew(self) -> None:
        """Each worker calls ``on_thread_start`` once more, before its next task."""
        self._starts += 1

    def submit(self, task: Task) -> None:
        """Queue ``task``."""
        self.tasks.append(task)
        if self._on_io_thread():
            return  # before_sleep wakes workers
        starting = self._starting
        if (reading.interrupted is not None and is_interrupted()) or (
            starting is not None and starting.ident == get_ident()
        ):
            # A destructor. This thread may hold the lock, or be half-way through what that guards; or whoever holds the
            # lock waits for this thread to begin. The I/O thread wakes a worker.
            self._timer.at(monotonic() + TICK_S)
        elif self._hunters < self._parallelism.most:
            self._rouse()
        elif self._timer.due == NEVER:  # else it is set, and keeps looking in as long as tasks wait
            self._timer.at(monotonic() + TICK_S)

    def before_sleep(self) -> bool:
        """On the I/O thread, about to sleep: wake workers for the tasks that wait. True: workers have work."""
        if self.tasks:
            if self._timer.due == NEVER:
                self._timer.at(monotonic() + TICK_S)
            for _ in range(min(len(self.tasks), self._parallelism.most - self._hunters)):
                self._rouse()
            return True
        return self._hunters > 0

    @whole  # else Ctrl-C could leave a worker that counts as hunting, and never began
    def _rouse(self) -> None:
        """Wake an idle worker, or start one if the pool may grow; else leave the tasks to `look_in`."""
        with self._lock:
            if self._stopping or not self._started:
                stopped = self._stopping
            elif self._idle:
                stopped = False
                worker = self._idle.pop()
                worker.hunting = True
                self._hunters += 1
                worker.lock.release()
            elif len(self._workers) - self._parked < self._size:
                stopped = False
                self._spawn()
            else:
                stopped = False
                self._timer.at(monotonic() + TICK_S)
        if stopped:
            self._drop_tasks()

    def _drop_tasks(self) -> None:
        """Drop the queued tasks, after the end: no worker will run them, and their waiters must not wait for ever."""
        while True:
            try:
                task = self.tasks.popleft()
            except IndexError:
                return
            try:
                task.drop()
            except Exception:
                logger.exception("a task could not be dropped; please report this")

    def _spawn(self) -> None:
        """Under the lock: start a worker. If the system has no thread left, tasks wait for a worker to become free."""
        worker = _Worker(self)
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name=f"farcall-worker-{self._name}", daemon=True
        )
        # Counted before it runs: Ctrl-C may come while `start` waits for the thread's first sign of life.
        self._workers.add(worker)
        self._hunters += 1
        self._starting = worker.thread
        try:
            worker.thread.start()
        except RuntimeError as error:
            self._discard(worker)
            if not self._starved:
                logger.warning("%s: calls wait for a thread: %s", self._name, error)
            self._starved = True
            self._timer.at(monotonic() + TICK_S)
        else:
            self._starved = False
        finally:
            self._starting = None

    def look_in(self, now: float) -> float:
        """On the I/O thread: rouse workers for tasks that wait too long."""
        if not self.tasks or not self._started:
            self._seen_finished = -1
            return NEVER
        if self._seen_finished < 0:  # the first look at these tasks
            self._parallelism.begin(now, process_time())
            if self._hunters == 0:
                self._rouse()
        else:
            active = len(self._workers) - len(self._idle) - self._parked
            has_progress = self._finished != self._seen_finished
            if self._parallelism.wants_one_more(now, process_time(), active, has_progress):
                self._rouse()
        if self._finished != self._seen_finished:
            self._seen_finished = self._finished
            self._seen_at = now
            self._seen_used_s = process_time()
        elif now - self._seen_at >= STALLED_S:
            # No task has ended for a while. If no thread computes either, all may be blocked in a way we cannot see, on
            # each other's results even: add a thread.
            used_s = process_time() - self._seen_used_s
            computing = used_s > 0.5 * (now - self._seen_at)
            self._seen_at = now
            self._seen_used_s += used_s
            with self._lock:
                room = len(self._workers) < self._size + MOST_EXTRA_THREADS
                if not self._idle and not self._stopping and not computing and room:
                    self._spawn()
        return now + TICK_S

    def _work(self, worker: _Worker) -> None:
        self._local.worker = worker
        starts = self._starts
        self._on_thread_start()
        tasks = self.tasks
        while True:
            worker.busy = True  # before it takes a task: see ``busy``
            try:
                task = tasks.popleft()
            except IndexError:
                if not self._rest(worker):
                    return
                continue
            if starts != self._starts:
                starts = self._starts
                self._on_thread_start()
            if task.expected_s >= BRIEF_S:
                self._before_idle()  # flush held-back answers first: this task may take long
                with self._lock:
                    worker.hunting = False
                    self._hunters -= 1
                    wake_another = bool(tasks) and self._hunters == 0
                if wake_another:
                    self._rouse()
            try:
                task.run(bool(tasks))
            except BaseException as error:
                if self._interrupted and isinstance(error, SystemExit):
                    with self._lock:  # `interrupt` hit just after the user's function, and the process ends anyway
                        self._discard(worker)
                    return
                logger.exception("a task failed outside the user's function; please report this")
            del task  # else its arguments would live until the next task
            self._finished += 1
            if not worker.hunting:
                with self._lock:
                    worker.hunting = True
                    self._hunters += 1
            elif self._hunters > self._parallelism.most and not self._rest(worker, while_others_hunt=True):
                return

    def _rest(self, worker: _Worker, while_others_hunt: bool = False) -> bool:
        """Sleep until woken, unless tasks wait and no other worker hunts for them. False: the worker is to end."""
        worker.busy = False
        self._before_idle()
        with self._lock:
            if self._stopping:
                self._discard(worker)
                return False
            if self.tasks and not (while_others_hunt and self._hunters > 1):
                return True
            worker.hunting = False
            self._hunters -= 1
            self._idle.append(worker)
        surplus = len(self._workers) > self._size
        while not worker.lock.acquire(True, IDLE_END_S if surplus else -1):
            with self._lock:
                if worker in self._idle:
                    self._idle.remove(worker)
                    self._workers.discard(worker)
                    return False
                # Another thread took this worker off the list, and is about to release its lock.
        return True

    def _discard(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        if worker.hunting:
            worker.hunting = False
            self._hunters -= 1

    def current_worker(self) -> _Worker | None:
        """The worker of the calling thread; None on a thread of another owner."""
        return getattr(self._local, "worker", None)

    def park(self, worker: _Worker) -> None:
        """``worker`` begins to wait for a nested call: make sure that another one takes the queued tasks."""
        with self._lock:
            worker.parked = True
            self._parked += 1
            if worker.hunting:
                worker.hunting = False
                self._hunters -= 1
        self._before_idle()
        if self.tasks and self._hunters == 0:
            self._rouse()

    def unpark(self, worker: _Worker) -> None:
        """The nested call is done."""
        with self._lock:
            worker.parked = False
            self._parked -= 1

    def interrupt(self) -> None:
        """Raise SystemExit in the running functions, at their next Python instruction.

        For the end of the process: before Python 3.14, a thread that returns from torch after the interpreter has ended
        is unwound through C++ code that forbids unwinding, and so takes the process down with SIGABRT.
        """
        self._interrupted = True
        # Under the lock, which excludes `_spawn`. Until a new thread runs, Python lists it under its starter's ident:
        # the exception would hit the new thread, which would end before it reports its start, and the starter would
        # wait for that report for ever.
        with self._lock:
            for worker in list(self._workers):
                thread = worker.thread
                if thread is not None and thread is not threading.current_thread() and thread.ident is not None:
                    number = ctypes.c_ulong(thread.ident)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))

    def stop(self, timeout_s: float) -> list[str]:
        """End idle workers and wait for the others; returns the names of threads still inside user functions."""
        with self._lock:
            self._stopping = True
            idle, self._idle = self._idle, []
            for worker in idle:
                worker.hunting = True
                self._hunters += 1
                worker.lock.release()
            workers = list(self._workers)
        self._drop_tasks()
        deadline = monotonic() + timeout_s
        stuck = []
        for worker in workers:
            thread = worker.thread
            if thread is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - monotonic()))
            # A live thread without a task is not stuck, only slow to end on a busy machine.
            if thread.is_alive() and worker.busy and worker not in idle:
                stuck.append(thread.name)
        return stuck
