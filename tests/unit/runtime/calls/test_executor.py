"""The pool of workers: it grows when every thread waits, and drops nothing silently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.kit.clock import Clock

from farcall.runtime.calls.executor import STALLED_S, Executor
from farcall.runtime.io.timers import NEVER

PATIENCE_S = 20.0


class Job:
    def __init__(self, function: Callable[[], object], quick: bool = False) -> None:
        self.function = function
        self.quick = quick
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
    assert begun.wait(10)
    executor.interrupt()
    assert executor.stop(10.0) == []
    go_on.set()
    assert caplog.text == ""


def test_nothing_to_do_is_nothing_to_attend_to(executor: Executor) -> None:
    executor.start()
    assert executor.look_in(1.0) == NEVER


def test_what_is_queued_at_the_end_or_later_is_dropped_aloud() -> None:
    executor = Executor("test", 1, Clock().timer)
    early, late = Job(lambda: None), Job(lambda: None)
    executor.submit(early)
    executor.stop(PATIENCE_S)
    executor.submit(late)
    assert early.dropped.is_set()
    assert late.dropped.is_set()
