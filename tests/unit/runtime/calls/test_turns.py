"""The mailbox of an object: whose turn it is. One thread plays all parts."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

from farcall.errors import Cancelled, RpcTimeout
from farcall.runtime.calls.coroutines import Concluded
from farcall.runtime.calls.executor import Task
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.calls.turns import Turns
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER


class Call:
    """A request that notes what happens to it."""

    def __init__(self, log: list[str], name: str, work: Callable[[], None] = lambda: None) -> None:
        self._log = log
        self._name = name
        self._work = work

    def run(self, more: bool) -> None:
        self._log.append(self._name)
        self._work()

    def drop(self) -> None:
        self._log.append(f"dropped {self._name}")


def same(item: Any) -> Any:
    return item


def a_mailbox() -> tuple[Turns, list[Task], list[str]]:
    submitted: list[Task] = []
    turns = Turns(submitted.append)
    return turns, submitted, []


def run_all(submitted: list[Task]) -> None:
    while submitted:
        submitted.pop(0).run(False)


def test_nothing_runs_before_the_object_is_there() -> None:
    turns, submitted, log = a_mailbox()
    assert not turns.enter(Call(log, "a"))
    assert not turns.enter(Call(log, "b"))
    assert not submitted
    turns.begin()
    assert submitted == [turns]  # once: the second has its turn after the first
    run_all(submitted)
    assert log == ["a", "b"]


def test_a_free_mailbox_is_run_by_whoever_brought_the_request() -> None:
    turns, submitted, log = a_mailbox()
    turns.begin()
    assert turns.enter(Call(log, "a"))
    assert not turns.enter(Call(log, "b"))
    assert not submitted
    turns.run(False)
    assert (log, submitted) == (["a"], [turns])
    run_all(submitted)
    assert log == ["a", "b"]
    assert turns.enter(Call(log, "c"))


def test_requests_that_come_while_one_runs_wait() -> None:
    turns, submitted, log = a_mailbox()
    turns.begin()

    def bring_another() -> None:
        assert not turns.enter(Call(log, "b"))
        log.append("end of a")

    assert turns.enter(Call(log, "a", bring_another))
    turns.run(False)
    run_all(submitted)
    assert log == ["a", "end of a", "b"]


def test_the_holder_of_the_turn_is_known() -> None:
    turns, _, log = a_mailbox()
    request = a_request("count", NEVER)
    holders: list[object] = []

    def count() -> Any:
        holders.append(turns.holder)
        yield 1

    outer = CURRENT.set(request)
    try:
        items = turns.items(count(), same, nullcontext, Gate())
        turns.begin()
        assert turns.holder is None
        assert list(items) == [1]
        assert holders == [request]
        assert turns.enter(Call(log, "a call"))
        assert not turns.enter(Call(log, "another"))
        assert turns.waiting == 1
    finally:
        CURRENT.reset(outer)


def test_an_end_drops_all_that_wait_without_recursion() -> None:
    turns, submitted, log = a_mailbox()
    for number in range(5000):
        turns.enter(Call(log, str(number)))
    turns.begin()
    submitted.pop().drop()
    assert log == [f"dropped {number}" for number in range(5000)]
    assert turns.enter(Call(log, "later"))


def test_an_iterator_has_a_turn_for_each_item() -> None:
    turns, submitted, log = a_mailbox()
    turns.begin()

    def count() -> Any:
        try:
            for number in range(10):
                assert not turns.enter(Call(log, f"after {number}"))  # within a turn: others wait
                yield number
        finally:
            log.append("closed")

    items = turns.items(count(), same, nullcontext, Gate())
    for number in range(3):
        assert next(items) == number
        run_all(submitted)
    assert log == ["after 0", "after 1", "after 2"]
    items.close()  # type: ignore[attr-defined]
    assert log[-1] == "closed"
    assert turns.enter(Call(log, "later"))


def test_an_item_is_taken_in_its_turn() -> None:
    turns, submitted, log = a_mailbox()
    turns.begin()

    def take(item: int) -> int:
        assert not turns.enter(Call(log, f"after {item}"))  # within a turn: others wait
        return -item

    taken = []
    for item in turns.items(range(3), take, nullcontext, Gate()):
        taken.append(item)
        run_all(submitted)
    assert (taken, log) == ([0, -1, -2], ["after 0", "after 1", "after 2"])


@pytest.mark.parametrize("end", ["returns", "fails", "is cancelled", "never begins", "fails to conclude"])
def test_the_outcome_of_a_coroutine_is_taken_in_its_last_turn(end: str) -> None:
    outcomes: list[object] = []

    async def play() -> None:
        turns, submitted, log = a_mailbox()
        turns.begin()
        event = asyncio.Event()

        async def method() -> str:
            await event.wait()
            if end == "fails":
                raise ValueError
            return "value"

        def conclude(outcome: Any) -> None:
            if end != "never begins":
                assert not turns.enter(Call(log, "later"))  # within a turn: others wait
            try:
                outcomes.append(outcome.result())
            except BaseException as error:
                outcomes.append(type(error))
            if end == "fails to conclude":
                raise ZeroDivisionError

        concluded = Concluded(method(), conclude)
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            tasks.append(asyncio.get_running_loop().create_task(turns.steps(concluded, within=True)))
            tasks[0].add_done_callback(concluded.on_task)

        assert turns.enter(Call(log, "begin", begin))
        turns.run(False)
        if end != "never begins":
            await asyncio.sleep(0)
        event.set()
        if end in ("is cancelled", "never begins"):
            tasks[0].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        run_all(submitted)
        assert log == ["begin", "later"][: 1 + (end != "never begins")]
        assert turns.enter(Call(log, "last")), "the turn is free in the end"
        if end == "fails to conclude":
            assert isinstance(tasks[0].exception(), ZeroDivisionError)

    asyncio.run(asyncio.wait_for(play(), LONG_S))
    error = {"fails": ValueError, "is cancelled": asyncio.CancelledError, "never begins": asyncio.CancelledError}
    assert outcomes == [error.get(end, "value")]


class Collecting(deque[Any]):
    """A queue at whose every change a garbage collection begins, amid the mailbox's own code."""

    def append(self, item: Any) -> None:
        super().append(item)
        gc.collect()

    def popleft(self) -> Any:
        found = super().popleft()
        gc.collect()
        return found


class Caller:
    """Only a garbage collection ends it; then it calls."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.itself = self
        self.call = call

    def __del__(self) -> None:
        self.call()


def test_a_destructor_may_call_the_object_while_its_thread_changes_the_mailbox() -> None:
    turns, submitted, log = a_mailbox()
    turns._waiting = Collecting()

    def call(name: str) -> None:
        if turns.enter(Call(log, name)):
            submitted.append(turns)

    def play() -> None:
        Caller(lambda: call("from the append"))
        call("a")
        Caller(lambda: call("from the popleft"))
        turns.begin()
        run_all(submitted)
        call("last")
        run_all(submitted)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(AT_ONCE_S)
    assert not thread.is_alive(), "it waits for its own lock"
    assert log == ["a", "from the append", "from the popleft", "last"]


def a_request(name: str, deadline: float) -> Any:
    caller = SimpleNamespace(name="w7")
    request = SimpleNamespace(function_name=name, caller=caller, deadline=deadline, cancelled=False)
    request.served = request
    return request


def items_behind_another(request: Any, log: list[str]) -> tuple[Turns, Any, Gate]:
    """A generator that has made one item for ``request``, while ``slow`` has the object."""
    turns, _, _ = a_mailbox()
    turns.begin()

    def count() -> Any:
        try:
            yield 1
            yield 2
        finally:
            log.append("closed")

    outer = CURRENT.set(request)
    gate = Gate()
    items = turns.items(count(), same, nullcontext, gate)
    assert next(items) == 1
    slow: Any = Call(log, "slow")
    slow.served = a_request("slow", NEVER)
    assert turns.enter(slow)
    CURRENT.reset(outer)
    return turns, items, gate


def test_an_iterator_waits_for_its_turn_until_its_calls_deadline() -> None:
    log: list[str] = []
    request = a_request("count", monotonic() - 1.0)
    turns, items, _ = items_behind_another(request, log)
    outer = CURRENT.set(request)
    with pytest.raises(RpcTimeout, match=r"count\(\) waited for its turn .*: slow\(\) for w7 has the object"):
        next(items)
    CURRENT.reset(outer)
    assert log == [], "the generator is closed in a turn"
    turns.run(False)
    turns.run(False)
    assert log == ["slow", "closed"]
    assert turns.enter(Call(log, "later"))


def test_an_iterator_whose_call_is_cancelled_does_not_wait_for_its_turn() -> None:
    log: list[str] = []
    request = a_request("count", NEVER)
    turns, items, gate = items_behind_another(request, log)
    failures: list[BaseException] = []

    def go_on() -> None:
        CURRENT.set(request)
        try:
            next(items)
        except Cancelled as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    wait_until(lambda: turns.waiting == 1)
    request.cancelled = True
    gate.open()
    thread.join(LONG_S)
    assert failures
    turns.run(False)
    turns.run(False)
    assert log == ["slow", "closed"]


async def _in_turns(seed: int) -> None:
    """Coroutines and requests at one object: no two steps at once, first steps in order, nobody left behind."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    turns, log = Turns(lambda task: loop.call_soon(lambda: task.run(False)) and None), []
    turns.begin()
    inside = 0
    began: list[int] = []
    tasks: list[asyncio.Task[Any]] = []

    def enter() -> None:
        nonlocal inside
        inside += 1
        assert inside == 1

    def leave() -> None:
        nonlocal inside
        inside -= 1

    async def method(number: int, steps: int) -> int:
        began.append(number)
        try:
            for _ in range(steps):
                enter()
                leave()
                await asyncio.sleep(rng.choice((0, 0, 0.0001)))
        except asyncio.CancelledError:
            enter()
            leave()
            raise
        return number

    def request(number: int) -> Call:
        kind = rng.randrange(2)

        def plain() -> None:
            enter()
            began.append(number)
            leave()

        def coroutine() -> None:
            tasks.append(loop.create_task(turns.steps(method(number, rng.randrange(4)), within=True)))

        return Call(log, str(number), coroutine if kind else plain)

    for number in range(60):
        if turns.enter(request(number)):
            turns.run(False)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if tasks and rng.random() < 0.1:
            rng.choice(tasks).cancel()
    while len(log) < 60 or not all(task.done() for task in tasks):
        await asyncio.sleep(0)
    cancelled_unbegun = set(range(60)) - set(began)
    assert began == sorted(began), "first steps are in order"
    assert all(task.cancelled() for task in tasks if task.cancelled() or task.exception())
    assert len(cancelled_unbegun) <= sum(task.cancelled() for task in tasks)
    assert turns.enter(Call(log, "later")), "the turn is free in the end"


def test_coroutines_and_requests_never_run_at_once_and_begin_in_order() -> None:
    for seed in range(30):
        asyncio.run(asyncio.wait_for(_in_turns(seed), 60))


def test_a_cancelled_coroutine_that_waits_for_its_turn_hears_of_it_in_its_turn() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        turns, log = Turns(lambda task: task.run(False)), []
        turns.begin()
        event = asyncio.Event()

        async def method() -> None:
            log.append("begun")
            try:
                await event.wait()
            finally:
                log.append("ended")

        tasks: list[asyncio.Task[None]] = []
        first = Call(log, "a", lambda: tasks.append(loop.create_task(turns.steps(method(), within=True))))
        assert turns.enter(first)
        turns.run(False)
        await asyncio.sleep(0)
        assert log == ["a", "begun"]
        long = Call(log, "long")
        assert turns.enter(long)  # holds the turn: nobody runs it yet
        event.set()
        await asyncio.sleep(0)
        tasks[0].cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert log == ["a", "begun"]
        turns.run(False)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert log == ["a", "begun", "long", "ended"]

    asyncio.run(asyncio.wait_for(play(), 60))
