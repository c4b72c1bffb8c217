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


def work(length_us: float) -> float:
    """Keep the interpreter busy for so long: the work of a function whose call is measured."""
    end = perf_counter() + length_us / 1e6
    while perf_counter() < end:
        pass
    return length_us


def sample_ns(operation: Operation, budget_s: float, own_ns: Callable[[Any], int] = lambda result: 0) -> list[int]:
    """Sorted durations of ``operation``, after a warm-up; less what ``own_ns`` says that its result took."""
    warm_at = perf_counter() + budget_s * _WARM_UP_SHARE
    operation()
    operation()
    while perf_counter() < warm_at:
        operation()
    durations: list[int] = []
    end_ns = perf_counter_ns() + int(budget_s * 1e9)
    while True:
        begun_ns = perf_counter_ns()
        result = operation()
        ended_ns = perf_counter_ns()
        durations.append(ended_ns - begun_ns - own_ns(result))
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


def overhead_us(operation: Operation, budget_s: float) -> Statistics:
    """Time of one operation beyond that of the work in it, whose length in us the operation returns."""
    ordered = sample_ns(operation, budget_s, own_ns=lambda worked_us: int(worked_us * 1000))
    return {"p50": percentile(ordered, 0.5) / 1e3}


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


def from_cold(operation: Operation, budget_s: float) -> Statistics:
    """Times of the first operation of this process, of the second, and of the later ones (p50)."""
    durations: list[int] = []
    for _ in range(2 + MIN_SAMPLES):
        begun_ns = perf_counter_ns()
        operation()
        durations.append(perf_counter_ns() - begun_ns)
    warm_ns = percentile(sorted(durations[2:]), 0.5)
    return {"first": durations[0] / 1e3, "second": durations[1] / 1e3, "p50": warm_ns / 1e3}


def rate(in_flight: int) -> Measure:
    """Calls per second while ``in_flight`` are under way; the operation issues one and returns its future."""

    def measure(operation: Operation, budget_s: float) -> Statistics:
        return {"rate": flood(operation, budget_s, in_flight)["rate"]}

    return measure


def flood(operation: Operation, budget_s: float, in_flight: int) -> Statistics:
    """Calls per second with ``in_flight`` under way, and the p99 of the time from a call's issue to its result."""
    under_way: deque[tuple[Any, int]] = deque()
    durations: list[int] = []
    warm_at = perf_counter() + budget_s * _WARM_UP_SHARE
    begun = count = 0.0
    while True:
        now = perf_counter()
        if not begun and now >= warm_at:
            begun, count = now, 0
            durations.clear()
        if begun and now - begun >= budget_s and durations:
            break
        while len(under_way) < in_flight:
            under_way.append((operation(), perf_counter_ns()))
        future, issued_ns = under_way.popleft()
        future.wait()
        durations.append(perf_counter_ns() - issued_ns)
        count += 1
    for future, _ in under_way:
        future.wait()
    durations.sort()
    return {"rate": count / (now - begun), "p99": percentile(durations, 0.99) / 1e3}


class Metered:
    """An operation that counts itself; ``used_s`` tells the processor time that its processes have used so far."""

    def __init__(self, operation: Operation, used_s: Callable[[], float]) -> None:
        self._operation = operation
        self._used_s = used_s
        self._count = 0

    def __call__(self) -> Any:
        self._count += 1
        return self._operation()

    def measure(self, run: Measure, budget_s: float) -> Statistics:
        """What ``run`` finds, and the processor time of one operation in us, all processes together."""
        before_s = self._used_s()
        statistics = run(self, budget_s)
        return {**statistics, "cpu": (self._used_s() - before_s) / self._count * 1e6}


def count_once(operation: Operation, budget_s: float) -> Statistics:
    """The number that the operation returns: a count, not a time."""
    return {"count": float(operation())}
