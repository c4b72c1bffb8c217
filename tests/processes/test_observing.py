"""A real cluster looked at from inside and outside: metrics, observers and what they may not do."""

from __future__ import annotations

import functools
import http.client
import operator
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.observing import find_observer
from tests.kit.stopping import stop
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate

import farcall
from farcall import autograd
from farcall.errors import HandshakeRefused, NetworkError
from farcall.observe import observer as observer_module
from farcall.observe.metrics import Metrics
from farcall.observe.observability import Observability
from farcall.observe.observer import Observer
from farcall.observe.presence import find_nodes
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.protocol.frames import REQUEST, encode_small
from farcall.protocol.hello import observer_key
from farcall.runtime.node import current_runtime
from farcall.secret import Secret
from farcall.testing.cluster import WorkerProcess, finish, run_cluster, start_cluster

PATIENCE_S = 250.0
SECRET = "the cluster's secret"


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("on purpose")


def wait_for_file(path: str) -> None:
    _wait_for(Path(path).exists)


def stay(rank: int, done: str) -> None:
    wait_for_file(done)


def _wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


class Cluster:
    """Members that stay until the test is over."""

    def __init__(self, size: int, path: Path, observable: bool = True, **options: Any) -> None:
        self.directory = path / "run"
        self.done = path / "done"
        self.size = size
        observing = ObservingOptions(runtime_directory=str(self.directory), observable=observable)
        self.options = {"observing": observing, **options}
        self.members: list[WorkerProcess] = []

    def __enter__(self) -> Cluster:
        self.members = start_cluster(self.size, stay, str(self.done), **self.options)
        _wait_for(lambda: len(find_nodes(self.directory)) == self.size)
        with self.observer() as observer:
            _wait_for(lambda: [one.state for one in observer.metrics(PATIENCE_S).answers] == ["running"] * self.size)
        return self

    def __exit__(self, *_: object) -> None:
        self.done.touch()
        finish(self.members)

    def observer(self) -> Observer:
        return find_observer(self.directory)


# ---------------------------------------------------------------------- from inside


def counted(rank: int) -> Metrics | None:
    if rank != 0:
        return None
    for _ in range(10):
        farcall.rpc_sync("w1", echo, args=(1,))
    farcall.rpc_async("w1", echo, args=(torch.ones(1 << 18),)).wait()
    lending = current_runtime().other(1).lending  # type: ignore[union-attr]
    wait_until(lambda: lending is not None and lending.is_used)  # the memory that was offered with it is accepted
    farcall.rpc_async("w1", echo, args=(torch.ones(1 << 18),)).wait()
    farcall.rpc_sync("w0", echo, args=(1,))
    with pytest.raises(ValueError, match="on purpose"):
        farcall.rpc_sync("w1", fail)
    reference = farcall.remote("w1", echo, args=(1,))
    reference.to_here()
    wait_until(lambda: len(current_runtime().calls) == 0)  # the value may come before the answer to its creation
    with autograd.context():
        found = farcall.metrics()
        del reference
    return found


def test_what_happened_is_counted() -> None:
    found = run_cluster(2, counted)[0]
    calls = {(one.peer, one.function): one for one in found.called}
    assert calls["w1", "echo"].latency.count == 13  # the creating call of a reference is one, too
    assert calls["w0", "echo"].latency.count == 1
    assert 0 < calls["w1", "echo"].latency.percentile(50) < PATIENCE_S
    assert calls["w1", "fail"].failed == 1
    assert {(one.peer, one.function): one.latency.count for one in found.served} == {("w0", "echo"): 1}
    bytes_by_channel = {one.channel: (one.sent_bytes, one.received_bytes) for one in found.channels}
    assert all(count > 0 for count in bytes_by_channel["unix"])
    assert bytes_by_channel["shared memory"][0] >= 1 << 20
    assert (found.worker, found.rank, found.state, found.contexts) == ("w0", 0, "running", 1)
    assert found.used_references == 1
    assert (found.calls_in_flight, found.pool.queued, found.reconnects, found.peers_lost) == (0, 0, 0, 0)


class Adder:
    """Its bound methods travel with their calls."""

    def add(self, x: int) -> int:
        return x + 1


def unnamed(rank: int) -> list[set[str]]:
    """What each side of calls that name no function counts them as, and how many are under way."""
    if rank == 0:
        farcall.rpc_sync("w1", functools.partial(echo, 1))
        farcall.rpc_async("w1", functools.partial(functools.partial(echo), 1)).wait()
        farcall.rpc_sync("w1", Adder().add, args=(1,))
        farcall.rpc_sync("w1", str.upper, args=("a",))
        farcall.rpc_sync("w1", operator.attrgetter("real"), args=(1,))
        with pytest.raises(AttributeError):
            farcall.rpc_sync("w1", operator.attrgetter("absent"), args=(1,))
    farcall.barrier()
    found = farcall.metrics()
    return [
        {f"{one.function} {one.latency.count} {one.failed}" for one in calls} for calls in (found.called, found.served)
    ]


def test_functions_that_travel_with_their_calls_are_counted_by_their_names() -> None:
    (called, _), (_, served) = run_cluster(2, unnamed)
    expected = {"echo 2 0", "Adder.add 1 0", "str.upper 1 0", "attrgetter 2 1"}
    assert expected <= called
    assert expected <= served
    assert not [one for one in called | served if "pickled" in one]


def scraped(rank: int) -> str:
    farcall.rpc_sync(f"w{1 - rank}", echo, args=(1,))
    port = current_runtime().part(Observability).metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_prometheus_is_served_on_a_port_of_choice() -> None:
    pytest.importorskip("prometheus_client")
    for rank, text in enumerate(run_cluster(2, scraped, observing=ObservingOptions(metrics_port=0))):
        assert f'farcall_call_seconds_count{{function="echo",peer="w{1 - rank}",worker="w{rank}"}} 1.0' in text


def rebound(rank: int) -> list[int]:
    """The answers to requests that name other hosts: pages whose name leads to loopback now."""
    port, found = current_runtime().part(Observability).metrics_port, []
    for host in (
        "evil.example",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        "0.0.0.0",
        "",
        f"localhost:{port}",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/metrics", headers={"Host": host})
        found.append(connection.getresponse().status)
        connection.close()
    return found


def test_a_page_whose_name_leads_to_loopback_reads_no_metrics() -> None:
    pytest.importorskip("prometheus_client")
    (found,) = run_cluster(1, rebound, observing=ObservingOptions(metrics_port=0))
    assert found == [403] * 5 + [200]


def where_scraped(rank: int) -> int:
    assert f'worker="w{rank}"' in scraped(rank)
    port = current_runtime().part(Observability).metrics_port
    assert port is not None
    return port


def test_workers_of_one_host_with_one_port_serve_metrics_next_to_each_other() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = int(taken.getsockname()[1])
        ports = run_cluster(2, where_scraped, observing=ObservingOptions(metrics_port=wanted))
    assert len({wanted, *ports}) == 3
    assert min(ports) > wanted


def traced(rank: int) -> list[tuple[str, str, int, int, int]]:
    """(name, kind, trace, span, parent) of every span of this process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    farcall.barrier(["w0", "w1", "w2"])
    if rank == 0:
        exporter.clear()
        with trace.get_tracer("test").start_as_current_span("step"):
            farcall.rpc_sync("w1", call_on, args=("w2",))
            farcall.rpc_async("w2", echo, args=(1,)).wait()
            farcall.rpc_sync("w2", torch.add, args=(torch.ones(1), 1))
            farcall.rpc_sync("w2", functools.partial(operator.neg, 1))
    farcall.barrier(["w0", "w1", "w2"])

    def served() -> int:
        names = [span.name for span in exporter.get_finished_spans() if span.kind.name == "SERVER"]
        return sum(any(function in name for function in ("call_on", "echo", "add", "neg")) for name in names)

    # The span of a served call ends after its answer has gone.
    wait_until(lambda: served() == (0, 1, 4)[rank], "the last span")
    return [
        (
            span.name,
            span.kind.name,
            span.context.trace_id,
            span.context.span_id,
            span.parent.span_id if span.parent is not None else 0,
        )
        for span in exporter.get_finished_spans()
    ]


def outcomes_traced(rank: int) -> list[tuple[str, str]]:
    """(status, description) of the spans of asynchronous calls that succeed, raise, and are not answered in time."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    farcall.barrier()
    if rank:
        Gate.wait("done")
        return []
    exporter.clear()
    farcall.rpc_async("w1", echo, args=(1,)).wait()
    with pytest.raises(ValueError, match="on purpose"):
        farcall.rpc_async("w1", fail).wait()
    with pytest.raises(farcall.errors.RpcTimeout):
        farcall.rpc_async("w1", Gate.wait, args=("done",), timeout=0.01).wait()
    # Not those of served calls: the barrier's may end after its answer has gone.
    spans = [span for span in exporter.get_finished_spans() if span.kind.name == "CLIENT"]
    farcall.rpc_sync("w1", Gate.open, args=("done",))
    return [(span.status.status_code.name, span.status.description or "") for span in spans]


def test_spans_of_asynchronous_calls_tell_how_they_ended() -> None:
    pytest.importorskip("opentelemetry.sdk")
    told = run_cluster(2, outcomes_traced, observing=ObservingOptions(opentelemetry=True))[0]
    assert told == [("UNSET", ""), ("ERROR", "the function raised"), ("ERROR", "no answer within 0.01 s")]


def call_on(to: str) -> Any:
    return farcall.rpc_sync(to, echo, args=(1,))


def test_spans_of_all_workers_make_one_trace() -> None:
    pytest.importorskip("opentelemetry.sdk")
    spans = [
        span for member in run_cluster(3, traced, observing=ObservingOptions(opentelemetry=True)) for span in member
    ]
    by_id = {span[3]: span for span in spans}
    (step,) = [span for span in spans if span[0] == "step"]

    def ancestors(span: tuple[str, str, int, int, int]) -> list[str]:
        names = []
        while span[4]:
            span = by_id[span[4]]
            names.append(f"{span[0]} {span[1]}")
        return names

    served = [span for span in spans if span[0] == "w2/echo" and span[1] == "SERVER"]
    assert sorted(ancestors(span) for span in served) == [
        ["w2/echo CLIENT", "step INTERNAL"],
        ["w2/echo CLIENT", "w1/call_on SERVER", "w1/call_on CLIENT", "step INTERNAL"],
    ]
    assert {span[2] for span in served} == {step[2]}
    # Both ends of a call have one name, also where the function travels with it.
    for name in ("add", "neg"):
        (ours,) = [span for span in spans if name in span[0] and span[1] == "SERVER"]
        assert ancestors(ours) == [f"{ours[0]} CLIENT", "step INTERNAL"]


def test_telemetry_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(farcall.errors.InitError, match="pip install"):
        farcall.Node(
            "w0",
            0,
            1,
            RpcBackendOptions(init_method="tcp://127.0.0.1:1", observing=ObservingOptions(opentelemetry=True)),
        ).start()


# ---------------------------------------------------------------------- from outside


def test_an_observer_hears_all_workers_and_is_seen_by_none(tmp_path: Path) -> None:
    with Cluster(3, tmp_path) as cluster, cluster.observer() as observer:
        heard = observer.metrics(PATIENCE_S)
        assert [one.worker for one in heard.answers] == ["w0", "w1", "w2"]
        assert heard.silent == []
        assert [one.rank for one in observer.snapshots(PATIENCE_S).answers] == [0, 1, 2]
        assert all(len(one.channels) == 2 for one in heard.answers)  # the members, and nobody else


def test_with_the_secret_and_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "DIAL_S", LONG_S)
    with Cluster(2, tmp_path, secret=SECRET, observable=True) as cluster:
        node = find_nodes(cluster.directory)[1]
        assert SECRET not in repr(node)
        address = next(one for one in node.addresses if one.startswith("tcp"))
        with Observer.connect_with_secret(address, RpcBackendOptions(secret=SECRET)) as observer:
            assert observer.member == "w1"
            assert len(observer.snapshots(PATIENCE_S).answers) == 2
        with pytest.raises(HandshakeRefused, match="secret"):
            Observer.connect_with_secret(address, RpcBackendOptions(secret="another secret, also long"))
        with pytest.raises(HandshakeRefused, match="cluster"):
            Observer.connect(address, observer_key(Secret(SECRET.encode()).values[0]), "another cluster")


def test_an_observer_can_only_ask(tmp_path: Path) -> None:
    with Cluster(2, tmp_path) as cluster:
        with cluster.observer() as observer:
            request = encode_small(REQUEST, 0, 1, b"pos\0getpid", b"", b"")
            assert observer._transport.send((request,)) == len(request)
            with pytest.raises((NetworkError, ConnectionError)):
                observer.snapshots()
        with cluster.observer() as observer:
            assert {one.name for one in observer.ask("nonsense", Metrics, PATIENCE_S).silent} == {"w0", "w1"}
            assert len(observer.metrics(PATIENCE_S).answers) == 2


def test_a_worker_that_does_not_answer_is_named_and_holds_nobody_up(tmp_path: Path) -> None:
    with Cluster(3, tmp_path) as cluster, cluster.observer() as observer:
        stop(cluster.members[2].pid)
        try:
            heard = observer.metrics(timeout_s=15.0)
        finally:
            cluster.members[2].kill(signal.SIGCONT)
        assert [one.worker for one in heard.answers] == ["w0", "w1"]
        assert [(one.name, one.gone) for one in heard.silent] == [("w2", "")]
        assert len(observer.metrics(PATIENCE_S).answers) == 3


def test_a_member_that_is_stopped_is_passed_over(tmp_path: Path) -> None:
    with Cluster(2, tmp_path) as cluster:
        stop(cluster.members[0].pid)
        try:
            with cluster.observer() as observer:
                assert observer.member == "w1"
        finally:
            cluster.members[0].kill(signal.SIGCONT)


def test_a_node_that_is_not_observable_leaves_no_file(tmp_path: Path) -> None:
    assert run_cluster(
        1, files_in, str(tmp_path), observing=ObservingOptions(runtime_directory=str(tmp_path), observable=False)
    ) == [[]]


def files_in(rank: int, directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(".node")]


def test_files_are_gone_after_a_graceful_end(tmp_path: Path) -> None:
    with Cluster(2, tmp_path) as cluster:
        assert len(list(cluster.directory.glob("*.node"))) == 2
    assert list(cluster.directory.glob("*.node")) == []


def test_top_prints_a_table_for_scripts(tmp_path: Path) -> None:
    with Cluster(2, tmp_path) as cluster:
        done = subprocess.run(
            [sys.executable, "-m", "farcall", "top", "--once", "--every", "0.2"],
            env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(cluster.directory)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[1].split()[:4] == ["worker", "state", "cpu", "memory"]
    assert [line.split()[:2] for line in lines[2:4]] == [["w0", "running"], ["w1", "running"]]


def test_nothing_to_observe_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and not listened on
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for arguments in (["top", "--once"], ["stacks", "--connect", address]):
            done = subprocess.run(
                [sys.executable, "-m", "farcall", *arguments],
                env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(tmp_path), "FARCALL_SECRET": SECRET},
                capture_output=True,
                text=True,
                timeout=250,
                check=False,
            )
            assert done.returncode == 2
            assert done.stderr.startswith("farcall: ")
            assert "Traceback" not in done.stderr
