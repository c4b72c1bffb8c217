"""Histograms, and what is worked out from them."""

from __future__ import annotations

import io
import threading
from bisect import bisect_right

import msgspec
import pytest
from rich.console import Console

from farcall.cli.live import page
from farcall.observe.dashboard import digest
from farcall.observe.metrics import CallMetrics, ChannelMetrics, Histogram, Metrics, _calls
from farcall.observe.observer import Answers
from farcall.observe.rates import rows, weights
from farcall.observe.snapshot import PoolView
from farcall.protocol.frames import MAX_FUNCTION_BYTES
from farcall.protocol.observing import WorkerState
from farcall.runtime.observing.counters import BOUNDS_S, FAILED, MOST_FUNCTIONS, OTHERS, FunctionCounters, counters_of
from farcall.weights.version import WeightsMetrics


def histogram(*durations_s: float) -> Histogram:
    buckets: dict[int, int] = {}
    for duration_s in durations_s:
        bucket = bisect_right(BOUNDS_S, duration_s)
        buckets[bucket] = buckets.get(bucket, 0) + 1
    return Histogram(buckets)


def metrics(up_s: float, called: Histogram, sent_bytes: int = 0, failed: int = 0) -> Metrics:
    return Metrics(
        worker="w0",
        rank=0,
        process_id=1,
        host="host",
        state="running",
        taken_at=0.0,
        up_s=up_s,
        called=[CallMetrics("w1", "f", called, failed, 0, 0)],
        served=[],
        channels=[ChannelMetrics("w1", "unix", sent_bytes, 0)],
        calls_in_flight=1,
        served_in_flight=2,
        pool=PoolView(16, 4, 3, 2, 1),
        owned_references=5,
        used_references=6,
        contexts=7,
        interruptions=3,
        reconnects=2,
        frames_sent_again=4,
        links_joined=0,
        links_parted=0,
        peers_lost=0,
        members={"dead": 1},
    )


@pytest.mark.parametrize("duration_s", [1e-6, 28e-6, 3.3e-3, 0.9, 60.0])
def test_a_duration_is_found_again_within_a_bucket(duration_s: float) -> None:
    assert histogram(duration_s).percentile(50) == pytest.approx(duration_s, rel=0.1)


def test_percentiles_and_totals() -> None:
    found = histogram(*[1e-3] * 98, 0.1, 0.1)
    assert found.count == 100
    assert found.percentile(50) == pytest.approx(1e-3, rel=0.1)
    assert found.percentile(99) == pytest.approx(0.1, rel=0.1)
    assert found.total_s == pytest.approx(0.298, rel=0.1)
    assert histogram().percentile(99) == 0.0


def test_the_ends_of_the_scale() -> None:
    assert histogram(0.0).percentile(50) == BOUNDS_S[0]
    assert histogram(1e9).percentile(50) == BOUNDS_S[-1]


def test_what_came_between_two_pictures() -> None:
    before, after = histogram(1e-3), histogram(1e-3, 1e-3, 0.5)
    assert (after - before).count == 2
    assert (after - before) + before == after


def test_functions_without_a_segment_that_names_them_have_their_names_within_the_same_limit() -> None:
    tallies: FunctionCounters = {}
    assert counters_of(tallies, b"", "train") is counters_of(tallies, b"k a pickle", "train")
    assert counters_of(tallies, b"", "train") is not counters_of(tallies, b"", "test")
    for number in range(MOST_FUNCTIONS + 10):
        counters_of(tallies, b"", f"{number:04}" * 2000)
    assert len(tallies) == MOST_FUNCTIONS + 1
    assert max(map(len, tallies)) == MAX_FUNCTION_BYTES


def test_functions_beyond_the_limit_share_a_tally() -> None:
    tallies: FunctionCounters = {}
    for number in range(MOST_FUNCTIONS + 10):
        counters_of(tallies, b"p%d" % number)[0] += 1
    assert tallies[OTHERS][0] == 10
    assert len(tallies) == MOST_FUNCTIONS + 1


def test_no_count_is_lost_between_threads() -> None:
    counters = counters_of({}, b"f")

    def count() -> None:
        for _ in range(20_000):
            counters[bisect_right(BOUNDS_S, 1e-3)] += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counters) == 80_000


def test_rates_between_two_looks() -> None:
    (row,) = rows([metrics(10.0, histogram(1e-3), 1000)], [metrics(12.0, histogram(1e-3, 0.1, 0.1), 5000, failed=3)])
    assert row.called_per_s == 1.0
    assert row.latency.percentile(50) == pytest.approx(0.1, rel=0.1)
    assert row.sent_per_s == 2000
    assert row.errors == 3


def test_a_first_look_compares_with_the_start() -> None:
    (row,) = rows([], [metrics(2.0, histogram(1e-3, 0.1), 1000)])
    assert (row.called_per_s, row.sent_per_s) == (1.0, 500.0)


@pytest.mark.parametrize("columns", [80, 120])
def test_sixteen_workers_fit_a_terminal(columns: int) -> None:
    busy = Histogram({60: 90_000, 40: 10_000})
    found = [
        msgspec.structs.replace(metrics(2.0, busy, 3 << 30), worker=f"trainer{rank}", owned_references=1234)
        for rank in range(16)
    ]
    text = io.StringIO()
    Console(file=text, width=columns).print(page(Answers("id", found, [WorkerState("lost", 16, "gone")]), [], columns))
    lines = text.getvalue().splitlines()
    assert len(lines) <= 23
    assert "…" not in text.getvalue()
    for rank in range(16):
        assert lines[2 + rank].startswith(f"trainer{rank} ")
        assert "1234/6" in lines[2 + rank]
    assert lines[18].split() == ["lost", "gone"]


def test_prometheus_text() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from farcall.observe.prometheus import families

    registry = prometheus_client.CollectorRegistry(auto_describe=False)

    class Collector:
        def collect(self) -> list[object]:
            return families(metrics(2.0, histogram(30e-6, 0.1), 1000, failed=3))

        def describe(self) -> list[object]:
            return []

    registry.register(Collector())
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    labels = 'function="f",le="%s",peer="w1",worker="w0"'
    assert f"farcall_call_seconds_bucket{{{labels % '+Inf'}}} 2.0" in lines
    assert f"farcall_call_seconds_bucket{{{labels % '6.4e-05'}}} 1.0" in lines
    assert f"farcall_call_seconds_bucket{{{labels % '1.6e-05'}}} 0.0" in lines
    assert 'farcall_call_errors_total{function="f",peer="w1",why="failed",worker="w0"} 3.0' in lines
    assert 'farcall_channel_bytes_total{channel="unix",direction="sent",peer="w1",worker="w0"} 1000.0' in lines
    assert 'farcall_reconnects_total{worker="w0"} 2.0' in lines
    assert 'farcall_member_events_total{event="dead",worker="w0"} 1.0' in lines
    assert 'farcall_queue_depth{worker="w0"} 1.0' in lines


def published(worker: str, *weights: WeightsMetrics) -> Metrics:
    return msgspec.structs.replace(metrics(10.0, histogram()), worker=worker, weights=list(weights))


def test_who_has_which_weights_and_who_lags() -> None:
    before = [
        published("w0", WeightsMetrics("policy", "publishes", "published", 2, 7, 1 << 20, 2, 3)),
        published("w1"),
        published("w2"),
    ]
    now = [
        published("w0", WeightsMetrics("policy", "publishes", "published", 2, 17, 1 << 20, 2, 13)),
        published("w1", WeightsMetrics("policy", "subscribes", "subscribed", 2, 17, 1 << 20, 2, 8)),
        published("w2", WeightsMetrics("policy", "subscribes", "subscribed", 2, 15, 1 << 20, 2, 6)),
    ]
    now = [msgspec.structs.replace(one, up_s=15.0) for one in now]
    [row] = weights(before, now)
    assert (row.publisher, row.version, row.pushes_per_s) == ("w0", "2.17", 2.0)
    assert row.told(5) == "w2 15 (2 behind), w1 17"
    assert row.told(1) == "w2 15 (2 behind) and 1 more"
    text = io.StringIO()
    Console(file=text, width=120).print(page(Answers("id", now, []), before, 120))
    assert "w2 15 (2 behind), w1 17" in text.getvalue()
    [told] = digest.weights(before, now)
    assert (told["behind"], told["copied"]) == (1, 2.0 * (1 << 20))


def test_weights_without_a_publisher_are_told_as_such() -> None:
    now = [
        published("w0", WeightsMetrics("policy", "publishes", "superseded", 1, 3, 8, 1, 3)),
        published("w1", WeightsMetrics("policy", "subscribes", "orphaned", 2, 4, 8, 1, 3)),
    ]
    [row] = weights([], now)
    assert (row.publisher, row.is_closed, row.version) == ("", False, "2.4")


def test_weights_that_were_closed_and_those_that_nobody_has_published() -> None:
    now = [
        published("w0", WeightsMetrics("policy", "publishes", "closed", 1, 3, 8, 1, 3)),
        published("w1", WeightsMetrics("critic", "subscribes", "unpublished", 0, 0, 0, 0, 0)),
    ]
    never, closed = weights([], now)
    assert (closed.publisher, closed.is_closed, closed.version) == ("", True, "1.3")
    assert (never.publisher, never.is_closed, never.version, never.told(5)) == ("", False, "none", "w1 none")


def test_functions_of_one_name_are_one_series() -> None:
    """Prometheus refuses two samples with the same labels."""
    table: FunctionCounters = {}
    for module in (b"first", b"second"):
        counters_of(table, b"p" + module + b"\0Model.step")[3] += 2
    counters_of(table, b"psecond\0Model.step")[FAILED] += 1
    assert [(one.peer, one.function, one.latency.buckets, one.failed) for one in _calls("w1", table)] == [
        ("w1", "Model.step", {3: 4}, 1)
    ]
