"""Metrics in Prometheus' text format, on a port of the user's choice.

Owns the names of the series. The numbers are read when Prometheus asks (`metrics.collect`), on the thread of its
request; no state is kept between requests. Uses ``prometheus-client``, which is an extra:
``pip install 'farcall[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from errno import EADDRINUSE
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from farcall.errors import InitError
from farcall.observe.metrics import CallMetrics, Histogram, Metrics, collect
from farcall.observe.web_server import Answer, Request, WebServer
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import BOUNDS_S
from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.tls import Tls

_NEIGHBOURS = 1000
"""Ports above the requested one that are tried: all workers of a host have the same option."""
_LAST_PORT = 65535
_EVERY = 8
"""How many fine buckets make one bucket here: two octaves, 16 buckets per function and peer."""


class MetricsServer:
    """The server of one node's metrics."""

    def __init__(self, node: Runtime, host: str, port: int, tls: Tls | None) -> None:
        """With ``tls``, clients on other machines must show a certificate of the cluster's authority."""
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

        is_open = tls is None or not tls.serves_web() or is_loopback(host)
        protect = None if tls is None or is_open else partial(tls.web, for_members=True)
        last = min(port + _NEIGHBOURS, _LAST_PORT) if port else 0
        for tried in range(port, last + 1):
            try:
                self._server = WebServer("farcall-metrics", host, tried, answer, protect=protect)
                break
            except OSError as error:
                if error.errno != EADDRINUSE or tried == last:
                    raise InitError(f"cannot serve metrics on {host}:{tried} (option metrics_port): {error}") from error
        self.port: int = self._server.port
        """The port that was requested, or the next free one where another process has it, or the system's choice."""

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


class _Collector:
    """A collector of prometheus-client that reads the metrics of one node."""

    def __init__(self, node: Runtime) -> None:
        self._node = node

    def collect(self) -> Iterable[Any]:
        return families(collect(self._node))


def families(metrics: Metrics) -> list[Any]:
    """The series of one worker."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    found = [
        _histograms("farcall_call_seconds", "From call to answer.", metrics.worker, metrics.called),
        _histograms("farcall_served_seconds", "How long served functions ran.", metrics.worker, metrics.served),
    ]
    for kind, name, text, labels, samples in _series(metrics):
        make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        family = make(name, text, labels=["worker", *labels])
        for values, number in samples:
            family.add_metric([metrics.worker, *values], number)
        found.append(family)
    return found


Sample: TypeAlias = tuple[Sequence[str], float]
"""The values of a series' labels, and its number."""


def _series(metrics: Metrics) -> Iterable[tuple[str, str, str, Sequence[str], Iterable[Sample]]]:
    """Kind, name, description, labels and samples of each series except the histograms."""
    pool, memory, streams = metrics.pool, metrics.device_memory, metrics.streams
    errors = [
        ((one.peer, one.function, why), count)
        for one in metrics.called
        for why, count in (("failed", one.failed), ("timed_out", one.timed_out), ("lost", one.lost))
        if count
    ]
    traffic = [
        ((one.peer, one.channel, direction), count)
        for one in metrics.channels
        for direction, count in (("sent", one.sent_bytes), ("received", one.received_bytes))
    ]
    yield "counter", "farcall_call_errors", "Calls made that did not end well.", ("peer", "function", "why"), errors
    yield "counter", "farcall_channel_bytes", "Bytes exchanged with peers.", ("peer", "channel", "direction"), traffic
    for kind, name, text, number in (
        ("gauge", "calls_in_flight", "Calls made and not answered yet.", metrics.calls_in_flight),
        ("gauge", "served_in_flight", "Calls that have come and are not answered yet.", metrics.served_in_flight),
        ("gauge", "queue_depth", "Calls that no thread has taken yet.", pool.queued),
        ("gauge", "threads", "Threads for functions.", pool.threads),
        ("gauge", "threads_busy", "Threads inside functions.", pool.busy),
        ("gauge", "threads_parked", "Threads that wait for calls.", pool.parked),
        ("gauge", "references_owned", "Values of this worker that are referred to.", metrics.owned_references),
        ("gauge", "references_used", "References held to values of others.", metrics.used_references),
        ("gauge", "contexts", "Distributed autograd contexts.", metrics.contexts),
        ("gauge", "device_memory_bytes", "Device memory kept for sending.", memory.total_bytes),
        ("gauge", "device_memory_lent_bytes", "Of it, what peers hold.", memory.lent_bytes),
        ("gauge", "streams_open", "Streams read or written here.", streams.open),
        ("gauge", "weights_bytes", "Memory for versions of weights.", metrics.weights_bytes),
        ("gauge", "weights_device_bytes", "Device memory for versions of weights.", memory.weights_bytes),
        ("gauge", "up_seconds", "Since this worker started.", metrics.up_s),
        ("counter", "interruptions", "Connections to live members that broke.", metrics.interruptions),
        ("counter", "reconnects", "Connections that were made again.", metrics.reconnects),
        ("counter", "frames_sent_again", "Messages written once more after that.", metrics.frames_sent_again),
        ("counter", "links_joined", "Connections made at need, in a large group.", metrics.links_joined),
        ("counter", "links_parted", "Connections given up for want of use.", metrics.links_parted),
        ("counter", "peers_lost", "Members that were lost.", metrics.peers_lost),
    ):
        yield kind, f"farcall_{name}", text, (), [((), number)]
    members = [((event,), count) for event, count in metrics.members.items()]
    yield "counter", "farcall_member_events", "What became of members.", ("event",), members
    silent = [((peer,), seconds) for peer, seconds in metrics.unresponsive.items()]
    yield "gauge", "farcall_unresponsive_seconds", "Members that answer nobody, and for how long.", ("peer",), silent
    for name, text, read in (
        ("runs", "Runs of batched functions.", attrgetter("runs")),
        ("items", "Arguments of all these runs.", attrgetter("items")),
        ("waiting_seconds", "How long all of them waited for their batch to begin.", attrgetter("waited_s")),
    ):
        batches = [((batch.function,), read(batch)) for batch in metrics.batches]
        yield "counter", f"farcall_batch_{name}", text, ("function",), batches
    items = [(("read",), streams.items_read), (("written",), streams.items_written)]
    yield "counter", "farcall_stream_items", "Items of streams.", ("direction",), items
    weights = metrics.weights
    newest = [((one.name, one.role, str(one.epoch)), one.number) for one in weights]
    yield "gauge", "farcall_weights_version", "The newest version of weights.", ("name", "role", "epoch"), newest
    total = [((one.name, one.role), one.total) for one in weights]
    yield "counter", "farcall_weights_versions", "Versions pushed or received.", ("name", "role"), total


def _histograms(name: str, text: str, worker: str, calls: Sequence[CallMetrics]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=["worker", "peer", "function"])
    together: dict[tuple[str, str], Histogram] = {}
    for one in calls:  # functions of the same name in different modules share a series
        key = (one.peer, one.function)
        together[key] = together.get(key, Histogram({})) + one.latency
    for (peer, function), latency in together.items():
        family.add_metric([worker, peer, function], _cumulative(latency), latency.total_s)
    return family


def _cumulative(latency: Histogram) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets: each counts the durations up to its bound."""
    found: list[tuple[str, float]] = []
    for last in range(0, len(BOUNDS_S), _EVERY):
        count = sum(count for bucket, count in latency.buckets.items() if bucket <= last)
        found.append((f"{BOUNDS_S[last]:.9g}", float(count)))
    found.append(("+Inf", float(latency.count)))
    return found
