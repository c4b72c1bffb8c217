"""Slurm on this machine: a controller, nodes ``node0`` and ``node1`` (two slurmd), and munge with a key of its own."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.rigs.programs import Server, found_or_skip, free_ports
from tests.kit.waiting import wait_until

NODES = ("node0", "node1")
CPUS = 8
"""Of each node, as Slurm is told: more than there are, since nothing here computes."""


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """The cluster's nodes are idle once this is entered; the environment in which sbatch and srun find it."""
    munged, controller, daemon, show = found_or_skip("slurm-wlm munge", "munged", "slurmctld", "slurmd", "sinfo")
    with ExitStack() as servers, tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        folder = Path(name)  # short: it holds unix sockets
        folder.chmod(0o755)  # munge refuses a socket that others do not reach
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)

        def serve(what: str, *command: str) -> Server:
            server = Server(command, folder / f"{what}.out", environment)
            servers.callback(server.stop)
            return server

        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(_configuration(folder))
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        munge = serve("munge", munged, "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_until(lambda: munge.check() or (folder / "munge.socket").exists(), "munge listens")
        running = [serve("slurmctld", controller, "-D")]
        running += [serve(node, daemon, "-D", "-N", node) for node in NODES]

        def is_idle() -> bool:
            for server in running:
                server.check()
            shown = subprocess.run(
                [show, "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=60
            )
            return shown.stdout.split() == ["idle"] * len(NODES)

        wait_until(is_idle, "both nodes are idle")
        try:
            yield environment
        finally:
            _cancel_all(environment)


def _cancel_all(environment: dict[str, str]) -> None:
    """While the servers run: a step whose slurmd has gone stays behind."""

    def jobs() -> list[str]:
        queue = ["squeue", "--noheader", "--format=%i"]
        return subprocess.run(queue, env=environment, capture_output=True, text=True, timeout=60).stdout.split()

    for job in jobs():
        subprocess.run(["scancel", job], env=environment, timeout=60)
    wait_until(lambda: not jobs(), "all jobs have ended")


def _configuration(folder: Path) -> str:
    user = pwd.getpwuid(os.geteuid()).pw_name
    host = socket.gethostname()
    port = free_ports(1 + len(NODES))
    names, ports = f"node[0-{len(NODES) - 1}]", f"[{port + 1}-{port + len(NODES)}]"
    return f"""\
ClusterName=farcall
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=2
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={CPUS}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
