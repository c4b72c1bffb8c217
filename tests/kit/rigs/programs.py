"""Programs of a rig: which are missing, and the servers that end with the test."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

ENDING_S = 120.0
_PR_SET_PDEATHSIG = 1


def found_or_skip(package: str, *names: str) -> list[str]:
    """The paths of ``names``; skips the test where one is missing."""
    # Debian keeps servers where only root looks.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    paths = {name: shutil.which(name, path=path) for name in names}
    missing = [name for name, found in paths.items() if found is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt install {package}")
    return [found for found in paths.values() if found is not None]


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free now, below those that the system gives to clients.

    A server that cannot be handed a bound socket must take what is free: nobody else is given a port of this range.
    """
    first = 12_000 + os.getpid() * 7 % 18_000
    for port in range(first, 32_000, count):
        with ExitStack() as held:
            try:
                for each in range(port, port + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", each))
            except OSError:
                continue
        return port
    raise OSError("no free ports")


class Server:
    """One server process, ended with the test, or with the process that runs the test."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def check(self) -> None:
        assert self.process.poll() is None, f"{self.process.args} ended with {self.process.returncode}:\n{self.said()}"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(ENDING_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
