"""Workers over SSH: the system's ``ssh``, with its configuration, keys and agent; one connection for each worker.

    the secret             standard input of the worker, inside the connection
    output                 stdout and stderr of ``ssh``, its own complaints included
    the driver dies        its ``ssh`` ends with it, sshd closes the worker's standard input: its lifeline
    the connection dies    the same at the worker; here ``ssh`` ends, after `ALIVE_S` of silence
    the worker is killed   ``ssh`` ends with 255, as it does when a connection fails: the two cannot be told apart
    the driver is behind   ``tunnel=True``: `Tunnels` bring its port to the hosts
    NAT or a firewall

`spread.py` chooses the hosts. An sshd refuses some of many connections that begin at once (``MaxStartups``: from 10 on,
unless configured otherwise), so each host gets `AT_ONCE` at a time, a second apart.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from farcall.foreign_errors import refused_forward
from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.engines.spread import Spread
from farcall.launcher.output import LastLines
from farcall.options import ENV_ADVERTISE

ALIVE_S = 30.0
"""A connection that stays silent for so long is dead."""
AT_ONCE = 8
_SILENT_PARTS = 3
_FAILED = 255
_HERE = "127.0.0.1"
"""The driver, at both ends of a tunnel."""
# At the end of a tunnel, the driver's address does not tell by which address a worker is reached: sshd's does.
_ADVERTISING = f'way=${{SSH_CONNECTION% *}}; exec env {ENV_ADVERTISE}="${{{ENV_ADVERTISE}:-${{way##* }}}}" "$@"'
_TUNNEL_OPTIONS = {
    # The user's own forwardings stay, and may fail: they are for other connections. If ours fails, ssh prints
    # `refused_forward`, at this log level.
    "ClearAllForwardings": "no",
    "ExitOnForwardFailure": "no",
    "LogLevel": "INFO",
    # A shared connection would keep the port when this one ends.
    "ControlPath": "none",
}


class SshEngine(CommandEngine):
    """One process of ``ssh`` for each worker.

    Args:
        hosts: names that ``ssh`` understands, aliases of its configuration included.
        python: the interpreter at the hosts; None: the path that it has here.
        args: further options of ``ssh``, such as ``["-F", "file"]`` or ``["-p", "2222"]``.
        tunnel: workers reach this program through a tunnel of ``ssh -R``: where they cannot dial it.
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        python: str | None = None,
        args: Sequence[str] = (),
        tunnel: bool = False,
    ) -> None:
        if isinstance(hosts, str) or not hosts:
            raise EngineError('on="ssh" needs hosts=[...]: names that `ssh NAME` reaches without a password')
        for host in hosts:
            if not host or host.startswith("-"):  # ssh would take it for an option
                raise EngineError(f"{host!r} is not a host name")
        super().__init__()
        self._spread = Spread(hosts)
        self._python = python
        self.arguments: tuple[str, ...] = tuple(args)
        self.driver_host = _HERE if tunnel else None
        self._tunnels = Tunnels(self) if tunnel else None
        self._lost: dict[str, str] = {}  # hosts whose tunnel ended, and why

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        self._spread.place([spec.rank for spec in specs])
        if self._tunnels is not None:
            for spec in specs:
                host = self._spread.host(spec.rank)
                self._lost.pop(host, None)
                self._tunnels.open(host, spec)
        super().start(specs, watcher)
        self.end([spec for spec in specs if self._spread.host(spec.rank) in self._lost])  # lost meanwhile

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._tunnels is not None:
                self._tunnels.close()

    def on_tunnel_lost(self, host: str, why: str) -> None:
        """End the workers of ``host``: they cannot find this program any more. A restart opens a new tunnel."""
        with self._lock:
            self._lost[host] = why
            cut_off = [spec for spec in self._children if self._spread.host(spec.rank) == host]
        self.end(cut_off)

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        local_rank = self._spread.local_rank(spec.rank)
        worker = ["env", f"LOCAL_RANK={local_rank}", self._python or spec.command[0], *spec.command[1:]]
        if self._tunnels is not None:
            worker = ["sh", "-c", _ADVERTISING, "sh", *worker]
        host = self._spread.host(spec.rank)
        command = ssh_command(host, worker, args=self.arguments, timeout_s=spec.start_timeout_s)
        wait_s = local_rank // AT_ONCE if spec.life == 0 else 0
        return ("sh", "-c", f'sleep {wait_s}; exec "$@"', "sh", *command) if wait_s else command

    def running_detail(self, spec: WorkerSpec) -> str:
        return f"ssh {self._spread.host(spec.rank)}"

    def ended(self, spec: WorkerSpec, exit_code: int) -> ProcessState:
        host = self._spread.host(spec.rank)
        if exit_code != 0 and host in self._lost:
            return ProcessState("ended", f"the tunnel from {host} to this program ended: {self._lost[host]}")
        if exit_code == _FAILED:
            return ProcessState("ended", f"ssh {host}: the worker was killed, or the connection failed or was lost")
        return super().ended(spec, exit_code)


class Tunnels(CommandEngine):
    """The driver's port as a port of each host's loopback, by one connection of ``ssh -R`` for each host.

    One for all workers of a host, so that none of them ends with the connection of another. The port has the same
    number at both ends: a worker dials the address that the driver tells everybody, ``127.0.0.1:PORT``, which on its
    host leads through the tunnel. Strangers do not get in: sshd binds loopback alone, and the driver asks for the
    cluster's secret. A tunnel runs ``cat``, and so ends with the driver, as a worker does by its lifeline.
    """

    def __init__(self, engine: SshEngine) -> None:
        super().__init__()
        self._engine = engine
        self._opening = threading.Lock()
        self._said: dict[str, LastLines] = {}

    def open(self, host: str, spec: WorkerSpec) -> None:
        """Have a tunnel to ``host``, over which a worker with this spec finds its driver."""
        with self._opening:
            if host in self._said:
                return
            self._said[host] = LastLines(5)
        tunnel = WorkerSpec(name=host, rank=0, secret="", meet=spec.meet, start_timeout_s=spec.start_timeout_s)
        self.start([tunnel], self)

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        port = urlsplit(spec.meet).port
        arguments = (*self._engine.arguments, "-R", f"{_HERE}:{port}:{_HERE}:{port}")
        return ssh_command(spec.name, ["cat"], args=arguments, timeout_s=spec.start_timeout_s, options=_TUNNEL_OPTIONS)

    def line(self, spec: WorkerSpec) -> bytes:
        return b""  # standard input is only the lifeline

    # As the watcher of its own processes.

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        said = self._said[spec.name]
        said.write(data)
        refused = refused_forward(urlsplit(spec.meet).port or 0)
        if any(line.endswith(refused) for line in said.texts()):  # of whole lines: a read may end inside one
            self.end([spec])

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        if state.phase == "ended":
            with self._opening:
                said = " ".join(self._said.pop(spec.name).texts()).strip()
            self._engine.on_tunnel_lost(spec.name, said or str(state))


def ssh_command(
    host: str,
    command: Sequence[str],
    *,
    args: Sequence[str],
    timeout_s: float,
    options: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """What runs ``command`` at ``host``, with its standard input and output; ``options`` win over the usual ones."""
    # sshd lets few variables through, and a worker must find farcall before it reads its spec.
    if "PYTHONPATH" in os.environ:
        command = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *command]
    words = {
        "BatchMode": "yes",  # nobody is there to type a password
        "ConnectTimeout": str(max(1, round(timeout_s))),
        "ServerAliveInterval": str(round(ALIVE_S / _SILENT_PARTS)),
        "ServerAliveCountMax": str(_SILENT_PARTS),
        # Switch off what the user's configuration means for one connection and a terminal.
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "RemoteCommand": "none",
        "RequestTTY": "no",
        **(options or {}),
    }
    # For each option ssh takes the first value it reads: the user's come first. `exec`: the worker leads its group.
    given = [f"-o{name}={value}" for name, value in words.items()]
    return ("ssh", *args, *given, host, f"exec {shlex.join(command)}")
