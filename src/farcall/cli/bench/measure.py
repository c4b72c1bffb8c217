"""The timing of an operation. Owns clocks, warm-up and percentiles; knows nothing of calls, systems or processes.

A measure takes an operation and a time budget and returns its statistics by name. It takes at least a handful of
samples, however long they last, so that slow systems get a median too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import Any

Operation = Callable[[], Any]
Statistics = dict[str, float]
Measure = Callable[[Operation, float], Statistics]

GIBIBYTE = 1 << 30
MIN_SAMPLES = 5
_WARM_UP_SHARE = 0.25


def sample_ns(operation: Operation, budget_s: float) -> list[int]:
    """Sorted durations of ``operation``, after a warm-up."""
    warm_at = perf_counter() + budget_s * _WARM_UP_SHARE
    operation()
    operation()
    while perf_counter() < warm_at:
        operation()
    durations: list[int] = []
    end_ns = perf_counter_ns() + int(budget_s * 1e9)
    while True:
        begun_ns = perf_counter_ns()
        operation()
        ended_ns = perf_counter_ns()
        durations.append(ended_ns - begun_ns)
        if ended_ns >= end_ns and len(durations) >= MIN_SAMPLES:
            break
    durations.sort()
    return durations


def percentile(ordered: list[int], share: float) -> int:
    """The value that ``share`` of the ordered ones do not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def latency_us(operation: Operation, budget_s: float) -> Statistics:
    """Time of one operation: half of them are quicker than p50."""
    ordered = sample_ns(operation, budget_s)
    return {"p50": percentile(ordered, 0.5) / 1e3, "p99": percentile(ordered, 0.99) / 1e3}


def typical_us(operation: Operation, budget_s: float) -> Statistics:
    """The median alone, for operations too few to speak of a tail."""
    return {"p50": percentile(sample_ns(operation, budget_s), 0.5) / 1e3}


def per_second(amount: float, statistic: str) -> Measure:
    """Amount per second, by the median time of an operation that does ``amount``."""

    def measure(operation: Operation, budget_s: float) -> Statistics:
        return {statistic: amount / (percentile(sample_ns(operation, budget_s), 0.5) / 1e9)}

    return measure


def bandwidth(size_bytes: int) -> Measure:
    """GiB/s of an operation that moves ``size_bytes`` (an echo counts them once)."""
    return per_second(size_bytes / GIBIBYTE, "p50")


def rate(in_flight: int) -> Measure:
    """Calls per second while ``in_flight`` are under way; the operation issues one and returns its future."""

    def measure(operation: Operation, budget_s: float) -> Statistics:
        futures: deque[Any] = deque(operation() for _ in range(in_flight))
        warm_at = perf_counter() + budget_s * _WARM_UP_SHARE
        while perf_counter() < warm_at:
            futures.popleft().wait()
            futures.append(operation())
        count = 0
        begun = perf_counter()
        while (elapsed := perf_counter() - begun) < budget_s:
            futures.popleft().wait()
            futures.append(operation())
            count += 1
        for future in futures:
            future.wait()
        return {"rate": count / elapsed}

    return measure


def count_once(operation: Operation, budget_s: float) -> Statistics:
    """The number that the operation returns: a count, not a time."""
    return {"count": float(operation())}
