"""Where workers over SSH go, and with which command."""

from __future__ import annotations

import pytest

from farcall.launcher.engine import EngineError, WorkerSpec
from farcall.launcher.engines.ssh import SshEngine


def spec(rank: int) -> WorkerSpec:
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret="deep", meet="farcall://driver:1", start_timeout_s=7)


def test_the_command_has_no_secret_and_the_users_options_first() -> None:
    engine = SshEngine(["a"], python="/opt/my python", args=["-oConnectTimeout=3"])
    engine._spread.place([0])
    command = engine.command(spec(0))
    assert command[:2] == ("ssh", "-oConnectTimeout=3")
    assert command[-1].endswith("'/opt/my python' -m farcall.launcher.worker")
    assert "deep" not in " ".join(command)


def test_many_connections_to_one_host_do_not_begin_at_once() -> None:
    engine = SshEngine(["a", "b"])
    engine._spread.place(range(40))
    delays = [engine.command(spec(rank))[2] if engine.command(spec(rank))[0] == "sh" else "" for rank in range(40)]
    assert delays[:8] == delays[20:28] == [""] * 8
    assert delays[8:16] == delays[28:36] == ['sleep 1; exec "$@"'] * 8
    assert delays[39] == 'sleep 2; exec "$@"'


@pytest.mark.parametrize("hosts", [[], "a", ["-oProxyCommand=true"], [""]])
def test_bad_hosts(hosts: list[str]) -> None:
    with pytest.raises(EngineError):
        SshEngine(hosts)
