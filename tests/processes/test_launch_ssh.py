"""Workers over a real sshd: called, killed, ended with their driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.namespaces import address, hosts
from tests.kit.launched import check_launch
from tests.kit.launching import ROOT, check_killed_driver, driver, wait_gone
from tests.kit.rigs.ssh import SshRig, ssh_server

from farcall.launcher.engines.ssh import SshEngine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SshRig]:
    with ssh_server(tmp_path) as running:
        yield running


def test_launch(rig: SshRig) -> None:
    check_launch("ssh", hosts=list(rig.hosts), args=["-F", str(rig.configuration)])


def test_workers_over_ssh(rig: SshRig, tmp_path: Path) -> None:
    """One is killed, one is started again, the others end when the engine closes."""
    engine = SshEngine(rig.hosts, args=["-F", str(rig.configuration)])
    with driver(tmp_path) as launched:
        try:
            specs = launched.start(engine, 2)
            assert [launched.watching.states[spec][0].detail for spec in specs] == ["ssh alpha", "ssh beta"]
            connection = launched.node["worker1"].call(os.getenv, "SSH_CONNECTION")
            assert connection.split()[2] == "127.0.0.1"
            assert not any(launched.secret in part for spec in specs for part in engine.command(spec))

            first, second = launched.process_ids(specs)
            os.kill(second, signal.SIGKILL)
            assert "the worker was killed, or the connection" in str(launched.wait_ended(specs[1]))
            again = launched.spec(1, life=1)
            engine.start([again], launched.watching)
            launched.wait_joined([again])
            assert launched.node["worker1"].call(os.getenv, "FARCALL_RESTARTS") == "1"
            (third,) = launched.process_ids([again])
        finally:
            engine.close()
        wait_gone([first, third])


def test_no_worker_outlives_its_driver(rig: SshRig) -> None:
    check_killed_driver(
        "from farcall.launcher.engines.ssh import SshEngine",
        f"SshEngine({rig.hosts!r}, args=['-F', {str(rig.configuration)!r}])",
    )


TUNNELLED = """
import os
import signal
import sys
from pathlib import Path

import farcall
from tests.kit.launched import life_of
from tests.kit.launching import START_S
from tests.kit.waiting import wait_until


def children():
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (entry / "cmdline").read_text().split(chr(0)), (entry / "stat").read_text()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == os.getpid():
            yield int(entry.name), command


options = farcall.RpcBackendOptions(transports=["tcp"])  # the file system is shared: unix sockets would lead home
with farcall.launch(
    2,
    on="ssh",
    hosts=["alpha"],
    args=["-F", sys.argv[1]],
    tunnel=True,
    options=options,
    restart="on-failure",
    max_restarts=50,
    backoff_s=0.2,
    start_timeout=START_S,
    quiet=True,
) as cluster:
    assert cluster[0].call(os.getenv, "FARCALL_ADVERTISE") == sys.argv[2]
    other = cluster[1].call(os.getpid)
    assert cluster[0].call(lambda: farcall.rpc_sync("worker1", os.getpid)) == other
    (tunnel,) = [process for process, command in children() if "-R" in command]
    os.kill(tunnel, signal.SIGKILL)
    wait_until(lambda: life_of(cluster) not in ("", "0"), "worker1 is there again", START_S)
    cluster.wait(timeout=START_S)
    assert cluster[0].call(lambda: farcall.rpc_sync("worker1", os.getpid)) != other
assert not list(children())
"""


def test_a_driver_that_nobody_can_dial(tmp_path: Path) -> None:
    """It is alone in its network but for SSH: workers come through a tunnel, also when that was cut."""
    with hosts(2) as found:
        here, there = (["ip", "netns", "exec", space] for space in found.spaces)
        with ssh_server(tmp_path, host=address(1), server_in=there, client_in=here) as rig:
            done = subprocess.run(
                [*here, sys.executable, "-c", TUNNELLED, str(rig.configuration), address(1)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stdout + done.stderr


def test_what_ssh_says_is_told(rig: SshRig, tmp_path: Path) -> None:
    engine = SshEngine(["nowhere"], args=["-F", str(rig.configuration)])
    with driver(tmp_path) as launched:
        try:
            spec = launched.spec(0)
            engine.start([spec], launched.watching)
            assert launched.wait_ended(spec).exit_code is None
            assert b"Connection refused" in launched.watching.output[spec]
        finally:
            engine.close()
