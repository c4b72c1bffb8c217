"""From pictures of a cluster to what the page shows: plain values that become JSON.

Pure functions. The page knows the names of the fields below and nothing else; how often there is a new picture is the
business of `looks.py`. Durations are seconds, rates are per second, sizes bytes. Rates and percentiles are of the time
since the last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from farcall.observe.answering import WorkerEvents
from farcall.observe.metrics import CallMetrics, Histogram, Metrics
from farcall.observe.observer import Answers
from farcall.observe.rates import Row, busiest, errors_of, latency_between
from farcall.observe.snapshot import QUEUED, STARTING, ThreadKey, ThreadView, WorkerSnapshot, find_troubles
from farcall.protocol.observing import WorkerState
from farcall.runtime.membership.events import MEMBER_EVENTS

__all__ = ["channels", "events", "functions", "functions_between", "pairs", "point", "troubles", "waiting", "workers"]

MOST_FUNCTIONS: Final = 100
MOST_WAITING: Final = 60
MOST_EVENTS: Final = 200
MOST_FRAMES: Final = 20
SAME_S: Final = 10.0
"""News of a member that come within this time are the same news."""
Values = dict[str, Any]


def workers(found_rows: Sequence[Row], heard: Answers[Metrics]) -> list[Values]:
    """One entry for each worker, by rank; those that say nothing are there, too."""
    found: list[Values] = []
    for one, row in zip(heard.answers, found_rows, strict=True):
        found.append(
            {
                "name": one.worker,
                "rank": one.rank,
                "state": one.state,
                "why": "",
                "host": one.host,
                "process": one.process_id,
                "up_s": one.up_s,
                "calls": row.called_per_s,
                "served": row.served_per_s,
                **_percentiles(row.latency),
                "sent": row.sent_per_s,
                "received": row.received_per_s,
                "in_flight": row.in_flight,
                "serving": row.serving,
                "queued": row.queued,
                "busy": row.busy,
                "parked": one.pool.parked,
                "threads": row.threads,
                "owned": row.owned,
                "used": row.used,
                "contexts": one.contexts,
                "errors_in_all": errors_of(one.called),
                "reconnects": one.reconnects,
                "lost": one.peers_lost,
            }
        )
    found += [_silent(worker) for worker in heard.silent]
    return sorted(found, key=lambda worker: worker["rank"])


def _silent(worker: WorkerState) -> Values:
    return {
        "name": worker.name,
        "rank": worker.rank,
        "state": "gone" if worker.gone else "silent",
        "why": worker.gone or "it did not answer: its process may be stopped, or busy in native code",
    }


def _percentiles(latency: Histogram) -> Values:
    return {"p50": latency.percentile(50), "p90": latency.percentile(90), "p99": latency.percentile(99)}


def point(at: float, found: Sequence[Row], sent: Sequence[Values]) -> Values:
    """One point of every line over time; ``sent``: as `channels` says. ``workers``: calls, p50, p99, bytes of each."""
    latency = Histogram({})
    for row in found:
        latency += row.latency
    return {
        "at": at,
        "calls": sum(row.called_per_s for row in found),
        **_percentiles(latency),
        "channels": {one["channel"]: one["sent_per_s"] for one in sent},
        "errors": sum(row.errors for row in found),
        "queued": sum(row.queued for row in found),
        "busy": sum(row.busy for row in found),
        "in_flight": sum(row.in_flight for row in found),
        "owned": sum(row.owned for row in found),
        "workers": {
            row.worker: [
                _rounded(row.called_per_s),
                _rounded(row.latency.percentile(50)),
                _rounded(row.latency.percentile(99)),
                _rounded(row.sent_per_s + row.received_per_s),
            ]
            for row in found
        },
    }


def pairs(before: Sequence[Metrics], now: Sequence[Metrics]) -> list[list[Any]]:
    """Who calls whom: [caller, callee, calls a second, calls in all, p50, p99, errors in all, bytes a second]."""
    earlier = {(one.worker, one.process_id): one for one in before}
    found = []
    for one in now:
        then = earlier.get((one.worker, one.process_id))
        seconds = max(1e-3, one.up_s - (0.0 if then is None else then.up_s))
        calls_then = _by_peer([] if then is None else then.called)
        bytes_then = _sent_to(then)
        bytes_now = _sent_to(one)
        for peer, calls in _by_peer(one.called).items():
            since = latency_between(calls, calls_then.get(peer, []))
            latency = since if since.count else latency_between(calls, [])
            found.append(
                [
                    one.worker,
                    peer,
                    _rounded(since.count / seconds),
                    sum(call.latency.count for call in calls),
                    _rounded(latency.percentile(50)),
                    _rounded(latency.percentile(99)),
                    errors_of(calls),
                    _rounded(max(0, bytes_now.get(peer, 0) - bytes_then.get(peer, 0)) / seconds),
                ]
            )
    return found


def _by_peer(calls: Iterable[CallMetrics]) -> dict[str, list[CallMetrics]]:
    found: dict[str, list[CallMetrics]] = {}
    for call in calls:
        found.setdefault(call.peer, []).append(call)
    return found


def _sent_to(one: Metrics | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for channel in () if one is None else one.channels:
        found[channel.peer] = found.get(channel.peer, 0) + channel.sent_bytes
    return found


def functions(before: Sequence[Metrics], now: Sequence[Metrics], seconds: float) -> list[Values]:
    """The functions that ran, by the time that they took."""
    return [
        {
            "function": row.function,
            "runs": row.latency.count / seconds,
            **_percentiles(row.latency),
            "threads": row.latency.total_s / seconds,
            "failed": row.failed,
        }
        for row in busiest(before, now)[:MOST_FUNCTIONS]
    ]


def functions_between(now: Sequence[Metrics], caller: str, callee: str) -> list[Values]:
    """What one worker calls on another, since its start; of an empty name, on or from all."""
    total: dict[str, Histogram] = {}
    wrong: dict[str, list[int]] = {}
    for one in now:
        if caller in ("", one.worker):
            for call in one.called:
                if callee in ("", call.peer):
                    total[call.function] = total.get(call.function, Histogram({})) + call.latency
                    counts = wrong.setdefault(call.function, [0, 0, 0])
                    for index, count in enumerate((call.failed, call.timed_out, call.lost)):
                        counts[index] += count
    return [
        {
            "function": function,
            "calls": latency.count,
            **_percentiles(latency),
            "failed": wrong[function][0],
            "timed_out": wrong[function][1],
            "lost": wrong[function][2],
        }
        for function, latency in sorted(total.items(), key=lambda item: item[1].count, reverse=True)[:MOST_FUNCTIONS]
    ]


def channels(before: Sequence[Metrics], now: Sequence[Metrics]) -> list[Values]:
    """Bytes over each kind of channel, as their senders count them."""
    earlier = {(one.worker, one.process_id): one for one in before}
    sent: dict[str, int] = {}
    rate: dict[str, float] = {}
    links: dict[str, int] = {}
    for one in now:
        then = earlier.get((one.worker, one.process_id))
        seconds = max(1e-3, one.up_s - (0.0 if then is None else then.up_s))
        known = {} if then is None else {(each.peer, each.channel): each.sent_bytes for each in then.channels}
        for channel in one.channels:
            added = max(0, channel.sent_bytes - known.get((channel.peer, channel.channel), 0))
            sent[channel.channel] = sent.get(channel.channel, 0) + channel.sent_bytes
            rate[channel.channel] = rate.get(channel.channel, 0.0) + added / seconds
            links[channel.channel] = links.get(channel.channel, 0) + 1
    return [
        {"channel": name, "links": links[name], "sent": sent[name], "sent_per_s": rate[name]} for name in sorted(sent)
    ]


def waiting(snapshots: Sequence[WorkerSnapshot]) -> list[Values]:
    """The calls that have waited longest, with where both ends are."""
    served = {(one.worker, call.caller, call.call_id): (one, call) for one in snapshots for call in one.served}
    found = sorted(
        ((call.for_s, one, call) for one in snapshots for call in one.calls), key=lambda item: item[0], reverse=True
    )
    entries = []
    for for_s, one, call in found[:MOST_WAITING]:
        there = served.get((call.to, one.worker, call.call_id))
        entry: Values = {
            "caller": one.worker,
            "callee": call.to,
            "call": call.call_id,
            "function": call.function,
            "for_s": for_s,
            "timeout_s": call.timeout_s,
            "at_caller": _stack(one.thread(call.thread_id) if call.thread_id else None),
            "state": "",
            "at_callee": None,
        }
        if there is not None:
            snapshot, serves = there
            starts = serves.state == QUEUED and snapshot.state == STARTING
            entry["state"] = "queued, since it is starting" if starts else serves.state
            entry["at_callee"] = _stack(snapshot.thread(serves.thread_id) if serves.thread_id else None)
        entries.append(entry)
    return entries


def _stack(thread: ThreadView | None) -> Values | None:
    if thread is None:
        return None
    frames = [f"{frame.file}:{frame.line} in {frame.function}" for frame in thread.stack[:MOST_FRAMES]]
    return {"thread": thread.name, "frames": frames}


def troubles(snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey]) -> list[Values]:
    """Cycles and exhausted pools."""
    return [
        {"kind": trouble.kind, "workers": trouble.workers, "text": trouble.text, "steps": trouble.steps}
        for trouble in find_troubles(snapshots, still)
    ]


def events(happened: Iterable[WorkerEvents]) -> list[Values]:
    """What has happened of late anywhere, the latest first; what became of a member is told once, and who saw it."""
    seen = sorted(((event, one.worker) for one in happened for event in one.events), key=lambda item: item[0].at)
    found: list[Values] = []
    of_members: dict[tuple[str, str], Values] = {}
    for event, by in seen:
        same = of_members.get((event.kind, event.worker))
        if same is not None and event.at - same["at"] < SAME_S:
            same["seen_by"].append(by)
            continue
        told: Values = {
            "at": event.at,
            "seen_by": [by],
            "kind": event.kind,
            "worker": event.worker,
            "what": event.what,
            "text": event.text,
            "times": event.times,
        }
        found.append(told)
        if event.kind in MEMBER_EVENTS:
            of_members[event.kind, event.worker] = told
    return found[: -MOST_EVENTS - 1 : -1]


def _rounded(value: float) -> float:
    """Four digits are enough for a picture, and shorter."""
    return float(f"{value:.4g}")
