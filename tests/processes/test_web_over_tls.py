"""Metrics and the live page beyond loopback: over TLS, to those who show a certificate, or know the page's address."""

from __future__ import annotations

import os
import re
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from tests.kit.ports import tcp_url
from tests.kit.times import LONG_S
from tests.unit.observe.simulated import SimulatedObserver

import farcall
from farcall.errors import InitError
from farcall.observe.dashboard.server import Dashboard
from farcall.options import ObservingOptions, RpcBackendOptions, TlsOptions

EVERYWHERE = "0.0.0.0"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from farcall.cli.certificates import make_certificates

    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory, ["127.0.0.1"])
    make_certificates(directory / "strangers", ["127.0.0.1"])
    return directory


@pytest.fixture
def node(files: Path, tmp_path: Path) -> Iterator[farcall.Node]:
    pytest.importorskip("prometheus_client")
    options = RpcBackendOptions(
        init_method=tcp_url(),
        advertise="127.0.0.1",
        tls=tls_options(files),
        observing=ObservingOptions(
            runtime_directory=str(tmp_path),
            metrics_port=0,
            metrics_host=EVERYWHERE,
            dashboard_port=0,
            dashboard_host=EVERYWHERE,
        ),
    )
    with farcall.Node("w0", rank=0, world_size=1, options=options) as found:
        yield found


def tls_options(directory: Path) -> TlsOptions:
    return TlsOptions(
        ca=str(directory / "ca.pem"),
        certificate=str(directory / "127.0.0.1.pem"),
        key=str(directory / "127.0.0.1.key"),
    )


def client(files: Path, shown: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files / "ca.pem"))
    if shown is not None:
        context.load_cert_chain(shown / "127.0.0.1.pem", shown / "127.0.0.1.key")
    return context


def fetch(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, context=context, timeout=LONG_S) as answer:
        text: str = answer.read().decode()
        return text


def test_metrics_are_given_to_those_who_show_a_certificate_of_the_same_authority(
    node: farcall.Node, files: Path
) -> None:
    url = f"https://127.0.0.1:{node.metrics_port}/metrics"
    assert "farcall_up_seconds" in fetch(url, client(files, files))
    for context in (client(files), client(files, files / "strangers")):
        with pytest.raises(OSError):  # in TLS 1.3 a client learns of it when it reads
            fetch(url, context)
    with pytest.raises(OSError):
        fetch(url.replace("https", "http"))


def test_the_page_is_given_to_those_who_know_its_address(node: farcall.Node, files: Path) -> None:
    url = node.dashboard_url
    assert url is not None
    assert re.fullmatch(r"https://127\.0\.0\.1:\d+/[\w-]{43}/", url)
    anybody = client(files)
    assert "<title>" in fetch(url, anybody)
    assert fetch(f"{url}state.json", anybody).startswith("{")
    root = url[: url.index("/", len("https://")) + 1]
    for wrong in ("", "state.json", "index.html", f"{'A' * 43}/", url[len(root) :].swapcase()):
        with pytest.raises(HTTPError, match="404"):
            fetch(root + wrong, anybody)
    with pytest.raises(OSError):
        fetch(url.replace("https", "http"))


def test_beyond_loopback_there_is_no_page_without_certificates() -> None:
    with pytest.raises(InitError, match="needs TLS on"):
        Dashboard(lambda: SimulatedObserver(8), 0, EVERYWHERE)  # type: ignore[arg-type, return-value]


def test_certificates_are_read_again_for_web_servers_too(node: farcall.Node, files: Path) -> None:
    from farcall.cli.certificates import make_certificates

    url = node.dashboard_url
    assert url is not None
    before = os.stat(files / "127.0.0.1.pem").st_mtime_ns
    make_certificates(files, ["127.0.0.1"])
    assert os.stat(files / "127.0.0.1.pem").st_mtime_ns != before
    assert "<title>" in fetch(url, client(files))
