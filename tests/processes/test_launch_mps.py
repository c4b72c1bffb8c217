"""launch(mps=True), with a stand-in for NVIDIA's daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.launching import START_S, runs
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import LaunchFailed

# As the real one: it listens in its folder, starts its server in its own group, and does not read standard input.
DAEMON = f"""#!{sys.executable}
import os, signal, socket, sys
assert sys.argv[1:] == ["-f"]
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
assert "CUDA_VISIBLE_DEVICES" not in os.environ
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = os.fork()
if server == 0:
    signal.pause()
with open(os.environ["SEEN"], "w") as seen:
    print(os.getpid(), server, pipes, file=seen)
listening.bind(pipes + "/control")
listening.listen()
signal.pause()
"""
BROKEN = f"""#!{sys.executable}
print("starting")
print("no GPU, no daemon")
"""
DRIVER = """
import farcall, os, sys
with farcall.launch(1, mps=True) as cluster:
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes the number of its process, that of its server, and its folder."""
    install(DAEMON, tmp_path, monkeypatch)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "seen"


def install(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_workers_have_a_daemon_of_their_own_that_ends_with_them(seen: Path) -> None:
    with farcall.launch(2, mps=True, start_timeout=START_S) as cluster:
        control, server, pipes = seen.read_text().split()
        found = {worker.call(os.getenv, "CUDA_MPS_PIPE_DIRECTORY") for worker in cluster}
        assert found == {pipes}
        assert all(Path(worker.call(os.getenv, "CUDA_MPS_LOG_DIRECTORY")).is_dir() for worker in cluster)
        assert runs(int(control))
        assert runs(int(server))
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not runs(int(control))
    wait_until(lambda: not runs(int(server)))
    assert not Path(pipes).exists()


def test_the_daemon_ends_with_a_driver_that_is_killed(seen: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        driver.send_signal(signal.SIGKILL)
    control, server, _ = seen.read_text().split()
    wait_until(lambda: not runs(int(control)) and not runs(int(server)))


def test_a_daemon_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(BROKEN, tmp_path, monkeypatch)
    with pytest.raises(LaunchFailed, match="does not listen: no GPU, no daemon"):
        farcall.launch(1, mps=True)


def test_without_the_program_launch_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchFailed, match="needs nvidia-cuda-mps-control"):
        farcall.launch(1, mps=True)


def test_other_engines_have_no_such_argument() -> None:
    with pytest.raises(TypeError, match="mps"):
        farcall.launch(1, on="ssh", mps=True)
