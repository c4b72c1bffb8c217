"""Where workers over SSH go, and with which command."""

from __future__ import annotations

import pytest

from farcall.launcher.engine import EngineError, WorkerSpec
from farcall.launcher.engines.ssh import SshEngine


def spec(rank: int) -> WorkerSpec:
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret="deep", meet="farcall://driver:1", start_timeout_s=7)


def hosts_of(engine: SshEngine, ranks: list[int]) -> list[str]:
    engine._place(ranks)
    return [engine.command(spec(rank))[-2] for rank in ranks]


def test_neighbours_share_a_host() -> None:
    assert hosts_of(SshEngine(["a", "b"]), [0, 1, 2, 3, 4]) == ["a", "a", "a", "b", "b"]


def test_later_ones_go_where_there_are_fewest() -> None:
    engine = SshEngine(["a", "b"])
    assert hosts_of(engine, [0, 1, 2]) == ["a", "a", "b"]
    assert hosts_of(engine, [3, 4]) == ["a", "b"]
    assert hosts_of(engine, [0, 2]) == ["a", "b"], "one that is started again stays"


def test_the_command_has_no_secret_and_the_users_options_first() -> None:
    engine = SshEngine(["a"], python="/opt/my python", args=["-oConnectTimeout=3"])
    engine._place([0])
    command = engine.command(spec(0))
    assert command[:2] == ("ssh", "-oConnectTimeout=3")
    assert command[-1].endswith("'/opt/my python' -m farcall.launcher.worker")
    assert "deep" not in " ".join(command)


@pytest.mark.parametrize("hosts", [[], "a", ["-oProxyCommand=true"], [""]])
def test_bad_hosts(hosts: list[str]) -> None:
    with pytest.raises(EngineError):
        SshEngine(hosts)
