"""What a group of many members costs: its start, its rest, the deaths of some, and its end.

    python benchmarks/members.py 64 --nodes 8      # 64 members, 8 of them in each process

The last process is killed, so that as many members die at once as it has. Figures are those of the worst process;
memory and descriptors are what a member adds to a process that has torch and farcall loaded. They meet at a file.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, process_time, sleep, time
from typing import NamedTuple

import farcall
from farcall.testing.cluster import start_processes, temporary_file_url

REST_S = 5.0
DEATH_S = 6.0
BOUND_S = 300.0


class Figures(NamedTuple):
    """Of one process."""

    start_s: float
    memory_bytes: float
    descriptors: float
    idle_cores: float
    deaths: int
    last_death_at: float
    shutdown_s: float


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def serve(process: int, url: str, size: int, nodes_each: int, begin_at: float, folder: str) -> Figures:
    """One process: its nodes start, rest, hear of the deaths, and shut down."""
    memory_bytes, descriptors = _resident_bytes(), _descriptors()
    sleep(max(0.0, begin_at - time()))
    since = monotonic()
    options = farcall.RpcBackendOptions(init_method=url, start_timeout_s=BOUND_S)
    ranks = range(process * nodes_each, (process + 1) * nodes_each)
    nodes = [farcall.Node(f"w{rank}", rank, size, options) for rank in ranks]
    deaths: list[float] = []
    with ThreadPoolExecutor(nodes_each) as pool:
        list(pool.map(farcall.Node.start, nodes))
        start_s = monotonic() - since
        for node in nodes:
            node.on_member(lambda event: deaths.append(time()) if event.kind == "dead" else None)
        _tell(folder, process, "up")
        _wait_for(Path(folder, "rest"))
        worked_s, since = process_time(), monotonic()
        sleep(REST_S)
        idle_cores = (process_time() - worked_s) / (monotonic() - since)
        memory_bytes, descriptors = _resident_bytes() - memory_bytes, _descriptors() - descriptors
        _tell(folder, process, "rested")
        _wait_for(Path(folder, "end"))
        since = monotonic()
        list(pool.map(farcall.Node.shutdown, nodes))
    shutdown_s = monotonic() - since
    each = len(nodes)
    last = max(deaths, default=0.0)
    return Figures(start_s, memory_bytes / each, descriptors / each, idle_cores, len(deaths), last, shutdown_s)


def _tell(folder: str, process: int, what: str) -> None:
    Path(folder, f"{process}-{what}").touch()


def _wait_for(*paths: Path) -> None:
    deadline = monotonic() + BOUND_S
    while not all(path.exists() for path in paths):
        if monotonic() > deadline:
            raise TimeoutError(f"not there: {', '.join(path.name for path in paths if not path.exists())}")
        sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", type=int)
    parser.add_argument("--nodes", type=int, default=8, help="members in one process")
    given = parser.parse_args()
    count = given.members // given.nodes
    with tempfile.TemporaryDirectory() as folder:
        begin_at = time() + 4.0
        found = start_processes(count, serve, temporary_file_url(), count * given.nodes, given.nodes, begin_at, folder)
        try:
            _wait_for(*(Path(folder, f"{process}-up") for process in range(count)))
            Path(folder, "rest").touch()
            _wait_for(*(Path(folder, f"{process}-rested") for process in range(count)))
            killed_at = time()
            found[-1].kill(signal.SIGKILL)
            sleep(DEATH_S)
            Path(folder, "end").touch()
            figures: list[Figures] = []
            for one in found[:-1]:
                one.collect(monotonic() + BOUND_S)
                figures.append(one.result)
        finally:
            for one in found:
                one.end()
    expected = (count - 1) * given.nodes * given.nodes
    print(f"start            {max(one.start_s for one in figures):8.1f} s")
    print(f"memory each      {max(one.memory_bytes for one in figures) / 2**20:8.1f} MiB")
    print(f"descriptors each {max(one.descriptors for one in figures):8.0f}")
    print(f"idle, all        {sum(one.idle_cores for one in figures):8.3f} cores")
    print(f"deaths known     {sum(one.deaths for one in figures):8d} of {expected}")
    print(f"known to all in  {max(one.last_death_at for one in figures) - killed_at:8.2f} s")
    print(f"shutdown         {max(one.shutdown_s for one in figures):8.1f} s")


if __name__ == "__main__":
    main()
