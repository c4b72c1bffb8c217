"""Ctrl-C, which reaches every process of a terminal, while a launched worker starts: it ends without a word."""

from __future__ import annotations

import array
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.launching import ROOT
from tests.kit.waiting import wait_until

from farcall.launcher.engine import WorkerSpec
from farcall.launcher.fork_server import ForkServer
from farcall.launcher.worker import INTERRUPTED


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "farcall.launcher.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
    )
    with worker:
        yield worker
        worker.kill()


def tell(worker: subprocess.Popen[bytes], *, meet: str = "farcall://127.0.0.1:1", path: tuple[str, ...] = ()) -> None:
    spec = WorkerSpec(name="w0", rank=0, secret=secrets.token_hex(16), meet=meet, path=path, start_timeout_s=60.0)
    assert worker.stdin is not None
    worker.stdin.write(spec.encode() + b"\n")
    worker.stdin.flush()


def assert_ends_silently(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGINT)
    assert worker.stdout is not None
    assert worker.stdout.read() == b""
    assert worker.wait() in (INTERRUPTED, -signal.SIGINT)


def is_empty(pipe: int) -> bool:
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0] == 0


def test_a_worker_that_waits_for_its_spec(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None
    pipe = worker.stdin.fileno()
    os.write(pipe, b"{")
    wait_until(lambda: is_empty(pipe), "the worker reads")
    assert_ends_silently(worker)


def test_a_worker_that_loads_torch(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    tell(worker, path=(str(tmp_path),))
    wait_until(begun.exists, "it loads torch", 60.0)
    assert_ends_silently(worker)


def test_a_worker_that_meets_the_others(worker: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tell(worker, meet=f"farcall://127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(120.0)
        connection, _ = silent.accept()
        with connection:
            assert_ends_silently(worker)


def test_a_forked_worker() -> None:
    server = ForkServer()
    try:
        (spec, stdin), (output, stdout) = os.pipe()[::-1], os.pipe()
        process = server.start(stdin, stdout)
        os.close(stdin)
        os.close(stdout)
        os.write(spec, b"{")
        wait_until(lambda: is_empty(spec), "the worker reads")
        os.kill(process, signal.SIGINT)
        with open(output, "rb") as told:
            assert told.read() == b""
        os.close(spec)
        assert server.reap(process) in (INTERRUPTED, -signal.SIGINT)
    finally:
        server.close()
