"""An SSH server, on loopback or in a network of its own, with keys, and the hosts ``alpha`` and ``beta``."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.rigs.programs import Server, found_or_skip, free_ports
from tests.kit.waiting import wait_until

PRIVILEGE_SEPARATION = Path("/run/sshd")


@dataclass(frozen=True)
class SshRig:
    """What a user of it needs."""

    hosts: tuple[str, ...]
    configuration: Path
    """For ``ssh -F``."""


@contextmanager
def ssh_server(
    folder: Path, *, host: str = "127.0.0.1", server_in: Sequence[str] = (), client_in: Sequence[str] = ()
) -> Iterator[SshRig]:
    """The server runs once this is entered, at ``host``; ``server_in`` and ``client_in`` run commands elsewhere."""
    server_path, client, keygen = found_or_skip("openssh-server", "sshd", "ssh", "ssh-keygen")
    if os.geteuid() == 0:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)  # the package makes it where systemd runs
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    port = free_ports(1)
    settings = folder / "sshd_config"
    settings.write_text(
        f"Port {port}\nListenAddress {host}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        # As a site has it: no more than these come from the client.
        "AcceptEnv LANG\nMaxStartups 100\nMaxSessions 100\n"
    )
    known = folder / "known_hosts"
    known.write_text(f"[{host}]:{port} {(folder / 'host.pub').read_text()}")
    configuration = folder / "ssh_config"
    configuration.write_text(
        f"Host alpha beta\n  HostName {host}\n  Port {port}\n  User {pwd.getpwuid(os.geteuid()).pw_name}\n"
        f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
        # A host that nobody answers for.
        "Host nowhere\n  HostName 127.0.0.1\n  Port 9\n"
    )
    server = Server([*server_in, server_path, "-D", "-e", "-f", str(settings)], folder / "sshd.log")
    try:
        wait_until(lambda: server.check() or "listening on" in server.said(), "sshd listens")
        subprocess.run([*client_in, client, "-F", configuration, "alpha", "true"], check=True, timeout=60)
        yield SshRig(("alpha", "beta"), configuration)
    finally:
        server.stop()
