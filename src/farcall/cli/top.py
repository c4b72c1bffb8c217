"""``farcall top``: what the workers of a cluster are doing, line by line, over and over.

Owns the table. Rates and percentiles are of the time since the last look; a first look compares with the start of each
worker. Sorted by rank; sixteen workers fit a screen of 80 by 24.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farcall.observe.metrics import CallMetrics, Histogram, Metrics
from farcall.observe.observer import Heard, Observer

__all__ = ["Row", "page", "rows", "show_once", "watch"]

_BUSIEST = 5


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
    troubles: int
    """Calls that failed, timed out or were lost."""


def rows(before: list[Metrics], now: list[Metrics]) -> list[Row]:
    """What happened between two looks; a worker that was not in the first is taken from its start."""
    earlier = {(one.worker, one.process_id): one for one in before}
    return [_row(earlier.get((one.worker, one.process_id)), one) for one in now]


def _row(before: Metrics | None, now: Metrics) -> Row:
    seconds = max(1e-3, now.up_s - (before.up_s if before is not None else 0.0))
    called = _latency(now.called, before.called if before is not None else [])
    served = _latency(now.served, before.served if before is not None else [])
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
        troubles=_troubles(now) - (_troubles(before) if before is not None else 0),
    )


def _latency(now: list[CallMetrics], before: list[CallMetrics]) -> Histogram:
    earlier = {(one.peer, one.function): one.latency for one in before}
    total = Histogram({})
    for one in now:
        then = earlier.get((one.peer, one.function))
        total += one.latency if then is None else one.latency - then
    return total


def _troubles(one: Metrics) -> int:
    return sum(call.failed + call.timed_out + call.lost for call in one.called)


Cell = Callable[[Row], str | Text]
_WIDE: dict[str, Cell] = {
    "calls/s": lambda row: _rate(row.called_per_s),
    "served/s": lambda row: _rate(row.served_per_s),
    "p50": lambda row: _duration(row.latency.percentile(50)),
    "p99": lambda row: _duration(row.latency.percentile(99)),
    "out/s": lambda row: _size(row.sent_per_s),
    "in/s": lambda row: _size(row.received_per_s),
    "flight": lambda row: f"{row.in_flight}/{row.serving}",
    "queue": lambda row: Text(str(row.queued), style="bold red" if row.queued else ""),
    "threads": lambda row: f"{row.busy}/{row.threads}",
    "refs": lambda row: f"{row.owned}/{row.used}",
    "errors": lambda row: Text(str(row.troubles) if row.troubles else "", style="red"),
}
_NARROW: dict[str, Cell] = {
    **{title: _WIDE[title] for title in ("calls/s", "p50", "p99")},
    "bytes/s": lambda row: _size(row.sent_per_s + row.received_per_s),
    **{title: _WIDE[title] for title in ("queue", "refs")},
}
"""What fits where there are not ENOUGH_COLUMNS."""
ENOUGH_COLUMNS = 112


def _table(heard: Heard[Metrics], found: list[Row], columns: int) -> Table:
    cells = _WIDE if columns >= ENOUGH_COLUMNS else _NARROW
    table = Table(box=None, pad_edge=False, expand=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in cells:
        table.add_column(title, justify="right", no_wrap=True)
    for row in found:
        state = Text(row.state, style="green" if row.state == "running" else "yellow")
        table.add_row(Text(row.worker), state, *(cell(row) for cell in cells.values()))
    for worker in heard.silent:
        table.add_row(Text(worker.name), Text("gone" if worker.gone else "silent", style="bold red"))
    return table


def _busiest(before: list[Metrics], now: list[Metrics]) -> Table:
    """The functions that took most of the workers' time."""
    earlier = {(one.worker, call.peer, call.function): call.latency for one in before for call in one.served}
    total: dict[str, Histogram] = {}
    for one in now:
        for call in one.served:
            then = earlier.get((one.worker, call.peer, call.function), Histogram({}))
            total[call.function] = total.get(call.function, Histogram({})) + (call.latency - then)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("function", no_wrap=True)
    for title in ("runs", "p50", "p99", "in all"):
        table.add_column(title, justify="right", no_wrap=True)
    ranked = sorted(total.items(), key=lambda item: item[1].total_s, reverse=True)
    for function, latency in ranked[:_BUSIEST]:
        if latency.count:
            table.add_row(
                Text(function),
                str(latency.count),
                _duration(latency.percentile(50)),
                _duration(latency.percentile(99)),
                _duration(latency.total_s),
            )
    return table


def page(heard: Heard[Metrics], before: list[Metrics], columns: int) -> RenderableType:
    """All that is shown, on a terminal with so many columns."""
    head = Text(f"cluster {heard.cluster_id}: {len(heard.answers)} workers  {time.strftime('%H:%M:%S')}", style="bold")
    foot = Text("flight: calls made/served and not answered; refs: values owned/references used", style="dim")
    return Group(head, _table(heard, rows(before, heard.answers), columns), foot, _busiest(before, heard.answers))


def show_once(console: Console, observer: Observer, every_s: float) -> None:
    """Look twice, ``every_s`` apart, and print what happened in between."""
    before = observer.metrics().answers
    time.sleep(every_s)
    console.print(page(observer.metrics(), before, console.width))


def watch(console: Console, observer: Observer, every_s: float) -> None:
    """Show it until Ctrl-C, or the cluster's end."""
    before: list[Metrics] = []
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            heard = observer.metrics()
            live.update(page(heard, before, console.width), refresh=True)
            before = heard.answers
            time.sleep(every_s)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}"


def _duration(seconds: float) -> str:
    if seconds == 0:
        return "-"
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return "<1 us"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"
