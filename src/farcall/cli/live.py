"""``farcall top``, ``farcall dashboard`` and ``farcall trace``: commands for a cluster that runs already.

Owns the table of ``top``, sorted by rank. Its rates and percentiles cover the time since the last look, at first since
the start of each worker. Sixteen workers fit a screen of 80 by 24.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farcall.cli.figures import duration, rate, size
from farcall.errors import InitError
from farcall.observe.cluster import record
from farcall.observe.dashboard.server import Dashboard
from farcall.observe.metrics import Metrics
from farcall.observe.observer import Answers, Observer
from farcall.observe.rates import Row, batches, busiest, cluster_title, rows, stream_items_per_s, weights
from farcall.observe.spans import CALL, OPERATOR
from farcall.observe.trace import chrome_trace, write_json
from farcall.options import RpcBackendOptions
from farcall.protocol.observing import HIDDEN
from farcall.transport.tls import tls_for

_BUSIEST = 5


Cell = Callable[[Row], str | Text]
_WIDE: dict[str, Cell] = {
    "cpu": lambda row: f"{100 * row.cpus:.0f} %",
    "memory": lambda row: size(row.now.memory_bytes),
    "calls/s": lambda row: rate(row.called_per_s),
    "served/s": lambda row: rate(row.served_per_s),
    "p50": lambda row: duration(row.latency.percentile(50)),
    "p99": lambda row: duration(row.latency.percentile(99)),
    "out/s": lambda row: size(row.sent_per_s),
    "in/s": lambda row: size(row.received_per_s),
    "flight": lambda row: f"{row.now.calls_in_flight}/{row.now.served_in_flight}",
    "queue": lambda row: Text(str(row.now.pool.queued), style="bold red" if row.now.pool.queued else ""),
    "threads": lambda row: f"{row.now.pool.busy}/{row.now.pool.threads}",
    "refs": lambda row: f"{row.now.owned_references}/{row.now.used_references}",
    "errors": lambda row: Text(str(row.errors) if row.errors else "", style="red"),
}
_NARROW: dict[str, Cell] = {
    **{title: _WIDE[title] for title in ("calls/s", "p50", "p99")},
    "bytes/s": lambda row: size(row.sent_per_s + row.received_per_s),
    **{title: _WIDE[title] for title in ("queue", "refs")},
}
ENOUGH_COLUMNS = 124
"""A narrower terminal gets `_NARROW`."""


def _headed(texts: Iterable[str], figures: Iterable[str]) -> Table:
    """An empty table; its columns of figures follow those of texts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in texts:
        table.add_column(title, no_wrap=True)
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _table(heard: Answers[Metrics], found: list[Row], columns: int) -> Table:
    cells = _WIDE if columns >= ENOUGH_COLUMNS else _NARROW
    table = _headed(("worker", "state"), cells)
    for row in found:
        state = Text(row.now.state, style="green" if row.now.state in ("running", "serving") else "yellow")
        table.add_row(Text(row.now.worker), state, *(cell(row) for cell in cells.values()))
    for worker in heard.silent:
        since_s = max((row.now.unresponsive.get(worker.name, 0.0) for row in found), default=0.0)
        how = f"unresponsive {since_s:.0f} s" if since_s else "unresponsive"
        if worker.gone:
            how = "hidden" if worker.gone == HIDDEN else "gone"
        table.add_row(Text(worker.name), Text(how, style="bold red"))
    return table


def _busiest(before: list[Metrics], now: list[Metrics]) -> Table:
    """The functions that took most of the workers' time."""
    table = _headed(("function",), ("runs", "p50", "p99", "in all"))
    for row in busiest(before, now)[:_BUSIEST]:
        table.add_row(
            Text(row.function),
            str(row.latency.count),
            duration(row.latency.percentile(50)),
            duration(row.latency.percentile(99)),
            duration(row.latency.total_s),
        )
    return table


def _batches(before: list[Metrics], now: list[Metrics]) -> list[RenderableType]:
    """The batched functions, if there are any."""
    found = batches(before, now)[:_BUSIEST]
    if not found:
        return []
    table = _headed(("batched function",), ("runs", "mean size", "largest", "mean wait"))
    for row in found:
        mean, wait = f"{row.items / row.runs:.1f}", duration(row.waited_s / max(1, row.items))
        table.add_row(Text(row.function), str(row.runs), mean, str(row.largest), wait)
    return [table]


def _streams(before: list[Metrics], now: list[Metrics]) -> list[RenderableType]:
    """The streams, if there are any; each has two ends."""
    ends, per_s = sum(one.streams.open for one in now), stream_items_per_s(before, now)
    return [Text(f"streams: {ends} ends open, {rate(per_s)} items/s read")] if ends or per_s else []


def _weights(before: list[Metrics], now: list[Metrics]) -> list[RenderableType]:
    """The published weights, if there are any."""
    found = weights(before, now)
    if not found:
        return []
    table = _headed(("weights", "publisher"), ("version", "MiB", "pushes/s"))
    table.add_column("who has which")
    for row in found:
        who = Text(row.publisher or "closed") if row.publisher or row.is_closed else Text("nobody", style="bold red")
        mebibytes = f"{row.size_bytes / 2**20:.0f}"
        told = Text(row.told(_BUSIEST))
        table.add_row(Text(row.name), who, row.version, mebibytes, rate(row.pushes_per_s), told)
    return [table]


def page(heard: Answers[Metrics], before: list[Metrics], columns: int) -> RenderableType:
    """The whole page, on a terminal with ``columns`` columns."""
    name = cluster_title(heard.cluster_id, heard.answers)
    head = Text(f"cluster {name}: {len(heard.answers)} workers  {time.strftime('%H:%M:%S')}", style="bold")
    foot = Text(
        "flight: calls made/served and not answered; threads: busy/all; refs: values owned/references used", style="dim"
    )
    now = heard.answers
    extras = (*_batches(before, now), *_streams(before, now), *_weights(before, now))
    return Group(head, _table(heard, rows(before, now), columns), foot, _busiest(before, now), *extras)


def show_once(console: Console, observer: Observer, every_s: float) -> None:
    """Look twice, ``every_s`` apart, and print the difference."""
    before = observer.metrics().answers
    time.sleep(every_s)
    console.print(page(observer.metrics(), before, console.width))


def watch(console: Console, observer: Observer, every_s: float) -> None:
    """Show the page over and over until Ctrl-C, or the cluster's end."""
    before: list[Metrics] = []
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            heard = observer.metrics()
            live.update(page(heard, before, console.width), refresh=True)
            before = heard.answers
            time.sleep(every_s)


def serve_dashboard(console: Console, observer: Observer, address: str, place: tuple[str, int]) -> None:
    """Serve the live page at ``place`` until Ctrl-C. ``observer`` is connected; to ``address``, if there is one."""
    heard = observer.metrics()
    cluster_id, title = heard.cluster_id, cluster_title(heard.cluster_id, heard.answers)
    first: list[Observer] = [observer]

    def connect() -> Observer:
        if first:
            return first.pop()
        return Observer.connect_with_secret(address) if address else Observer.find(cluster_id)

    options, (host, port) = RpcBackendOptions(), place
    try:
        served = Dashboard(connect, port, host, tls=tls_for(options), name=options.advertise or "")
    except InitError as error:
        raise SystemExit(str(error)) from error
    try:
        console.print(f"the dashboard of cluster {title} is at {served.url} (Ctrl-C ends it)", soft_wrap=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        served.close()


def write_trace(console: Console, observer: Observer, seconds: float, output: Path, options: int) -> None:
    """Have all workers record for ``seconds``, and write ``output``."""
    output.touch()  # a place that cannot be written to is reported before the recording
    console.print(f"recording for {seconds:g} s ...")
    found = record(observer, seconds, options)
    write_json(chrome_trace(found.harvest, found.origin), output)
    kinds = Counter(span.kind for span in found.harvest.spans)
    console.print(
        f"{output}: {len(found.harvest.names)} workers, {kinds[CALL]} calls, {kinds[OPERATOR]} operators; open it at "
        "https://ui.perfetto.dev",
        soft_wrap=True,
    )
    if found.harvest.dropped:
        console.print(f"{found.harvest.dropped} operators were left out: the recording was full", style="yellow")
    for worker in found.missing:
        why = worker.gone or "it did not answer in time"
        console.print(Text(f"not recorded: {worker.name} ({why})", style="yellow"))
