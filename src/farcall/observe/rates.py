"""What happened between two looks at a cluster: rates, percentiles and errors, from two pictures of its counters.

Pure functions over `Metrics`; how it is shown is the business of `cli/top.py` and of the dashboard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from farcall.observe.metrics import CallMetrics, Histogram, Metrics

__all__ = ["FunctionRow", "Row", "busiest", "errors_of", "latency_between", "rows"]


@dataclass(frozen=True)
class Row:
    """One worker, between two looks."""

    worker: str
    rank: int
    state: str
    called_per_s: float
    served_per_s: float
    latency: Histogram
    """Of the calls that it made."""
    sent_per_s: float
    received_per_s: float
    in_flight: int
    serving: int
    queued: int
    busy: int
    threads: int
    owned: int
    used: int
    errors: int
    """Calls that failed, timed out or were lost."""


def rows(before: list[Metrics], now: list[Metrics]) -> list[Row]:
    """What happened between two looks; a worker that was not in the first is taken from its start."""
    earlier = {(one.worker, one.process_id): one for one in before}
    return [_row(earlier.get((one.worker, one.process_id)), one) for one in now]


def _row(before: Metrics | None, now: Metrics) -> Row:
    seconds = max(1e-3, now.up_s - (before.up_s if before is not None else 0.0))
    called = latency_between(now.called, before.called if before is not None else [])
    served = latency_between(now.served, before.served if before is not None else [])
    sent = sum(one.sent_bytes for one in now.channels)
    received = sum(one.received_bytes for one in now.channels)
    if before is not None:
        sent -= sum(one.sent_bytes for one in before.channels)
        received -= sum(one.received_bytes for one in before.channels)
    return Row(
        worker=now.worker,
        rank=now.rank,
        state=now.state,
        called_per_s=called.count / seconds,
        served_per_s=served.count / seconds,
        latency=called,
        sent_per_s=max(0, sent) / seconds,
        received_per_s=max(0, received) / seconds,
        in_flight=now.calls_in_flight,
        serving=now.served_in_flight,
        queued=now.pool.queued,
        busy=now.pool.busy,
        threads=now.pool.threads,
        owned=now.owned_references,
        used=now.used_references,
        errors=errors_of(now.called) - (errors_of(before.called) if before is not None else 0),
    )


def latency_between(now: Iterable[CallMetrics], before: Iterable[CallMetrics]) -> Histogram:
    """The durations of the calls that ended in between."""
    earlier = {(one.peer, one.function): one.latency for one in before}
    total: dict[int, int] = {}
    for one in now:
        _add_between(total, one.latency, earlier.get((one.peer, one.function), _NOTHING))
    return Histogram(total)


_NOTHING = Histogram({})


def _add_between(total: dict[int, int], now: Histogram, then: Histogram) -> None:
    """The same as ``total += now - then``, without making anything: a large cluster has ten thousands of these."""
    if now.buckets != then.buckets:
        for bucket, count in now.buckets.items():
            added = count - then.buckets.get(bucket, 0)
            if added > 0:
                total[bucket] = total.get(bucket, 0) + added


def errors_of(calls: Iterable[CallMetrics]) -> int:
    """How many of these calls failed, timed out or were lost."""
    return sum(call.failed + call.timed_out + call.lost for call in calls)


@dataclass(frozen=True)
class FunctionRow:
    """One function, between two looks, wherever it ran."""

    function: str
    latency: Histogram
    failed: int


def busiest(before: Iterable[Metrics], now: Iterable[Metrics]) -> list[FunctionRow]:
    """The functions that ran, those first that took most of the workers' time."""
    earlier = {one.worker: one for one in before}
    latency: dict[str, dict[int, int]] = {}
    failed: dict[str, int] = {}
    for one in now:
        old = earlier.get(one.worker)
        known = {} if old is None else {(call.peer, call.function): call for call in old.served}
        for call in one.served:
            then = known.get((call.peer, call.function))
            if then != call:
                name = call.function
                _add_between(latency.setdefault(name, {}), call.latency, _NOTHING if then is None else then.latency)
                failed[name] = failed.get(name, 0) + call.failed - (0 if then is None else then.failed)
    found = [FunctionRow(name, Histogram(buckets), failed[name]) for name, buckets in latency.items()]
    return sorted(found, key=lambda row: row.latency.total_s, reverse=True)
