"""Tunnels to a driver that nobody can dial, behind NAT or a firewall: its port, as a port of each host's loopback.

One connection of ``ssh -R`` for each host, whatever number of workers is there, so that none of them ends with the
connection of another. The port has the same number at both ends: a worker dials the address that the driver tells
everybody, ``127.0.0.1:PORT``, and where it is that leads through the tunnel. Nobody else gets in: sshd
binds loopback alone, and the driver lets in who knows the cluster's secret.

A tunnel runs ``cat``, so it ends with the driver, as a worker does by its lifeline. If it ends before, whoever uses it
is told why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import ProcessState, WorkerSpec
from farcall.launcher.output import LastLines

HERE = "127.0.0.1"
"""The driver, at both ends of a tunnel."""
_OPTIONS = {
    # The user's own stay, and may fail: they are for other connections. Ours fails with a line that is looked for.
    "ClearAllForwardings": "no",
    "ExitOnForwardFailure": "no",
    # Another connection would keep the port when this one ends.
    "ControlPath": "none",
    # At which that line is written.
    "LogLevel": "INFO",
}
_REFUSED = b"remote port forwarding failed for listen port %d"


class Tunnels(CommandEngine):
    """The tunnels of one engine. ``on_lost`` is called from a thread, with a host and what ``ssh`` said last."""

    def __init__(self, ssh: Callable[..., Sequence[str]], on_lost: Callable[[str, str], None]) -> None:
        """``ssh(host, command, forwards=..., options=..., timeout_s=...)`` is the command that connects."""
        super().__init__()
        self._ssh = ssh
        self._on_lost = on_lost
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
        forwards = f"{HERE}:{port}:{HERE}:{port}"
        return self._ssh(spec.name, ["cat"], forwards=forwards, options=_OPTIONS, timeout_s=spec.start_timeout_s)

    def line(self, spec: WorkerSpec) -> bytes:
        return b""  # nothing is to be told: the lifeline is all

    # What is heard of the tunnels themselves.

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        self._said[spec.name].write(data)
        if _REFUSED % (urlsplit(spec.meet).port or 0) in data:
            self.end([spec])

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        if state.phase == "ended":
            with self._opening:
                said = " ".join(self._said.pop(spec.name).texts()).strip()
            self._on_lost(spec.name, said or str(state))
