"""The lifeline of a worker: an open pipe from its driver. When that closes, the kernel kills the worker.

The kernel itself sends the signal (``O_ASYNC`` with ``F_SETSIG``), so a worker whose interpreter is busy in C code, or
stopped, ends as well; and its children with it, where it leads a process group. Nobody writes to the line after the
worker's spec, so any news of it is its end. A parent-death signal would do the same on one machine, but it fires when
the *thread* that started the process ends, and notebooks start things from threads that do.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def hold(descriptor: int) -> None:
    """From now on this process, and the group it leads, ends with the other end of ``descriptor``."""
    group = os.getpgrp()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group if group == os.getpid() else os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    looking = select.poll()
    looking.register(descriptor, select.POLLIN)
    if looking.poll(0):  # it was closed before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
