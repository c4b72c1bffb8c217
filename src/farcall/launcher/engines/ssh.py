"""Workers over SSH: the system's ``ssh``, with its configuration, keys and agent; one connection for each worker.

    the secret             standard input of the worker, inside the connection
    output                 stdout and stderr of ``ssh``, whose own complaints are among it
    the driver dies        its ``ssh`` ends with it, sshd closes the worker's standard input: its lifeline
    the connection dies    the same at the worker; here ``ssh`` ends, after `ALIVE_S` of silence
    the worker is killed   ``ssh`` ends with 255, as it does when a connection fails: the two cannot be told apart
    the driver is behind   ``tunnel=True``: `tunnels.py` brings its port to the hosts
    NAT or a firewall

Hosts are chosen by `spread.py`. Of many connections that begin at once an sshd refuses some (``MaxStartups``: from 10
on, unless it is told otherwise): so each host gets `AT_ONCE` at a time, a second apart.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.engines.spread import Spread
from farcall.launcher.engines.tunnels import HERE, Tunnels
from farcall.options import ENV_ADVERTISE

ALIVE_S = 30.0
"""A connection over which nothing comes for so long is dead."""
AT_ONCE = 8
_SILENT_PARTS = 3
_FAILED = 255
# At the end of a tunnel the driver's address does not tell by which one a worker is reached: sshd's does.
_ADVERTISING = f'way=${{SSH_CONNECTION% *}}; exec env {ENV_ADVERTISE}="${{{ENV_ADVERTISE}:-${{way##* }}}}" "$@"'


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
        self._arguments = tuple(args)
        self.driver_host = HERE if tunnel else None
        self._tunnels = Tunnels(self._ssh, self._on_tunnel_lost) if tunnel else None
        self._lost: dict[str, str] = {}  # hosts whose tunnel ended, and why

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        self._spread.place([spec.rank for spec in specs])
        if self._tunnels is not None:
            for spec in specs:
                host = self._spread.host(spec.rank)
                self._lost.pop(host, None)
                self._tunnels.open(host, spec)
        super().start(specs, watcher)
        self.end([spec for spec in specs if self._spread.host(spec.rank) in self._lost])  # it failed meanwhile

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._tunnels is not None:
                self._tunnels.close()

    def _on_tunnel_lost(self, host: str, why: str) -> None:
        """Its workers cannot find this program, or not again: they end, and may be started again with a new tunnel."""
        with self._lock:
            self._lost[host] = why
            cut_off = [spec for spec in self._children if self._spread.host(spec.rank) == host]
        self.end(cut_off)

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        local_rank = self._spread.local_rank(spec.rank)
        worker = ["env", f"LOCAL_RANK={local_rank}", self._python or spec.command[0], *spec.command[1:]]
        if self._tunnels is not None:
            worker = ["sh", "-c", _ADVERTISING, "sh", *worker]
        command = self._ssh(self._spread.host(spec.rank), worker, timeout_s=spec.start_timeout_s)
        wait_s = local_rank // AT_ONCE if spec.life == 0 else 0
        return ("sh", "-c", f'sleep {wait_s}; exec "$@"', "sh", *command) if wait_s else command

    def _ssh(
        self,
        host: str,
        command: Sequence[str],
        *,
        timeout_s: float,
        forwards: str = "",
        options: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        arguments = (*self._arguments, "-R", forwards) if forwards else self._arguments
        return ssh_command(host, command, args=arguments, timeout_s=timeout_s, options=options)

    def running_detail(self, spec: WorkerSpec) -> str:
        return f"ssh {self._spread.host(spec.rank)}"

    def ended(self, spec: WorkerSpec, exit_code: int) -> ProcessState:
        host = self._spread.host(spec.rank)
        if exit_code != 0 and host in self._lost:
            return ProcessState("ended", f"the tunnel from {host} to this program ended: {self._lost[host]}")
        if exit_code == _FAILED:
            return ProcessState("ended", f"ssh {host}: the worker was killed, or the connection failed or was lost")
        return super().ended(spec, exit_code)


def ssh_command(
    host: str,
    command: Sequence[str],
    *,
    args: Sequence[str],
    timeout_s: float,
    options: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """What runs ``command`` at ``host``, with its standard input and output; ``options`` beside, or over, the usual."""
    # sshd lets few variables through, and a worker must find farcall before it reads its spec.
    if "PYTHONPATH" in os.environ:
        command = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *command]
    words = {
        "BatchMode": "yes",  # nobody is there to type a password
        "ConnectTimeout": str(max(1, round(timeout_s))),
        "ServerAliveInterval": str(round(ALIVE_S / _SILENT_PARTS)),
        "ServerAliveCountMax": str(_SILENT_PARTS),
        # Of the user's configuration, what is meant for one connection and a terminal.
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "RemoteCommand": "none",
        "RequestTTY": "no",
        **(options or {}),
    }
    # ssh takes the first word on an option: the user's own come first. `exec`, so that the worker leads its group.
    given = [f"-o{name}={value}" for name, value in words.items()]
    return ("ssh", *args, *given, host, f"exec {shlex.join(command)}")
