"""A deadlock on purpose, and how to find it: two workers wait for each other, and `farcall stacks` says so.

    python examples/deadlock.py

Each worker holds a lock of its own while it calls a function of the other one, and that function needs the lock there.
No timeout helps to see that: it would only say that somebody did not answer. `farcall stacks` looks from outside, finds
the circle and the lines, and ends with status 1.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

import farcall
from farcall.options import ObservingOptions

ACCOUNT = threading.Lock()
NAMES = ("left", "right")


def deposit() -> None:
    with ACCOUNT:  # (2) waits here for whoever transfers from this account
        pass


def transfer(to: str) -> None:
    with ACCOUNT:
        farcall.barrier(NAMES)  # both accounts are locked now
        farcall.worker(to).call(deposit)  # (1) waits here for the other worker


def run(rank: int, directory: str) -> None:
    options = farcall.RpcBackendOptions(
        init_method=f"file://{directory}/meeting", observing=ObservingOptions(runtime_directory=directory)
    )
    farcall.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
    transfer(NAMES[1 - rank])


def stacks(directory: str) -> subprocess.CompletedProcess[str]:
    """The command that you would type in another terminal."""
    return subprocess.run(
        [sys.executable, "-m", "farcall", "stacks"],
        env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": directory},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> None:
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        processes: list[Any] = [spawning.Process(target=run, args=(rank, directory)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            found = stacks(directory)
            while found.returncode != 1:  # 0: nothing is stuck yet; 2: nobody is there yet
                assert all(process.is_alive() for process in processes)
                found = stacks(directory)
        finally:
            for process in processes:
                process.kill()
                process.join()
    print(found.stdout)


if __name__ == "__main__":
    main()
