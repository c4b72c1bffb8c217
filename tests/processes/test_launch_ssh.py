"""Workers over a real sshd: called, killed, ended with their driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.launched import check_launch
from tests.kit.launching import check_killed_driver, driver, wait_gone
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
