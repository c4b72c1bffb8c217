"""Rates, percentiles and errors of a cluster between two readings of its counters.

Pure functions over `Metrics`; ``farcall top`` and the dashboard show the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from farcall.observe.metrics import BatchMetrics, CallMetrics, Histogram, Metrics, StreamMetrics


def pairs_of_looks(before: Iterable[Metrics], now: Iterable[Metrics]) -> Iterator[tuple[Metrics, Metrics, float]]:
    """Each worker's metrics then and now, and the seconds between; a new worker is compared with zeros at its start."""
    earlier = {(one.worker, one.process_id): one for one in before}
    for one in now:
        then = earlier.get((one.worker, one.process_id))
        if then is None:
            then = msgspec.structs.replace(
                one, up_s=0.0, called=[], served=[], channels=[], batches=[], streams=StreamMetrics(), weights=[]
            )
        yield then, one, max(1e-3, one.up_s - then.up_s)


@dataclass(frozen=True)
class Row:
    """One worker: its metrics now, and its rates since the last reading."""

    now: Metrics
    called_per_s: float
    served_per_s: float
    latency: Histogram
    """The durations of the calls that the worker made."""
    sent_per_s: float
    received_per_s: float
    errors: int
    """Calls that failed, timed out or were lost."""
    cpus: float = 0.0
    """The mean number of processors that it kept busy."""


def cluster_title(cluster_id: str, metrics: Iterable[Metrics]) -> str:
    """The cluster's name from the options, or its id."""
    return next((one.cluster_name for one in metrics if one.cluster_name), cluster_id)


def rows(before: Iterable[Metrics], now: Iterable[Metrics]) -> list[Row]:
    """The rates of each worker between two readings."""
    found = []
    for then, one, seconds in pairs_of_looks(before, now):
        latency = latency_between(one.called, then.called)
        sent, received = (
            sum(getattr(channel, way) for channel in one.channels) - sum(getattr(old, way) for old in then.channels)
            for way in ("sent_bytes", "received_bytes")
        )
        found.append(
            Row(
                now=one,
                called_per_s=latency.count / seconds,
                served_per_s=latency_between(one.served, then.served).count / seconds,
                latency=latency,
                sent_per_s=max(0, sent) / seconds,
                received_per_s=max(0, received) / seconds,
                errors=errors_of(one.called) - errors_of(then.called),
                cpus=max(0.0, one.cpu_s - then.cpu_s) / seconds,
            )
        )
    return found


def latency_between(now: Iterable[CallMetrics], before: Iterable[CallMetrics]) -> Histogram:
    """The durations of the calls that ended in between."""
    earlier = {(one.peer, one.function): one.latency for one in before}
    total: dict[int, int] = {}
    for one in now:
        _add_between(total, one.latency, earlier.get((one.peer, one.function), _NOTHING))
    return Histogram(total)


_NOTHING = Histogram({})


def _add_between(total: dict[int, int], now: Histogram, then: Histogram) -> None:
    """``total += now - then``, in place: a large cluster has tens of thousands of histograms."""
    if now.buckets != then.buckets:
        for bucket, count in now.buckets.items():
            added = count - then.buckets.get(bucket, 0)
            if added > 0:
                total[bucket] = total.get(bucket, 0) + added


def errors_of(calls: Iterable[CallMetrics]) -> int:
    """The number of these calls that failed, timed out or were lost."""
    return sum(call.failed + call.timed_out + call.lost for call in calls)


def batches(before: Iterable[Metrics], now: Iterable[Metrics]) -> list[BatchMetrics]:
    """The batched functions that ran between two readings, most items first; ``largest`` is of all time."""
    found: dict[str, BatchMetrics] = {}
    for old, one, _ in pairs_of_looks(before, now):
        known = {batch.function: batch for batch in old.batches}
        for batch in one.batches:
            nothing = BatchMetrics(batch.function, 0, 0, 0, 0.0)
            then, so_far = known.get(batch.function, nothing), found.get(batch.function, nothing)
            found[batch.function] = BatchMetrics(
                batch.function,
                so_far.runs + batch.runs - then.runs,
                so_far.items + batch.items - then.items,
                max(so_far.largest, batch.largest),
                so_far.waited_s + batch.waited_s - then.waited_s,
            )
    return sorted((row for row in found.values() if row.runs), key=lambda row: row.items, reverse=True)


@dataclass(frozen=True)
class WeightsRow:
    """One name under which weights are published, over all workers."""

    name: str
    publisher: str
    """Empty: nobody publishes it now."""
    is_closed: bool
    """Has its publisher closed it, without a successor?"""
    version: str
    number: int
    size_bytes: int
    pushes_per_s: float
    subscribers: dict[str, int]
    """The number of each subscriber's newest version."""

    def told(self, most: int) -> str:
        """Each subscriber and its version, the furthest behind first; ``most`` workers at most."""
        found = sorted(self.subscribers.items(), key=lambda item: (item[1], item[0]))
        texts = [
            f"{worker} {number or 'none'}" + (f" ({self.number - number} behind)" if number < self.number else "")
            for worker, number in found
        ]
        return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def weights(before: Iterable[Metrics], now: Iterable[Metrics]) -> list[WeightsRow]:
    """The names of published weights, each with its publisher and the version of each subscriber."""
    looks = list(pairs_of_looks(before, now))
    found = []
    for name in sorted({each.name for _, one, _ in looks for each in one.weights}):
        newest: tuple[int, int] = (0, 0)
        publisher, is_closed, size_bytes, per_s = "", False, 0, 0.0
        subscribers: dict[str, int] = {}
        for old, one, seconds in looks:
            pushed = {each.name: each.total for each in old.weights if each.role == "publishes"}
            for each in one.weights:
                if each.name != name:
                    continue
                if (each.epoch, each.number) >= newest:
                    newest, size_bytes = (each.epoch, each.number), each.size_bytes
                is_closed = is_closed or each.state in ("closed", "ended")
                if each.role == "subscribes":
                    subscribers[one.worker] = each.number
                elif each.state == "published":
                    publisher = one.worker
                    per_s += max(0, each.total - pushed.get(name, 0)) / seconds
        version = f"{newest[0]}.{newest[1]}" if newest[1] else "none"
        is_closed = is_closed and not publisher
        found.append(WeightsRow(name, publisher, is_closed, version, newest[1], size_bytes, per_s, subscribers))
    return found


def stream_items_per_s(before: Iterable[Metrics], now: Iterable[Metrics]) -> float:
    """The rate at which all workers together have read items of streams."""
    return sum(
        max(0, one.streams.items_read - old.streams.items_read) / seconds
        for old, one, seconds in pairs_of_looks(before, now)
    )


@dataclass(frozen=True)
class FunctionRow:
    """One function between two readings, over all workers."""

    function: str
    latency: Histogram
    failed: int


def busiest(before: Iterable[Metrics], now: Iterable[Metrics]) -> list[FunctionRow]:
    """The functions that ran, those with the longest total time first."""
    latency: dict[str, dict[int, int]] = {}
    failed: dict[str, int] = {}
    for old, one, _ in pairs_of_looks(before, now):
        known = {(call.peer, call.function): call for call in old.served}
        for call in one.served:
            then = known.get((call.peer, call.function))
            if then != call:
                name = call.function
                _add_between(latency.setdefault(name, {}), call.latency, _NOTHING if then is None else then.latency)
                failed[name] = failed.get(name, 0) + call.failed - (0 if then is None else then.failed)
    found = [FunctionRow(name, Histogram(buckets), failed[name]) for name, buckets in latency.items()]
    return sorted(found, key=lambda row: row.latency.total_s, reverse=True)
