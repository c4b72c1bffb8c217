"""The pool of workers: it grows when every thread waits, and drops nothing silently."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.runtime.calls.coroutines import CoroutineRunner
from farcall.runtime.calls.executor import STALLED_S, TICK_S, UNKNOWN_S, Executor
from farcall.runtime.calls.parallelism import FIRST_PEACE_S
from farcall.runtime.io.timers import NEVER

PATIENCE_S = 60.0


class Job:
    def __init__(self, function: Callable[[], object], expected_s: float = UNKNOWN_S) -> None:
        self.function = function
        self.expected_s = expected_s
        self.done = threading.Event()
        self.dropped = threading.Event()

    def run(self, more: bool) -> None:
        self.function()
        self.done.set()

    def drop(self) -> None:
        self.dropped.set()


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor("test", 2, Clock().timer)
    yield made
    assert made.stop(PATIENCE_S) == []
    assert made.threads == 0


def test_tasks_wait_for_the_start(executor: Executor) -> None:
    job = Job(lambda: None)
    executor.submit(job)
    assert (executor.waiting, executor.threads) == (1, 0)
    executor.start()
    assert job.done.wait(PATIENCE_S)


def test_answers_that_were_held_back_do_not_wait_for_a_task_that_may_take_long() -> None:
    order: list[str] = []
    executor = Executor("test", 1, Clock().timer, before_idle=lambda: order.append("flush"))
    last = Job(lambda: order.append("long"))
    executor.submit(Job(lambda: order.append("brief"), expected_s=0.0))
    executor.submit(last)
    executor.start()
    assert last.done.wait(PATIENCE_S)
    assert executor.stop(PATIENCE_S) == []
    assert order[:3] == ["brief", "flush", "long"]


def test_a_parked_worker_does_not_count(executor: Executor) -> None:
    executor.start()
    gate = threading.Event()

    def wait_for_a_call() -> None:
        worker = executor.current_worker()
        assert worker is not None
        executor.park(worker)
        gate.wait(PATIENCE_S)
        executor.unpark(worker)

    waiting = [Job(wait_for_a_call) for _ in range(10)]
    for job in waiting:
        executor.submit(job)
    last = Job(gate.set)
    executor.submit(last)
    assert all(job.done.wait(PATIENCE_S) for job in (last, *waiting))


def test_the_pool_grows_when_nothing_ends(executor: Executor) -> None:
    executor.start()
    gate = threading.Event()
    begun = threading.Semaphore(0)

    def block() -> None:
        begun.release()
        gate.wait(PATIENCE_S)

    blocked = [Job(block) for _ in range(2)]
    for job in blocked:
        executor.submit(job)
        assert begun.acquire(timeout=PATIENCE_S)
    opener = Job(gate.set)
    executor.submit(opener)
    executor.look_in(0.0)
    executor.look_in(STALLED_S / 2)
    assert executor.threads == 2
    executor.look_in(2 * STALLED_S)  # time is given: nobody sleeps for it
    assert opener.done.wait(PATIENCE_S)
    assert all(job.done.wait(PATIENCE_S) for job in blocked)


class Fight:
    """Brief tasks that hold their workers until they are let go, and the processors that seem to be in use."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = executor
        self.now = self.used_s = 0.0
        self.begun = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)
        self.jobs: list[Job] = []
        monkeypatch.setattr("farcall.runtime.calls.executor.process_time", lambda: self.used_s)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self.jobs.append(Job(self._work, expected_s=0.001))
            self.executor.submit(self.jobs[-1])

    def _work(self) -> None:
        self.begun.release()
        assert self.turns.acquire(timeout=PATIENCE_S)

    def wait_for_next(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)

    def let_one_end(self) -> None:
        self.turns.release()
        self.wait_for_next()

    def look(self, processors: float, after_s: float = TICK_S) -> None:
        self.now += after_s
        self.used_s += processors * after_s
        self.executor.look_in(self.now)

    def end(self) -> None:
        for _ in self.jobs:
            self.turns.release()
        assert all(job.done.wait(PATIENCE_S) for job in self.jobs)


@pytest.fixture
def fight(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fight]:
    executor = Executor("test", 8, Clock().timer, processors=4)
    executor.start()
    made = Fight(executor, monkeypatch)
    yield made
    made.end()
    assert executor.stop(PATIENCE_S) == []


def test_brief_tasks_run_in_turn(fight: Fight) -> None:
    fight.submit(10)
    fight.wait_for_next()
    fight.look(0.0)
    assert fight.executor.threads == 1


@pytest.mark.parametrize(
    ("processors", "threads"), [((1.0, 2.0, 3.0), 4), ((0.0, 0.0, 0.0), 4), ((1.0, 1.0), 2), ((4.0, 4.0), 1)]
)
def test_a_worker_is_added_while_all_compute_or_all_sleep(
    fight: Fight, processors: tuple[float, ...], threads: int
) -> None:
    fight.submit(20)
    fight.wait_for_next()
    fight.look(0.0)
    for used in processors:
        before = fight.executor.threads
        fight.let_one_end()
        fight.look(used)
        if fight.executor.threads > before:
            fight.wait_for_next()
    assert fight.executor.threads == threads


def test_who_fights_for_the_interpreter_stands_down_until_peace_is_over(fight: Fight) -> None:
    fight.submit(20)
    fight.wait_for_next()
    fight.look(0.0)
    fight.let_one_end()
    fight.look(1.0)
    fight.wait_for_next()  # two take tasks now
    fight.let_one_end()
    fight.look(1.0)
    fight.turns.release()
    wait_until(lambda: len(fight.executor._idle) == 1)  # tasks wait, and still it rests
    fight.look(1.0)
    assert fight.executor.threads == 2
    fight.let_one_end()
    fight.look(1.0, after_s=FIRST_PEACE_S)
    fight.wait_for_next()


def test_tasks_that_wait_for_each_other_get_workers_whoever_computes(fight: Fight) -> None:
    fight.submit(5)
    fight.wait_for_next()
    fight.look(1.0)
    for _ in range(4):
        fight.look(1.0)
        fight.wait_for_next()


def test_a_task_that_raises_ends_no_worker(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    executor.start()
    executor.submit(Job(lambda: 1 / 0))
    after = Job(lambda: None)
    executor.submit(after)
    executor.look_in(0.0)
    assert after.done.wait(PATIENCE_S)
    executor.stop(PATIENCE_S)  # another worker may have run the second before the first one's end was logged
    assert "please report this" in caplog.text


def test_an_interrupt_that_comes_behind_the_users_function_is_no_noise(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def linger() -> None:
        begun.set()
        while not go_on.is_set():
            pass  # the interrupt lands here, where nothing of the user's catches it

    executor.start()
    executor.submit(Job(linger))
    assert begun.wait(PATIENCE_S)
    executor.interrupt()
    assert executor.stop(PATIENCE_S) == []
    go_on.set()
    assert caplog.text == ""


def test_a_worker_without_a_task_is_only_slow_to_end() -> None:
    resting, may_rest, inside, may_return = (threading.Event() for _ in range(4))

    def rest() -> None:
        resting.set()
        may_rest.wait(PATIENCE_S)

    def compute() -> None:
        inside.set()
        may_return.wait(PATIENCE_S)

    executor = Executor("test", 2, Clock().timer, before_idle=rest)
    executor.start()
    executor.submit(Job(lambda: None, expected_s=0.0))
    assert resting.wait(PATIENCE_S)
    assert executor.stop(0.0) == []
    may_rest.set()
    assert executor.stop(PATIENCE_S) == []

    executor = Executor("test", 2, Clock().timer)
    executor.start()
    executor.submit(Job(compute))
    assert inside.wait(PATIENCE_S)
    assert len(executor.stop(0.0)) == 1
    may_return.set()
    assert executor.stop(PATIENCE_S) == []


def test_nothing_to_do_is_nothing_to_attend_to(executor: Executor) -> None:
    executor.start()
    assert executor.look_in(1.0) == NEVER


def test_where_no_thread_can_be_had_a_task_waits_for_one(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = Job(lambda: None)
    executor.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        executor.submit(job)
        for look in range(3):
            executor.look_in(look * TICK_S)
        assert (executor.threads, executor.busy, executor.waiting) == (0, 0, 1)
    assert caplog.text.count("can't start new thread") == 1
    executor.look_in(3 * TICK_S)
    assert job.done.wait(PATIENCE_S)


def test_a_worker_counts_although_ctrl_c_cuts_its_start(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    executor.start()
    begun, gate = threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.submit(Job(lambda: (begun.set(), gate.wait(PATIENCE_S))))
    assert begun.wait(PATIENCE_S)
    assert (executor.threads, executor.busy) == (1, 1)  # else a shutdown would not wait for it
    gate.set()


def test_an_event_loop_without_a_thread_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def nothing() -> None:
        pass

    runner, ended = CoroutineRunner("test", lambda: None), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        unused = nothing()
        with pytest.raises(RuntimeError, match="new thread"):
            runner.run(unused, lambda task: None)
        unused.close()
    runner.run(nothing(), lambda task: ended.set())
    assert ended.wait(PATIENCE_S)
    runner.stop(PATIENCE_S)


def test_what_is_queued_at_the_end_or_later_is_dropped_aloud() -> None:
    executor = Executor("test", 1, Clock().timer)
    early, late = Job(lambda: None), Job(lambda: None)
    executor.submit(early)
    executor.stop(PATIENCE_S)
    executor.submit(late)
    assert early.dropped.is_set()
    assert late.dropped.is_set()


def test_an_interrupt_waits_until_a_worker_that_is_being_started_runs(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would raise it in the new thread instead of the one that starts it, which then waits for good."""
    starting, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name.startswith("farcall-worker"):
            starting.set()
            assert go_on.wait(PATIENCE_S)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", lambda *_: None)
    executor.start()
    submitting = threading.Thread(target=executor.submit, args=(Job(lambda: None),))
    submitting.start()
    assert starting.wait(PATIENCE_S)
    interrupting = threading.Thread(target=executor.interrupt)
    interrupting.start()
    interrupting.join(0.1)
    assert interrupting.is_alive()
    go_on.set()
    interrupting.join(PATIENCE_S)
    assert not interrupting.is_alive()
    submitting.join(PATIENCE_S)


@pytest.mark.parametrize("module", ["threading", "profiler"])
def test_a_destructor_that_submits_may_interrupt_the_executor(module: str) -> None:
    """A garbage collection under the lock ran a destructor that called its own node, and waited for its own lock.

    Also where it begins in the code of others, which replaces Python's and counts as the program's.
    """
    clock = Clock()
    executor = Executor("test", 2, clock.timer)
    executor.start()
    first, second = Job(lambda: None), Job(lambda: None)

    class Cyclic:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            executor.submit(second)

    def make(thread: threading.Thread, **arguments: Any) -> None:
        gc.collect()
        plainly(thread, **arguments)

    plainly = threading.Thread.__init__
    collecting = FunctionType(make.__code__, {"__name__": module, "gc": gc}, closure=make.__closure__)
    gc.collect()
    Cyclic()
    caller = threading.Thread(target=executor.submit, args=(first,), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "__init__", collecting)
        caller.start()
        caller.join(LONG_S)
    assert not caller.is_alive()
    assert first.done.wait(PATIENCE_S)
    if module == "threading":
        assert clock.due < NEVER, "the I/O thread looks whether a worker takes it"
    assert second.done.wait(PATIENCE_S)
    assert executor.stop(PATIENCE_S) == []


def test_a_destructor_that_submits_may_delay_the_start_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection in the new thread: whoever starts that waits for it, and holds the lock."""
    clock = Clock()
    executor = Executor("test", 3, clock.timer)
    executor._parallelism.most = 3  # as after a while of tasks that leave processors idle
    executor.start()
    first, second = Job(lambda: None), Job(lambda: None)
    submitted = threading.Event()

    def be_interrupted(thread: threading.Thread) -> None:
        if thread.name.startswith("farcall-worker") and not submitted.is_set():
            submitted.set()
            executor.submit(second)
        plainly(thread)

    plainly = threading.Thread._set_native_id  # type: ignore[attr-defined]
    monkeypatch.setattr(threading.Thread, "_set_native_id", be_interrupted)
    caller = threading.Thread(target=executor.submit, args=(first,), daemon=True)
    caller.start()
    caller.join(LONG_S)
    assert not caller.is_alive()
    assert first.done.wait(PATIENCE_S)
    assert clock.due < NEVER, "the I/O thread looks whether a worker takes it"
    assert second.done.wait(PATIENCE_S)
    assert executor.stop(PATIENCE_S) == []
