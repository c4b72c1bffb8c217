"""The doctor as a user calls it: on this machine, at a real store, and between two of its own processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.kit.ports import held_port

DOCTOR = [sys.executable, "-m", "farcall", "doctor"]

STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print("serving", flush=True)
input()
print(store.num_keys())
"""


def consult(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the findings by subject."""
    done = subprocess.run([*DOCTOR, "--json", *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


@contextmanager
def listening() -> Iterator[int]:
    """Another host's doctor; its port."""
    process = subprocess.Popen([*DOCTOR, "--listen", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            told = re.search(r"on other hosts run: farcall doctor \S+:(\d+) ", line)
            if told is not None:
                yield int(told[1])
                break
        else:
            pytest.fail("it does not say where it listens")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=250) == 0
    finally:
        process.kill()
        process.communicate()


def test_this_machine_for_people() -> None:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +unix sockets +work$", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +shared memory +works", done.stdout, re.MULTILINE)
    assert "nothing wrong" in done.stdout


def test_a_store_that_is_there() -> None:
    port = held_port()
    # In a process of its own: torch's store keeps a pipe for as long as its process lives.
    with subprocess.Popen(
        [sys.executable, "-c", STORE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "serving\n"
        status, findings = consult("--init-method", f"tcp://127.0.0.1:{port}")
        told, _ = serving.communicate("\n")
    assert status == 0
    assert "answers" in findings["store"]["found"]
    assert int(told) <= 1  # torch's own count of workers; ours left nothing


def test_between_two_hosts() -> None:
    with listening() as port:
        status, findings = consult(f"127.0.0.1:{port}")
    assert status == 0, findings
    assert "both prove the same secret; same versions" in findings["127.0.0.1"]["found"]
    assert findings["127.0.0.1: data"]["state"] == "ok"
    assert findings["127.0.0.1: way back"]["state"] == "ok"
    assert "unix sockets and shared memory" in findings["127.0.0.1: ways"]["found"]


def test_hosts_with_different_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setenv("FARCALL_SECRET", "what the other has not")
        status, findings = consult(f"127.0.0.1:{port}")
    assert status == 1
    assert "another secret" in findings["127.0.0.1"]["found"]
    assert "FARCALL_SECRET" in findings["127.0.0.1"]["advice"]


def test_a_way_back_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SECRET", "what both of them have")
    with listening() as port:
        monkeypatch.setenv("FARCALL_ADVERTISE", "no-such-host.invalid")
        status, findings = consult(f"127.0.0.1:{port}")
    assert status == 1
    assert findings["127.0.0.1"]["state"] == "ok"
    assert "cannot reach workers here" in findings["127.0.0.1: way back"]["found"]
    assert "FARCALL_ADVERTISE" in findings["127.0.0.1: way back"]["advice"]


def test_nobody_listens() -> None:
    port = held_port()
    status, findings = consult(f"127.0.0.1:{port}")
    assert status == 1
    assert findings["127.0.0.1"]["advice"] == f"run there: farcall doctor --listen {port}"


def test_a_port_that_cannot_be_had() -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run([*DOCTOR, "--listen", port], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert f"cannot listen on tcp://*:{port}" in done.stdout
    assert done.stderr == ""


def test_not_a_place() -> None:
    done = subprocess.run([*DOCTOR, "somewhere"], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert "HOST:PORT" in done.stderr
