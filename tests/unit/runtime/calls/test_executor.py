"""The pool of workers: it grows when every thread waits, and drops nothing silently."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.kit.waiting import wait_until

from farcall.core import make_core
from farcall.core.contract import STARVED
from farcall.runtime.calls.coroutines import CoroutineRunner
from farcall.runtime.calls.executor import Executor

PATIENCE_S = 60.0


class Job:
    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.done = threading.Event()
        self.dropped = threading.Event()

    def run(self, more: bool) -> None:
        self.function()
        self.done.set()

    def drop(self) -> None:
        self.dropped.set()


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor("test", 2, make_core(1 << 20, 1 << 20, 0.0))
    yield made
    assert made.stop(PATIENCE_S) == []
    wait_until(lambda: made.threads == 0)
    made.core.stop()


def look(executor: Executor) -> None:
    """What the I/O thread does."""
    for news in executor.core.events():
        assert news.kind == STARVED
        executor.on_starved()


def test_tasks_wait_for_the_start(executor: Executor) -> None:
    job = Job(lambda: None)
    executor.submit(job)
    assert (executor.waiting, executor.threads) == (1, 0)
    executor.start()
    assert job.done.wait(PATIENCE_S)


def test_a_parked_worker_does_not_count(executor: Executor) -> None:
    executor.start()
    gate = threading.Event()

    def wait_for_a_call() -> None:
        assert executor.park()
        gate.wait(PATIENCE_S)
        executor.unpark()

    waiting = [Job(wait_for_a_call) for _ in range(10)]
    last = Job(gate.set)
    for job in (*waiting, last):
        executor.submit(job)
    wait_until(lambda: (look(executor), all(job.done.is_set() for job in (last, *waiting)))[1])
    assert executor.parked == 0
    assert not executor.park()  # this thread is no worker


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
    assert executor.threads == 2
    opener = Job(gate.set)
    executor.submit(opener)
    wait_until(lambda: (look(executor), opener.done.is_set())[1])
    assert all(job.done.wait(PATIENCE_S) for job in blocked)


def test_a_task_that_raises_ends_no_worker(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    executor.start()
    executor.submit(Job(lambda: 1 / 0))
    after = Job(lambda: None)
    executor.submit(after)
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


def test_only_a_worker_inside_a_task_is_stuck(executor: Executor) -> None:
    inside, may_return = threading.Event(), threading.Event()
    executor.start()
    executor.submit(Job(lambda: (inside.set(), may_return.wait(PATIENCE_S))))
    assert inside.wait(PATIENCE_S)
    assert len(executor.stop(0.0)) == 1
    may_return.set()


def test_where_no_thread_can_be_had_a_task_waits_for_one(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = Job(lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        executor.start()
        executor.submit(job)
        for _ in range(3):
            executor.on_starved()
        assert (executor.threads, executor.busy, executor.waiting) == (0, 0, 1)
    assert caplog.text.count("can't start new thread") == 1
    executor.on_starved()
    assert job.done.wait(PATIENCE_S)


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


def test_what_comes_after_the_end_is_dropped_aloud(executor: Executor) -> None:
    executor.start()
    executor.stop(PATIENCE_S)
    late = Job(lambda: None)
    executor.submit(late)
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
    starter = threading.Thread(target=executor.start)
    starter.start()
    assert starting.wait(PATIENCE_S)
    interrupting = threading.Thread(target=executor.interrupt)
    interrupting.start()
    interrupting.join(0.1)
    assert interrupting.is_alive()
    go_on.set()
    interrupting.join(PATIENCE_S)
    assert not interrupting.is_alive()
    starter.join(PATIENCE_S)
