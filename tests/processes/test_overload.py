"""A slow worker with one thread, flooded by two others: whatever they chose, nothing is lost and nothing runs twice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.times import LONG_S

import farcall
from farcall import api
from farcall.errors import Delivery, Overloaded
from farcall.options import LimitOptions
from farcall.runtime.calls import executor
from farcall.testing.cluster import run_cluster

LIMIT = 8
CALLS = 150
FLOODERS = 2
EVERYTHING = sorted(f"w{rank}-{i}" for rank in range(1, FLOODERS + 1) for i in range(CALLS))

ran: Counter[str] = Counter()
overloaded = threading.Event()
Outcome = tuple[list[str], list[tuple[Any, ...]]]


def slow(name: str) -> str:
    assert overloaded.wait(LONG_S)
    time.sleep(0.001)
    ran[name] += 1
    return name


def record_refusals(when: str) -> list[Any]:
    """On w0: the requests that are refused from now on."""
    node = api.current_runtime()
    refused: list[Any] = []
    if when == "fail":
        refuse = node.dispatcher.refuse
        node.dispatcher.refuse = lambda *request: (refused.append(request), refuse(*request))[1]  # type: ignore[method-assign]
    return refused


def wait_until_overloaded(refused: list[Any]) -> None:
    """On w0: both others were told that the queue is full, or somebody was refused."""
    node = api.current_runtime()
    give_up_at = time.monotonic() + LONG_S
    while len(node.admission._told) < FLOODERS and not refused:
        assert time.monotonic() < give_up_at, "nobody was told, and nobody refused"
        time.sleep(0.001)


def outcome_of(waits: list[Callable[[], str]]) -> Outcome:
    """What was answered, and what the others said."""
    answered = []
    refused = []
    for wait in waits:
        try:
            answered.append(wait())
        except Overloaded as error:
            refused.append((error.worker, error.limit, error.delivery))
    return answered, refused


def flood(rank: int, way: str, when: str, more: dict[str, Any]) -> Outcome:
    """w1 and w2 call w0; each tells what became of its calls, and w0 what ran."""
    outcome: Outcome = ([], [])
    everybody = [f"w{i}" for i in range(FLOODERS + 1)]
    refused: list[Any] = []
    if rank == 0:
        executor.MOST_EXTRA_THREADS = 0  # one thread, even while that is blocked
        refused = record_refusals(when)
    farcall.barrier(everybody)  # the flood may be over before w0 gets here
    if rank == 0:
        wait_until_overloaded(refused)
        overloaded.set()
    else:
        names = [f"w{rank}-{i}" for i in range(CALLS)]
        if way == "async":
            outcome = outcome_of([farcall.rpc_async("w0", slow, (name,), **more).wait for name in names])
        else:
            outcome = outcome_of([farcall.remote("w0", slow, (name,), **more).to_here for name in names])
    farcall.barrier(everybody)
    return outcome if rank else (sorted(ran.elements()), [])


def run_flood(way: str, when: str, **more: Any) -> Outcome:
    """What was answered, and what was refused; what ran is what was answered, once each."""
    (executed, _), *outcomes = run_cluster(
        FLOODERS + 1,
        flood,
        way,
        when,
        more,
        num_worker_threads=1,
        limits=LimitOptions(max_queued_calls=LIMIT, when_overloaded=when),
    )
    answered = sorted(name for names, _ in outcomes for name in names)
    refused = [error for _, errors in outcomes for error in errors]
    assert len(answered) + len(refused) == FLOODERS * CALLS
    assert executed == answered
    return answered, refused


@pytest.mark.parametrize("way", ["async", "remote"])
def test_calls_fail_if_that_was_chosen(way: str) -> None:
    answered, refused = run_flood(way, "fail")
    assert len(answered) >= LIMIT
    assert set(refused) == {(farcall.WorkerInfo("w0", 0), LIMIT, Delivery.REFUSED)}


@pytest.mark.parametrize("way", ["async", "remote"])
def test_calls_wait_by_default(way: str) -> None:
    assert run_flood(way, "wait") == (EVERYTHING, [])


@pytest.mark.parametrize("way", ["async", "remote"])
def test_calls_are_made_again_if_that_was_asked_for(way: str) -> None:
    retry = farcall.Retry(attempts=1_000_000, backoff_s=0.002, longest_backoff_s=0.05)
    assert run_flood(way, "fail", retry=retry) == (EVERYTHING, [])
