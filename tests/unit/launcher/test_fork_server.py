"""The driver's end of the server that forks workers."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from farcall.launcher import fork_server
from farcall.launcher.engine import EngineError
from farcall.launcher.fork_server import ForkServer


def test_a_late_answer_is_not_taken_for_that_of_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be an exit code, 0 perhaps, where a process number is asked for: signals would go astray."""
    monkeypatch.setattr(fork_server, "_ANSWER_S", 0.01)
    server = object.__new__(ForkServer)  # without the process
    server._lock, server._has_answered = threading.Lock(), True
    server._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with pytest.raises(EngineError, match="does not answer"):
            server.reap(7)
        with suppress(OSError):
            theirs.send(b"0")
        with pytest.raises(EngineError, match="does not answer"):
            server.start(0, 1)


def test_a_child_that_is_forked_after_the_end_of_the_server_closes_nothing_twice() -> None:
    """It used to raise, and the child kept the descriptors of all who came after it."""
    server = object.__new__(ForkServer)
    server._lock = threading.Lock()
    server._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._process = subprocess.Popen([sys.executable, "-S", "-c", ""], stdin=subprocess.PIPE)
    with theirs:
        server.close()
        server.close_after_fork()
