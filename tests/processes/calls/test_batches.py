"""Functions that many call with one argument each, and that run once for many. Nodes of one process."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.kit.team import team
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import whoami

import farcall
import farcall.autograd
from farcall.cli.live import page
from farcall.errors import Overloaded, RpcError
from farcall.observe.observer import Answers
from farcall.observe.prometheus import families
from farcall.rpc.batches import Batches
from farcall.runtime.node import runtime_of

RUNS: list[list[int]] = []
MAY_RUN = threading.Event()


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    RUNS.clear()
    MAY_RUN.set()
    with team([None] * 3, size=3, rpc_timeout=LONG_S) as started:
        yield started
    started.clear()


@farcall.batched(max_size=8, within_s=0.01)
def doubled(numbers: list[int]) -> list[int]:
    """Runs when the test lets it."""
    RUNS.append(numbers)
    assert MAY_RUN.wait(LONG_S)
    return [2 * number for number in numbers]


@farcall.batched(max_size=4, within_s=LONG_S)
def when_full(numbers: list[int]) -> list[int]:
    RUNS.append(numbers)
    return numbers


@farcall.batched(max_size=4, within_s=AT_ONCE_S)
def strict(numbers: list[int]) -> list[int]:
    if 13 in numbers:
        raise ValueError("13 is a bad number")
    return numbers


@farcall.batched(max_size=4, within_s=AT_ONCE_S, again_alone=True)
def lenient(numbers: list[int]) -> list[int]:
    if 13 in numbers:
        raise ValueError("13 is a bad number")
    return numbers


@farcall.batched(max_size=4, within_s=AT_ONCE_S)
def told_apart(numbers: list[int]) -> list[int | ValueError]:
    return [ValueError("13 is a bad number") if number == 13 else number for number in numbers]


@farcall.batched(max_size=2, within_s=0.0)
def too_few(numbers: list[int]) -> list[int]:
    return []


@farcall.batched(max_size=4, within_s=AT_ONCE_S)
async def doubled_async(numbers: list[int]) -> list[int]:
    await asyncio.sleep(0)
    return [2 * number for number in numbers]


class Model:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @farcall.batched(max_size=4, within_s=AT_ONCE_S)
    def infer(self, observations: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.stack(observations) * self.factor)


def waiting(node: farcall.Node) -> int:
    """How many arguments wait for a batch."""
    owners = runtime_of(node).part(Batches)._owners.values()
    return sum(len(queue._waiting) for owner in owners for queue in owner.queues.values())


def test_callers_share_a_run_and_get_their_own_result(nodes: list[farcall.Node]) -> None:
    MAY_RUN.clear()
    callers = [nodes[0]["w1"], nodes[2]["w1"]]
    first = callers[0].start(doubled, 0)
    wait_until(lambda: RUNS)  # it runs alone: nobody else came in time
    futures = [callers[index % 2].start(doubled, index) for index in range(1, 20)]
    wait_until(lambda: waiting(nodes[1]) == 19)
    MAY_RUN.set()
    assert [future.result() for future in (first, *futures)] == [2 * index for index in range(20)]
    assert sorted(number for numbers in RUNS for number in numbers) == list(range(20))
    assert [len(numbers) for numbers in RUNS] == [1, 8, 8, 3]
    [counts] = nodes[1].metrics().batches
    assert (counts.function, counts.runs, counts.items, counts.largest) == ("doubled", 4, 20, 8)
    assert counts.waited_s > 0


def test_calls_that_wait_behind_a_batch_count_for_the_limit() -> None:
    RUNS.clear()
    MAY_RUN.clear()
    limits = farcall.LimitOptions(max_queued_calls=5, when_overloaded="fail")
    with team([None] * 2, rpc_timeout=LONG_S, limits=limits) as (caller, callee):
        first = caller["w1"].start(doubled, 0)
        wait_until(lambda: RUNS)
        futures = [caller["w1"].start(doubled, index) for index in range(1, 20)]
        refused = [future.exception(timeout=LONG_S) for future in futures[5:]]
        assert all(isinstance(error, Overloaded) and error.limit == 5 for error in refused), refused
        MAY_RUN.set()
        assert [future.result() for future in (first, *futures[:5])] == [0, 2, 4, 6, 8, 10]
    del callee


def test_a_full_batch_does_not_wait(nodes: list[farcall.Node]) -> None:
    futures = [nodes[0]["w1"].start(when_full, index) for index in range(4)]
    assert [future.result(timeout=AT_ONCE_S) for future in futures] == [0, 1, 2, 3]
    assert [len(numbers) for numbers in RUNS] == [4]


@pytest.mark.parametrize(("function", "failed"), [(strict, [0, 1, 2, 3]), (lenient, [2]), (told_apart, [2])])
def test_a_bad_argument(nodes: list[farcall.Node], function: farcall.functions, failed: list[int]) -> None:  # type: ignore[valid-type]
    futures = [nodes[0]["w1"].start(function, number) for number in (0, 1, 13, 3)]  # type: ignore[arg-type, call-overload]
    errors = [future.exception() for future in futures]
    assert [index for index, error in enumerate(errors) if error is not None] == failed
    assert all(isinstance(errors[index], ValueError) for index in failed)


def test_methods_and_coroutines_are_batched_too(nodes: list[farcall.Node]) -> None:
    model = nodes[0]["w1"].create(Model, 3.0)
    futures = [model.start(Model.infer, torch.tensor(float(index))) for index in range(4)]
    assert [float(future.result(timeout=AT_ONCE_S)) for future in futures] == [0.0, 3.0, 6.0, 9.0]
    futures_of_int = [nodes[0]["w1"].start(doubled_async, index) for index in range(4)]
    assert [future.result(timeout=AT_ONCE_S) for future in futures_of_int] == [0, 2, 4, 6]


def test_no_thread_waits_for_a_batch(nodes: list[farcall.Node]) -> None:
    MAY_RUN.clear()
    futures = [nodes[0]["w1"].start(doubled, index) for index in range(100)]
    wait_until(lambda: nodes[1].metrics().served_in_flight == 100)
    wait_until(lambda: RUNS)
    wait_until(lambda: nodes[1].metrics().pool.busy <= 2)
    MAY_RUN.set()
    assert [future.result() for future in futures] == [2 * index for index in range(100)]


class Actor:
    """Its calls run one at a time; a batch is one of them."""

    def __init__(self) -> None:
        self.inside = 0

    def _look(self) -> None:
        assert self.inside == 0
        self.inside += 1
        sum(range(1000))
        self.inside -= 1

    @farcall.batched(max_size=8, within_s=0.001)
    def doubled(self, numbers: list[int]) -> list[int]:
        self._look()
        return [2 * number for number in numbers]

    @farcall.batched(max_size=8, within_s=0.001)
    async def tripled(self, numbers: list[int]) -> list[int]:
        self._look()
        await asyncio.sleep(0)
        self._look()
        return [3 * number for number in numbers]

    def plain(self, number: int) -> int:
        self._look()
        return self.doubled(number) + 0 * self.tripled(number)  # type: ignore[no-any-return]


def test_a_batch_of_an_actor_has_a_turn_of_its_own(nodes: list[farcall.Node]) -> None:
    actor = nodes[0]["w1"].options(serial=True).create(Actor)
    futures = []
    for number in range(60):
        futures += [actor.start.doubled(number), actor.start.tripled(number), actor.start.plain(number)]
    results = [future.result(LONG_S) for future in futures]
    assert results == [found for number in range(60) for found in (2 * number, 3 * number, 2 * number)]


def test_a_look_at_the_workers_shows_the_batch_that_runs(nodes: list[farcall.Node]) -> None:
    MAY_RUN.clear()
    futures = [nodes[2]["w1"].start(doubled, 0)]
    wait_until(lambda: RUNS)
    futures += [nodes[0]["w1"].start(doubled, number) for number in range(1, 4)]
    snapshot = nodes[1].snapshot()
    [batch] = [one for one in snapshot.served if "batch" in one.function]
    assert (batch.function, batch.caller, batch.state) == ("doubled (batch of 1)", "w2", "running")
    assert snapshot.thread(batch.thread_id) is not None  # so its stack is shown
    MAY_RUN.set()
    assert [future.result(LONG_S) for future in futures] == [0, 2, 4, 6]
    wait_until(lambda: not nodes[1].snapshot().served)
    found = nodes[1].metrics()
    console = Console(width=200)
    with console.capture() as shown:
        console.print(page(Answers("cluster", [found], []), [], 200))
    assert re.search(r"batched function +runs +mean size.*\n.*doubled +\d", shown.get())
    series = [sample for family in families(found) for sample in family.samples]
    assert [one.value for one in series if one.name == "farcall_batch_items_total"] == [4]


def test_a_trace_says_how_large_each_batch_was(nodes: list[farcall.Node], tmp_path: Path) -> None:
    with farcall.profile(node=nodes[0]) as profile:
        assert nodes[0]["w1"].call(doubled, 3) == 6
        wait_until(lambda: not nodes[1].snapshot().served)
    profile.export_chrome_trace(tmp_path / "trace.json")
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert "doubled (batch of 1)" in names


def test_what_was_cancelled_is_left_out(nodes: list[farcall.Node]) -> None:
    MAY_RUN.clear()
    futures = [nodes[0]["w1"].start(doubled, 0)]
    wait_until(lambda: RUNS)
    futures += [nodes[0]["w1"].start(doubled, index) for index in range(1, 4)]
    wait_until(lambda: nodes[1].metrics().served_in_flight == 4)
    assert futures[2].cancel()
    assert nodes[0]["w1"].call(abs, -1) == 1  # behind the cancellation
    wait_until(lambda: sum(request.cancelled for request in list(nodes[1]._runtime.server.active)) == 1)
    MAY_RUN.set()
    assert [future.result() for future in futures if not future.cancelled()] == [0, 2, 6]
    assert sorted(number for numbers in RUNS for number in numbers) == [0, 1, 3]
    wait_until(lambda: not nodes[1]._runtime.server.active)


def test_called_here_it_gives_the_result(nodes: list[farcall.Node]) -> None:
    assert nodes[0]["w1"].call(call_here, 4) == 8
    assert nodes[0]["w1"].call(call_coroutine_here, 4) == 8
    with pytest.raises(RpcError, match=r"doubled_async\(\) is a batched async def, called on an event loop"):
        nodes[0]["w1"].call(call_here_on_the_loop, 4)  # its batch runs on that very loop: neither would end


def test_without_a_cluster_it_runs_alone() -> None:
    assert Model(2.0).infer(torch.tensor(1.0)) == 2.0
    assert doubled_async(4) == 8
    with pytest.raises(ValueError, match="13 is a bad number"):
        told_apart(13)
    with pytest.raises(RpcError, match="returned 0 results"):
        too_few(1)


def call_here(number: int) -> int:
    return doubled(number)


def call_coroutine_here(number: int) -> int:
    return doubled_async(number)


async def call_here_on_the_loop(number: int) -> int:
    return doubled_async(number)


class Sealed:
    """No bytes can be made of it."""

    def __reduce__(self) -> str:
        raise asyncio.CancelledError


@farcall.batched(max_size=4, within_s=AT_ONCE_S)
def sealed(numbers: list[int]) -> list[object]:
    return [Sealed() if number == 1 else number for number in numbers]


def seal() -> Sealed:
    return Sealed()


def test_a_result_that_cannot_be_sent_fails_alone(nodes: list[farcall.Node]) -> None:
    for _ in range(2):  # the queue lives on
        futures = [nodes[0]["w1"].start(sealed, number) for number in range(4)]
        with pytest.raises(RpcError, match="CancelledError"):
            futures[1].result(LONG_S)
        assert [futures[number].result(LONG_S) for number in (0, 2, 3)] == [0, 2, 3]
    with pytest.raises(RpcError, match="CancelledError"):
        nodes[0]["w1"].call(seal)


def test_nonsense_is_refused(nodes: list[farcall.Node]) -> None:
    with pytest.raises(RpcError, match=r"too_few\(\) returned 0 results for a batch of 1"):
        nodes[0]["w1"].call(too_few, 1)
    with pytest.raises(ValueError, match="max_size"):
        farcall.batched(max_size=0)
    with pytest.raises(TypeError, match=r"write @farcall\.batched\(\)"):
        farcall.batched(whoami)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a batched function takes one list"):
        farcall.batched()(whoami)  # type: ignore[arg-type, call-overload]
    with farcall.autograd.context(node=nodes[0]), pytest.raises(RpcError, match="carries no gradients"):
        nodes[0]["w1"].call(doubled, 1)


@dataclass
class Scale:
    """Equal to every other of its factor, and not hashable."""

    factor: int

    @farcall.batched(max_size=4, within_s=0.05)
    def each(self, numbers: list[int]) -> list[int]:
        return [id(self)] * len(numbers)


SCALES = [Scale(2), Scale(2)]


def scaled(index: int) -> bool:
    return SCALES[index].each(1) == id(SCALES[index])


def test_methods_of_equal_objects_are_batches_of_their_own(nodes: list[farcall.Node]) -> None:
    futures = [nodes[0]["w1"].start(scaled, index % 2) for index in range(6)]
    assert [future.result(LONG_S) for future in futures] == [True] * 6


# ---------------------------------------------------------------------- by value


class Step:
    size = 1


def batches_of(nodes: list[farcall.Node], function: Any, arguments: list[Any]) -> list[Any]:
    """Send the arguments at a time; return the results."""
    calls = [nodes[0]["w1"].start(function, argument) for argument in arguments]
    return [call.result() for call in calls]


def test_a_batched_function_by_value(nodes: list[farcall.Node]) -> None:
    @farcall.batched(max_size=4, within_s=LONG_S)
    def sizes(numbers: list[int]) -> list[tuple[int, int]]:
        return [(number, len(numbers)) for number in numbers]

    for _ in range(2):
        assert batches_of(nodes, sizes, [1, 2, 3, 4]) == [(number, 4) for number in (1, 2, 3, 4)]


def test_one_that_uses_values_batches_with_the_latest(nodes: list[farcall.Node]) -> None:
    factor = 2

    @farcall.batched(max_size=2, within_s=LONG_S)
    def scaled(numbers: list[int]) -> list[tuple[int, int]]:
        return [(factor * number, len(numbers)) for number in numbers]

    assert batches_of(nodes, scaled, [1, 2]) == [(2, 2), (4, 2)]
    factor = 3
    assert batches_of(nodes, scaled, [1, 2]) == [(3, 2), (6, 2)]
    assert len(nodes[1]._runtime.part(Batches)._owners) == 1


def test_a_batched_method_of_a_class_by_value(nodes: list[farcall.Node]) -> None:
    class Model:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @farcall.batched(max_size=3, within_s=LONG_S)
        def infer(self, numbers: list[int]) -> list[tuple[int, int]]:
            return [(self.factor * number, len(numbers)) for number in numbers]

    model = nodes[0]["w1"].create(Model, 5)
    calls = [model.start.infer(number) for number in (1, 2, 3)]
    assert [call.result() for call in calls] == [(5, 3), (10, 3), (15, 3)]


def test_a_batched_function_that_travels_whole(nodes: list[farcall.Node]) -> None:
    step = Step()  # an object may hold code

    @farcall.batched(max_size=1)
    def moved(numbers: list[int]) -> list[int]:
        return [number + step.size for number in numbers]

    assert batches_of(nodes, moved, [1, 2]) == [2, 3]
    assert nodes[0]["w1"].call(lambda number: moved(number), 4) == 5


def test_a_batched_function_that_is_gone_leaves_no_queue(nodes: list[farcall.Node]) -> None:
    step = Step()

    @farcall.batched(max_size=1)
    def moved(numbers: list[int]) -> list[int]:
        return [number + step.size for number in numbers]

    def is_empty() -> bool:
        gc.collect()
        return not nodes[1]._runtime.part(Batches)._owners

    assert batches_of(nodes, moved, list(range(20))) == list(range(1, 21))  # each call makes a function of its own
    wait_until(is_empty)


def test_what_another_decorator_makes_of_it_is_not_taken_for_it(nodes: list[farcall.Node]) -> None:
    @farcall.batched(max_size=1)
    def doubled_here(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    @functools.wraps(doubled_here)
    def more(number: int) -> int:
        return doubled_here(number) + 1

    assert nodes[0]["w1"].call(more, 3) == 7
