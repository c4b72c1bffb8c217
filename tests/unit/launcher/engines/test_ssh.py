"""Where workers over SSH go, and with which command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farcall.launcher.engine import EngineError, ProcessState, WorkerSpec
from farcall.launcher.engines.ssh import SshEngine
from farcall.launcher.output import LastLines


def spec(rank: int) -> WorkerSpec:
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret="deep", meet="farcall://driver:1", start_timeout_s=7)


def test_the_command_has_no_secret_and_the_users_options_first() -> None:
    engine = SshEngine(["a"], python="/opt/my python", args=["-oConnectTimeout=3"])
    engine._spread.place([0])
    command = engine.command(spec(0))
    assert command[:2] == ("ssh", "-oConnectTimeout=3")
    assert command[-1].endswith("'/opt/my python' -P -m farcall.launcher.worker")
    assert "deep" not in " ".join(command)


def test_many_connections_to_one_host_do_not_begin_at_once() -> None:
    engine = SshEngine(["a", "b"])
    engine._spread.place(range(40))
    delays = [engine.command(spec(rank))[2] if engine.command(spec(rank))[0] == "sh" else "" for rank in range(40)]
    assert delays[:8] == delays[20:28] == [""] * 8
    assert delays[8:16] == delays[28:36] == ['sleep 1; exec "$@"'] * 8
    assert delays[39] == 'sleep 2; exec "$@"'


def test_a_tunnel_brings_the_drivers_port_to_each_host_once() -> None:
    engine = SshEngine(["a", "b"], args=["-p2222"], tunnel=True)
    assert engine.driver_host == "127.0.0.1"
    assert SshEngine(["a"]).driver_host is None
    started: list[WorkerSpec] = []
    tunnels = engine._tunnels
    assert tunnels is not None
    tunnels.start = lambda specs, watcher: started.extend(specs)  # type: ignore[method-assign, assignment]
    for host in ("a", "b", "a"):
        tunnels.open(host, replace(spec(0), meet="farcall://127.0.0.1:4567?unix=/x"))
    assert [each.name for each in started] == ["a", "b"]
    command = list(tunnels.command(started[0]))
    assert command[command.index("-R") + 1] == "127.0.0.1:4567:127.0.0.1:4567"
    assert "-oClearAllForwardings=no" in command
    assert command[-2:] == ["a", "exec cat"] or command[-1].endswith(" cat")
    assert tunnels.line(started[0]) == b""


def test_workers_end_with_their_tunnel() -> None:
    engine = SshEngine(["a", "b"], tunnel=True)
    engine._spread.place([0, 1])
    ended: list[WorkerSpec] = []
    engine.end = ended.extend  # type: ignore[method-assign, assignment]
    here, there = spec(0), spec(1)
    engine._children = dict.fromkeys((here, there))  # type: ignore[assignment]
    tunnels = engine._tunnels
    assert tunnels is not None
    tunnels._said["a"] = LastLines(5)
    tunnel = replace(spec(0), name="a", meet="farcall://127.0.0.1:4567")
    refused: list[WorkerSpec] = []
    tunnels.end = refused.extend  # type: ignore[method-assign, assignment]
    for port in (b"22", b"45678"):
        tunnels.on_output(tunnel, b"Warning: remote port forwarding failed for listen port %b\n" % port)
    assert not refused  # those were the user's own
    tunnels.on_output(tunnel, b"Warning: remote port forwarding ")
    tunnels.on_output(tunnel, b"failed for listen port 4567\n")
    assert refused == [tunnel]
    tunnels.on_state(tunnel, ProcessState("ended", "", -9))
    assert ended == [here]
    assert "remote port forwarding failed for listen port 4567" in str(engine.ended(here, -9))
    assert "tunnel" not in str(engine.ended(there, 255))


@pytest.mark.parametrize("hosts", [[], "a", ["-oProxyCommand=true"], [""]])
def test_bad_hosts(hosts: list[str]) -> None:
    with pytest.raises(EngineError):
        SshEngine(hosts)
