"""The values on the page, from pictures of a cluster: plain values that become JSON.

Pure functions. The page knows the names of the fields below and nothing else; `looks.py` decides how often a new
picture is taken. Durations are in seconds, sizes in bytes. Rates are per second; they and the percentiles cover the
time since the last look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from farcall.observe.answering import WorkerEvents
from farcall.observe.metrics import CallMetrics, Histogram, Metrics
from farcall.observe.rates import FunctionRow, Row, busiest, errors_of, latency_between, pairs_of_looks
from farcall.observe.rates import weights as weights_of
from farcall.observe.snapshot import QUEUED, STARTING, ThreadView, WorkerSnapshot
from farcall.protocol.observing import WorkerState
from farcall.runtime.membership.events import MEMBER_EVENTS

MOST_FUNCTIONS: Final = 100
MOST_WAITING: Final = 60
MOST_EVENTS: Final = 200
MOST_FRAMES: Final = 20
SAME_S: Final = 10.0
"""Events of one member within this time are one event, seen by several workers."""
Values = dict[str, Any]


def workers(found_rows: Sequence[Row], silent: Sequence[WorkerState]) -> list[Values]:
    """One entry for each worker, by rank; silent ones are there, too."""
    found: list[Values] = []
    for row in found_rows:
        one = row.now
        found.append(
            {
                "name": one.worker,
                "rank": one.rank,
                "state": one.state,
                "why": "",
                "host": one.host,
                "process": one.process_id,
                "up_s": one.up_s,
                "cpus": row.cpus,
                "memory": one.memory_bytes,
                "calls": row.called_per_s,
                "served": row.served_per_s,
                **_percentiles(row.latency),
                "sent": row.sent_per_s,
                "received": row.received_per_s,
                "in_flight": one.calls_in_flight,
                "serving": one.served_in_flight,
                "queued": one.pool.queued,
                "busy": one.pool.busy,
                "parked": one.pool.parked,
                "threads": one.pool.threads,
                "owned": one.owned_references,
                "used": one.used_references,
                "contexts": one.contexts,
                "errors_in_all": errors_of(one.called),
                "reconnects": one.reconnects,
            }
        )
    for worker in silent:
        since_s = max((row.now.unresponsive.get(worker.name, 0.0) for row in found_rows), default=0.0)
        for_long = f" for {since_s:.0f} s" if since_s else ""
        why = worker.gone or f"it did not answer{for_long}: its process may be stopped, or busy in native code"
        state = "gone" if worker.gone else "unresponsive"
        found.append({"name": worker.name, "rank": worker.rank, "state": state, "why": why})
    return sorted(found, key=lambda worker: worker["rank"])


def _percentiles(latency: Histogram) -> Values:
    return {"p50": latency.percentile(50), "p90": latency.percentile(90), "p99": latency.percentile(99)}


def point(at: float, found: Sequence[Row], sent: Sequence[Values]) -> Values:
    """One point of every line over time; ``sent``: from `channels`. ``workers``: calls, p50 and p99 of each."""
    latency = sum((row.latency for row in found), Histogram({}))
    return {
        "at": at,
        "calls": sum(row.called_per_s for row in found),
        **_percentiles(latency),
        "channels": {one["channel"]: one["sent_per_s"] for one in sent},
        "errors": sum(row.errors for row in found),
        "queued": sum(row.now.pool.queued for row in found),
        "busy": sum(row.now.pool.busy for row in found),
        "in_flight": sum(row.now.calls_in_flight for row in found),
        "workers": {
            row.now.worker: [
                _rounded(row.called_per_s),
                _rounded(row.latency.percentile(50)),
                _rounded(row.latency.percentile(99)),
            ]
            for row in found
        },
    }


def pairs(
    before: Sequence[Metrics], now: Sequence[Metrics], snapshots: Sequence[WorkerSnapshot] = ()
) -> list[list[Any]]:
    """Calls by pair, in this order: caller, callee, per second, in all, p50, p99, errors in all, bytes/s, under way.

    A call counts when it ends; streams and long calls are under way.
    """
    found = []
    open_calls = {one.worker: Counter(call.to for call in one.calls) for one in snapshots}
    for then, one, seconds in pairs_of_looks(before, now):
        (calls_then, bytes_then), (calls_now, bytes_now) = _by_peer(then), _by_peer(one)
        under_way = open_calls.get(one.worker, Counter())
        for peer in dict.fromkeys((*calls_now, *under_way)):
            calls = calls_now[peer]
            since = latency_between(calls, calls_then[peer])
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
                    _rounded(max(0, bytes_now[peer] - bytes_then[peer]) / seconds),
                    under_way[peer],
                ]
            )
    return found


def _by_peer(one: Metrics) -> tuple[defaultdict[str, list[CallMetrics]], Counter[str]]:
    """The calls to each peer, and the bytes sent to each."""
    calls: defaultdict[str, list[CallMetrics]] = defaultdict(list)
    for call in one.called:
        calls[call.peer].append(call)
    sent: Counter[str] = Counter()
    for channel in one.channels:
        sent[channel.peer] += channel.sent_bytes
    return calls, sent


def functions(
    before: Sequence[Metrics], now: Sequence[Metrics], seconds: float, snapshots: Sequence[WorkerSnapshot] = ()
) -> list[Values]:
    """The functions of all workers since their start, by the time that they took of late, then by that in all.

    Percentiles are of late, too, of a function that ran.
    """
    lately = {row.function: row for row in busiest(before, now)}
    in_all = {row.function: row for row in busiest([], now)}
    under_way = Counter(call.function for one in snapshots for call in one.served)
    found = []
    for name in dict.fromkeys((*lately, *under_way, *in_all)):
        nothing = FunctionRow(name, Histogram({}), 0)
        late, whole = lately.get(name, nothing), in_all.get(name, nothing)
        found.append(
            {
                "function": name,
                "runs": late.latency.count / seconds,
                "total": whole.latency.count,
                "under_way": under_way[name],
                **_percentiles(late.latency if late.latency.count else whole.latency),
                "threads": late.latency.total_s / seconds,
                "failed": whole.failed,
            }
        )
    return found[:MOST_FUNCTIONS]


def functions_between(
    now: Sequence[Metrics], caller: str, callee: str, snapshots: Sequence[WorkerSnapshot] = ()
) -> list[Values]:
    """The functions that one worker calls on another, since its start; an empty name means all."""
    by_function: defaultdict[str, list[CallMetrics]] = defaultdict(list)
    under_way = Counter(
        call.function
        for one in snapshots
        if caller in ("", one.worker)
        for call in one.calls
        if callee in ("", call.to)
    )
    for one in now:
        if caller in ("", one.worker):
            for call in one.called:
                if callee in ("", call.peer):
                    by_function[call.function].append(call)
    found = []
    for function in dict.fromkeys((*by_function, *under_way)):
        calls = by_function[function]
        latency = latency_between(calls, [])
        found.append(
            {
                "function": function,
                "calls": latency.count,
                "under_way": under_way[function],
                **_percentiles(latency),
                "failed": sum(call.failed for call in calls),
                "timed_out": sum(call.timed_out for call in calls),
                "lost": sum(call.lost for call in calls),
            }
        )
    return sorted(found, key=lambda one: one["calls"] + one["under_way"], reverse=True)[:MOST_FUNCTIONS]


def channels(before: Sequence[Metrics], now: Sequence[Metrics]) -> list[Values]:
    """Bytes over each kind of channel, as their senders count them."""
    found: dict[str, Values] = {}
    for then, one, seconds in pairs_of_looks(before, now):
        known = {(each.peer, each.channel): each.sent_bytes for each in then.channels}
        for channel in one.channels:
            name = channel.channel
            entry = found.setdefault(name, {"channel": name, "links": 0, "sent": 0, "sent_per_s": 0.0})
            entry["links"] += 1
            entry["sent"] += channel.sent_bytes
            entry["sent_per_s"] += max(0, channel.sent_bytes - known.get((channel.peer, name), 0)) / seconds
    return [found[name] for name in sorted(found)]


def weights(before: Sequence[Metrics], now: Sequence[Metrics]) -> list[Values]:
    """The names of published weights, and the version of each subscriber."""
    return [
        {
            "name": row.name,
            "publisher": row.publisher,
            "closed": row.is_closed,
            "version": row.version,
            "size": row.size_bytes,
            "pushes": row.pushes_per_s,
            "copied": row.pushes_per_s * row.size_bytes,
            "who": row.told(MOST_FUNCTIONS),
            "behind": sum(number < row.number for number in row.subscribers.values()),
        }
        for row in weights_of(before, now)
    ]


def waiting(snapshots: Sequence[WorkerSnapshot]) -> list[Values]:
    """The calls that have waited longest, with the stacks of both ends. Of streams, those whose next item is late."""
    served = {(one.worker, call.caller, call.call_id): (one, call) for one in snapshots for call in one.served}
    made = [(one, call) for one in snapshots for call in one.calls if call.for_s]
    made.sort(key=lambda pair: -pair[1].for_s)
    entries = []
    for one, call in made[:MOST_WAITING]:
        entry: Values = {
            "caller": one.worker,
            "callee": call.to,
            "call": call.call_id,
            "function": call.title,
            "for_s": call.for_s,
            "timeout_s": call.timeout_s,
            "at_caller": _stack(one.thread(call.thread_id) if call.thread_id else None),
            "state": "",
            "at_callee": None,
        }
        there = served.get((call.to, one.worker, call.call_id))
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


def events(happened: Iterable[WorkerEvents]) -> list[Values]:
    """The latest events anywhere, the last first; a member's fate is told once, with all that saw it."""
    seen = sorted(((event, one.worker) for one in happened for event in one.events), key=lambda item: item[0].at)
    found: list[Values] = []
    of_members: dict[tuple[str, str], Values] = {}
    for event, by in seen:
        same = of_members.get((event.kind, event.worker))
        if same is not None and event.at - same["at"] < SAME_S:
            same["seen_by"].append(by)
            continue
        told: Values = {**event._asdict(), "seen_by": [by]}
        found.append(told)
        if event.kind in MEMBER_EVENTS:
            of_members[event.kind, event.worker] = told
    return found[: -MOST_EVENTS - 1 : -1]


def _rounded(value: float) -> float:
    """Four digits, which are enough for a picture, and shorter."""
    return float(f"{value:.4g}")
