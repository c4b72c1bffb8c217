"""The package can be imported where a system has less than Linux. That it runs there is tested nowhere."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, mmap, os, pkgutil, select, signal, socket, sys
import torch.distributed, torch.utils.checkpoint  # which have their own ways with each system

missing = {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING getuid fork register_at_fork sched_getaffinity pidfd_open killpg",
    select: "epoll poll EPOLLIN EPOLLOUT",
    signal: "SIGKILL SIGSTOP SIGCONT pthread_sigmask pthread_kill",
    socket: "AF_UNIX SCM_RIGHTS CMSG_SPACE CMSG_LEN MSG_DONTWAIT MSG_NOSIGNAL SO_REUSEPORT",
    mmap: "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
}
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios")))
for module, names in missing.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"  # which lacks more than macOS does

import farcall

try:
    farcall.launch(1)
except farcall.errors.LaunchFailed as refusal:
    assert "needs Linux" in str(refusal)
else:
    raise AssertionError("launched")
for found in pkgutil.walk_packages(farcall.__path__, "farcall."):
    # The command, the launcher and the kit for tests are for POSIX.
    posix = "farcall.cli", "farcall.launcher", "farcall.testing", "farcall.__main__", "farcall.compat.rpc.faults"
    if not found.name.startswith(posix):
        importlib.import_module(found.name)
"""


def test_every_module_can_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
