"""Metrics in Prometheus' text format, on a port of the user's choice.

Owns the names of the series. The numbers are read when Prometheus asks (`metrics.collect`), on the thread of its
request; nothing is kept between two requests. Uses ``prometheus-client``, which is an extra:
``pip install 'farcall[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from farcall.errors import InitError
from farcall.observe.metrics import CallMetrics, Histogram, Metrics, collect
from farcall.observe.web_server import Answer, Request, WebServer
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import BOUNDS_S
from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.tls import Tls

_EVERY = 8
"""So many fine buckets make one here: two octaves, 16 buckets for each function and peer."""


class MetricsServer:
    """The server of one node's metrics."""

    def __init__(self, node: Runtime, host: str, port: int, tls: Tls | None) -> None:
        """With ``tls``, also to other machines: a client must show a certificate of the cluster's authority."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ImportError:
            raise InitError(
                "metrics_port needs prometheus-client: pip install 'farcall[metrics]', or leave the option out"
            ) from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(node))

        def answer(request: Request) -> Answer:
            encode, kind = choose_encoder(request.accept)
            return Answer(encode(registry), kind)

        try:
            is_open = tls is None or not tls.serves_web() or is_loopback(host)
            protect = None if tls is None or is_open else partial(tls.web, for_members=True)
            self._server = WebServer("farcall-metrics", host, port, answer, protect=protect)
        except OSError as error:
            raise InitError(f"cannot serve metrics on {host}:{port} (option metrics_port): {error}") from error
        self._server.start()
        self.port: int = self._server.port
        """The port that was asked for, or chosen."""

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


class _Collector:
    """The source of numbers for prometheus-client."""

    def __init__(self, node: Runtime) -> None:
        self._node = node

    def collect(self) -> Iterable[Any]:
        return families(collect(self._node))

    def describe(self) -> Iterable[Any]:
        return ()  # the names are not known before there are calls


def families(metrics: Metrics) -> list[Any]:
    """The series of one worker."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counter, gauge, worker = CounterMetricFamily, GaugeMetricFamily, metrics.worker
    ended = counter(
        "farcall_call_errors", "Calls made that did not end well.", labels=["worker", "peer", "function", "why"]
    )
    for one in metrics.called:
        for why, count in (("failed", one.failed), ("timed_out", one.timed_out), ("lost", one.lost)):
            if count:
                ended.add_metric([worker, one.peer, one.function, why], count)
    traffic = counter(
        "farcall_channel_bytes", "Bytes exchanged with peers.", labels=["worker", "peer", "channel", "direction"]
    )
    for channel in metrics.channels:
        traffic.add_metric([worker, channel.peer, channel.channel, "sent"], channel.sent_bytes)
        traffic.add_metric([worker, channel.peer, channel.channel, "received"], channel.received_bytes)
    found = [
        _histograms("farcall_call_seconds", "From call to answer.", worker, metrics.called),
        _histograms("farcall_served_seconds", "How long served functions ran.", worker, metrics.served),
        ended,
        traffic,
    ]
    for family, name, text, value in (
        (gauge, "farcall_calls_in_flight", "Calls made and not answered yet.", metrics.calls_in_flight),
        (gauge, "farcall_served_in_flight", "Calls that have come and are not answered yet.", metrics.served_in_flight),
        (gauge, "farcall_queue_depth", "Calls that no thread has taken yet.", metrics.pool.queued),
        (gauge, "farcall_threads", "Threads for functions.", metrics.pool.threads),
        (gauge, "farcall_threads_busy", "Threads inside functions.", metrics.pool.busy),
        (gauge, "farcall_threads_parked", "Threads that wait for calls.", metrics.pool.parked),
        (gauge, "farcall_references_owned", "Values of this worker that are referred to.", metrics.owned_references),
        (gauge, "farcall_references_used", "References held to values of others.", metrics.used_references),
        (gauge, "farcall_contexts", "Distributed autograd contexts.", metrics.contexts),
        (
            gauge,
            "farcall_device_memory_bytes",
            "Device memory kept for sending.",
            metrics.device_memory.total_bytes,
        ),
        (gauge, "farcall_device_memory_lent_bytes", "Of it, what peers hold.", metrics.device_memory.lent_bytes),
        (gauge, "farcall_streams_open", "Streams read or written here.", metrics.streams.open),
        (gauge, "farcall_weights_bytes", "Memory for versions of weights.", metrics.weights_bytes),
        (gauge, "farcall_up_seconds", "Since this worker started.", metrics.up_s),
        (counter, "farcall_interruptions", "Connections to live members that broke.", metrics.interruptions),
        (counter, "farcall_reconnects", "Connections that were made again.", metrics.reconnects),
        (counter, "farcall_frames_sent_again", "Messages written once more after that.", metrics.frames_sent_again),
        (counter, "farcall_peers_lost", "Members that were lost.", metrics.peers_lost),
    ):
        single = family(name, text, labels=["worker"])
        single.add_metric([worker], value)
        found.append(single)
    changes = counter("farcall_member_events", "What became of members.", labels=["worker", "event"])
    for event, count in metrics.members.items():
        changes.add_metric([worker, event], count)
    found.append(changes)
    silent = gauge(
        "farcall_unresponsive_seconds", "Members that answer nobody, and for how long.", labels=["worker", "peer"]
    )
    for peer, seconds in metrics.unresponsive.items():
        silent.add_metric([worker, peer], seconds)
    found.append(silent)
    batches = [
        counter(f"farcall_batch_{what}", text, labels=["worker", "function"])
        for what, text in (
            ("runs", "Runs of batched functions."),
            ("items", "Arguments of all these runs."),
            ("waiting_seconds", "How long all of them waited for their batch to begin."),
        )
    ]
    for batch in metrics.batches:
        for series, value in zip(batches, (batch.runs, batch.items, batch.waited_s), strict=True):
            series.add_metric([worker, batch.function], value)
    items = counter("farcall_stream_items", "Items of streams.", labels=["worker", "direction"])
    items.add_metric([worker, "read"], metrics.streams.items_read)
    items.add_metric([worker, "written"], metrics.streams.items_written)
    versions = gauge(
        "farcall_weights_version", "The newest version of weights.", labels=["worker", "name", "role", "epoch"]
    )
    pushed = counter("farcall_weights_versions", "Versions pushed or received.", labels=["worker", "name", "role"])
    for one_name in metrics.weights:
        versions.add_metric([worker, one_name.name, one_name.role, str(one_name.epoch)], one_name.number)
        pushed.add_metric([worker, one_name.name, one_name.role], one_name.total)
    return [*found, *batches, items, versions, pushed]


def _histograms(name: str, text: str, worker: str, calls: Sequence[CallMetrics]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=["worker", "peer", "function"])
    together: dict[tuple[str, str], Histogram] = {}
    for one in calls:  # two functions of one name, in different modules, are one series
        key = (one.peer, one.function)
        together[key] = together.get(key, Histogram({})) + one.latency
    for (peer, function), latency in together.items():
        family.add_metric([worker, peer, function], _cumulative(latency), latency.total_s)
    return family


def _cumulative(latency: Histogram) -> list[tuple[str, float]]:
    """Prometheus' buckets: how many were at most so long."""
    found: list[tuple[str, float]] = []
    for last in range(0, len(BOUNDS_S), _EVERY):
        count = sum(count for bucket, count in latency.buckets.items() if bucket <= last)
        found.append((f"{BOUNDS_S[last]:.9g}", float(count)))
    found.append(("+Inf", float(latency.count)))
    return found
