"""The supervisor: the workers of one cluster, from their start through an engine to their end.

Owns the lives of all workers (`lives.py`), the engine, and the thread that acts: it starts and ends processes as the
lives say, and wakes the threads that wait. News of the engine and the membership come on threads of theirs; this one
handles them, in order, and drops those of an earlier life. It also tells the user of each worker that fails, unless
somebody waits for its first start, and raises an exception (`launch`, `Cluster.grow`).

    news                                                event
    the member joined                                   joined; then it is prepared, on a thread of its own
    preparing it returned / raised                      prepared / failed, and its process is ended
    its process ended with 0 while it ran               finished
    its process ended otherwise                         failed
    the member is dead, and its process has not ended   failed, and its process is ended
      `EXIT_S` later
    it did not join within ``start_timeout_s``          failed, and its process is ended

Thread rules
- ``_lock`` guards the table of workers; its condition is notified at each change. The engine is called without it, by
  the supervisor's thread alone until `close`, which ends that thread first.
- Nothing here calls the user's code but ``prepare``, each time on a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from farcall.errors import PeerDead, RpcError
from farcall.launcher.engine import Engine, EngineError, ProcessState, WorkerSpec
from farcall.launcher.lives import Event, Life, Restarts, State
from farcall.launcher.output import LastLines
from farcall.runtime.membership.events import MemberEvent

logger: logging.Logger = logging.getLogger("farcall")

LAST_LINES = 40
"""Kept of each worker: enough for a traceback."""
END_S = 3.0
"""How long a worker may take to end once it was told to."""
EXIT_S = 1.0
"""How long a dead member's process may take to end: its exit code says more than the end of its connections."""
_TICK_S = 0.2
_NEVER_STARTED = ProcessState("queued", "its engine starts it")


class Crew(Protocol):
    """The cluster, as its supervisor sees it."""

    def make_spec(self, name: str, rank: int, life: int) -> WorkerSpec:
        """The spec of a new process."""

    def prepare(self, name: str) -> None:
        """A member is there: bring it into its state. May block, may raise."""

    def bury(self, incarnation: str) -> None:
        """Tell the members that this process is dead: it is about to be replaced. Must not raise."""

    def dismiss(self, name: str) -> None:
        """Ask the worker to end in good order. Must not raise."""

    def show(self, spec: WorkerSpec, data: bytes) -> None:
        """Show the output of a worker; empty: the worker writes no more."""

    def tick(self) -> None:
        """Do what is due; called every moment, on the supervisor's thread."""


class Supervised:
    """One worker, as the supervisor knows it. Changed under the supervisor's lock."""

    def __init__(self, name: str, rank: int, restarts: Restarts) -> None:
        self.name: str = name
        self.rank: int = rank
        self.life: Life = Life(restarts)
        self.spec: WorkerSpec | None = None
        self.process: ProcessState = _NEVER_STARTED
        self.incarnation: str | None = None
        self.last_lines: LastLines = LastLines(LAST_LINES)
        self.late_at: float | None = None
        self.has_left: bool = False
        self.is_awaited: bool = True
        """Does somebody wait for its first start?"""
        self.loss: str = ""
        """Why the membership lost it, if it did."""
        self.error: BaseException | None = None
        """The exception of `Crew.prepare`."""

    @property
    def state(self) -> State:
        return self.life.state

    @property
    def has_process(self) -> bool:
        """Has its present life a process, as far as the engine knows?"""
        return self.spec is not None and self.process.phase != "ended"

    @property
    def progress(self) -> str:
        """For people who wait for it."""
        if self.state is not State.STARTING:
            return str(self.state)
        return f"joining, {self.process}" if self.process.phase == "running" else str(self.process)

    def account(self) -> str:
        """For an error: its progress, and the last lines of its output."""
        if self.state not in (State.STARTING, State.DEAD):
            return self.progress
        said = self.life.why if self.state is State.DEAD else self.progress
        lines = "\n".join(self.last_lines.texts()).rstrip()
        return f"{said}; its last lines:\n{lines}" if lines else said


class Supervisor:
    """The workers of a cluster. Its thread runs from the constructor to `close`."""

    def __init__(self, engine: Engine, crew: Crew, *, restarts: Restarts, start_timeout_s: float) -> None:
        self._engine = engine
        self._crew = crew
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Condition()
        self._workers: dict[str, Supervised] = {}
        self._condemned: dict[WorkerSpec, float] = {}  # processes to end, and until when they may do so by themselves
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the thread ends
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="farcall-supervisor", daemon=True)
        self._thread.start()

    def add(self, workers: Iterable[tuple[str, int]]) -> list[Supervised]:
        """Start these, by name and rank."""
        with self._lock:
            if self._closing:
                raise RpcError("this cluster has ended: start another one with farcall.launch")
            added = [Supervised(name, rank, self._restarts) for name, rank in workers]
            self._workers.update((worker.name, worker) for worker in added)
        self._inbox.put(lambda: self._start(added))
        return added

    def remove(self, names: Iterable[str]) -> None:
        """End these; they do not come back."""
        with self._lock:
            asked = [name for name in names if self._remove(self._workers[name])]
            self._lock.notify_all()
        self._inbox.put(lambda: None)
        self._dismiss(asked)

    def stop_waiting(self, workers: Iterable[Supervised]) -> None:
        """Nobody waits for these any more, as a quorum runs: the log tells of the failures of the others."""
        with self._lock:
            for worker in workers:
                worker.is_awaited = False
                if worker.state is State.DEAD and not worker.life.has_run:
                    self._log_failure(worker)

    def workers(self) -> list[Supervised]:
        """All that were ever added, by rank."""
        with self._lock:
            return sorted(self._workers.values(), key=lambda worker: worker.rank)

    def wait(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for ``is_done``, called under the lock at each change; False after ``timeout_s``."""
        with self._lock:
            done = self._lock.wait_for(lambda: self._failure is not None or is_done(), timeout_s)
            if self._failure is not None:
                raise self._failure
            return done

    def close(self, patient: bool) -> None:
        """End all workers; ``patient``: they may end by themselves first. Returns when no process is left.

        May be called again after an interruption.
        """
        with self._lock:
            self._closing = True
            asked = [one.name for one in self._workers.values() if not one.life.is_over and self._remove(one)]
        self._inbox.put(lambda: None)
        try:
            if patient:
                self._dismiss(asked)
                with self._lock:
                    processes = self._workers.values()
                    self._lock.wait_for(
                        lambda: self._failure is not None or not any(one.has_process for one in processes), END_S
                    )
        finally:
            self._inbox.put(None)
            self._thread.join(END_S)
            self._engine.close()

    def _dismiss(self, names: Iterable[str]) -> None:
        # Without the lock: a full link makes its callers wait, and the thread that reads output needs the lock.
        for name in names:
            self._crew.dismiss(name)

    # News, on any thread.

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        self._inbox.put(lambda: self._on_process(spec, state))

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        with self._lock:
            worker = self._workers.get(spec.name)
            if worker is not None and worker.spec is spec:
                worker.last_lines.write(data)
        self._show(spec, data)

    def on_member(self, event: MemberEvent) -> None:
        self._inbox.put(lambda: self._on_member(event))

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                try:
                    handle = self._inbox.get(timeout=_TICK_S)
                except Empty:
                    pass
                else:
                    if handle is None:
                        return
                    handle()
                self._look_at_clock()
                self._tick()
        except BaseException as error:
            logger.exception("the supervisor of the workers failed")
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    # A full disk, or a terminal that went away, must end neither this thread nor the engine's.

    def _show(self, spec: WorkerSpec, data: bytes) -> None:
        try:
            self._crew.show(spec, data)
        except (OSError, ValueError) as error:
            logger.info("cannot show the output of %s: %s", spec.name, error)

    def _tick(self) -> None:
        try:
            self._crew.tick()
        except (OSError, ValueError) as error:
            logger.info("cannot show the state of the workers: %s", error)

    def _start(self, workers: Sequence[Supervised]) -> None:
        now = monotonic()
        with self._lock:
            started = [worker for worker in workers if worker.state is State.STARTING]
            before = [worker.incarnation for worker in started if worker.incarnation is not None]
            for worker in started:
                worker.spec = self._crew.make_spec(worker.name, worker.rank, worker.life.number)
                worker.process = _NEVER_STARTED
                worker.incarnation = None
                worker.last_lines.clear()
                worker.late_at = now + self._start_timeout_s
                worker.has_left = False
                worker.loss = ""
            specs = [worker.spec for worker in started if worker.spec is not None]
        for incarnation in before:
            self._crew.bury(incarnation)
        try:
            self._engine.start(specs, self)
        except (EngineError, OSError) as error:
            for spec in specs:
                self._on_process(spec, ProcessState("ended", str(error)))

    def _on_process(self, spec: WorkerSpec, state: ProcessState) -> None:
        with self._lock:
            worker = self._workers.get(spec.name)
            if worker is not None and worker.spec is spec:
                worker.process = state
                if state.phase == "ended":
                    # Where the engine knows no exit code, a member that said goodbye has ended well.
                    ended_well = worker.has_left if state.exit_code is None else state.exit_code == 0
                    is_done = worker.state is State.RUNNING and ended_well
                    self._tell(worker, Event.FINISHED if is_done else Event.FAILED, str(state))
            if state.phase == "ended":
                self._condemned.pop(spec, None)
            self._lock.notify_all()
        if state.phase == "ended":
            self._show(spec, b"")

    def _on_member(self, event: MemberEvent) -> None:
        with self._lock:
            worker = self._workers.get(event.worker.name)
            if worker is None:
                if event.kind == "dead":
                    logger.warning("driver: lost %s: %s", event.worker.name, event.why)
                return
            if event.kind == "joined" and worker.state is State.STARTING:
                worker.incarnation = event.incarnation
                worker.late_at = None
                self._tell(worker, Event.JOINED)
                name, arguments = f"farcall-prepare-{worker.name}", (worker, worker.life.number)
                threading.Thread(target=self._prepare, args=arguments, name=name, daemon=True).start()
            elif event.kind == "left" and worker.incarnation == event.incarnation:
                worker.has_left = True
                self._condemn(worker, END_S)  # a process that is no member has nothing left to do
            elif event.kind == "dead" and worker.incarnation == event.incarnation:
                self._lose(worker, event.why)

    def _prepare(self, worker: Supervised, life: int) -> None:
        try:
            self._crew.prepare(worker.name)
        except BaseException as error:
            failure = error
            self._inbox.put(lambda: self._on_prepared(worker, life, failure))
        else:
            self._inbox.put(lambda: self._on_prepared(worker, life, None))

    def _on_prepared(self, worker: Supervised, life: int, error: BaseException | None) -> None:
        with self._lock:
            if worker.life.number != life:
                return
            if error is None:
                self._tell(worker, Event.PREPARED)
            elif worker.state is State.PREPARING:
                worker.error = error
                if isinstance(error, PeerDead):
                    self._lose(worker, str(error))
                else:
                    self._tell(worker, Event.FAILED, f"could not be prepared: {type(error).__name__}: {error}")
                    self._condemn(worker, 0.0)

    def _look_at_clock(self) -> None:
        """Start workers whose pause is over; give up late ones; kill condemned ones."""
        now = monotonic()
        with self._lock:
            for worker in self._workers.values():
                if worker.late_at is not None and now >= worker.late_at and worker.state is State.STARTING:
                    why = f"did not join within {self._start_timeout_s:g} s: {worker.progress}"
                    self._tell(worker, Event.FAILED, why)
                    self._condemn(worker, 0.0)
            hopeless = [spec for spec, until in self._condemned.items() if now >= until]
            for spec in hopeless:
                del self._condemned[spec]
                worker = self._workers[spec.name]
                if worker.spec is spec and worker.loss:
                    self._tell(worker, Event.FAILED, worker.loss)
            due = [one for one in self._workers.values() if one.life.due_at is not None and now >= one.life.due_at]
            for worker in due:
                self._tell(worker, Event.DUE)
        if hopeless:
            self._engine.end(hopeless)
        if due:
            self._start(due)

    # Under the lock.

    def _tell(self, worker: Supervised, event: Event, why: str = "") -> None:
        before = worker.state
        if worker.life.handle(event, monotonic(), why):
            logger.info("%s: %s -> %s%s", worker.name, before, worker.state, f" ({why})" if why else "")
            if event is Event.FAILED and (worker.life.has_run or not worker.is_awaited):
                self._log_failure(worker)
            self._lock.notify_all()

    def _log_failure(self, worker: Supervised) -> None:
        most = self._restarts.most
        if worker.state is State.BACKING_OFF:
            then = f"restarting it ({worker.life.number + 1} of {most})"
        elif not worker.life.has_run:
            then = "it is not restarted: it has never run"
        elif most:
            then = f"it is not restarted again (max_restarts={most})"
        else:
            then = 'it is not restarted (restart="never")'
        logger.warning("driver: %s %s; %s", worker.name, worker.life.why, then)

    def _remove(self, worker: Supervised) -> bool:
        """Have the worker end. True: it is a member, so it can be asked to."""
        is_member = worker.state in (State.PREPARING, State.RUNNING)
        self._tell(worker, Event.REMOVED)
        self._condemn(worker, END_S if is_member else 0.0)
        return is_member

    def _lose(self, worker: Supervised, why: str) -> None:
        """The member is dead: it fails when its process has ended, or after `EXIT_S`."""
        worker.loss = f"was lost: {why}"
        self._condemn(worker, EXIT_S)

    def _condemn(self, worker: Supervised, patience_s: float) -> None:
        """Have its process ended, unless it ends by itself in time."""
        if worker.spec is not None and worker.has_process:
            until = monotonic() + patience_s
            self._condemned[worker.spec] = min(until, self._condemned.get(worker.spec, until))
