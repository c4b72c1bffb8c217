"""`farcall.launch` on any engine, as a program uses it: a worker is killed and comes back; all end with the program."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.kit.launching import START_S, runs, wait_gone
from tests.kit.waiting import wait_until

import farcall


def check_launch(on: str, *, size: int = 2, **engine_options: Any) -> None:
    with farcall.launch(
        size, on=on, restart="on-failure", backoff_s=0.05, start_timeout=START_S, quiet=True, **engine_options
    ) as cluster:
        processes = [worker.call(os.getpid) for worker in cluster]
        assert list(cluster.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        os.kill(processes[1], signal.SIGKILL)
        wait_gone([processes[1]])
        wait_until(lambda: life_of(cluster) == "1", "worker1 is there again", START_S)
        processes[1] = cluster["worker1"].call(os.getpid)
        assert all(map(runs, processes))
    wait_gone(processes)


def life_of(cluster: Any) -> str:
    """Which life of worker1 answers; empty while none does."""
    try:
        life: str = cluster["worker1"].call(os.getenv, "FARCALL_RESTARTS")
    except farcall.errors.RpcError:
        return ""
    return life
