"""What a group of many members costs: its start, its rest, the deaths of some, and its end.

    python benchmarks/members.py 1000                   # 50 members in each of 20 processes
    python benchmarks/members.py 400 --processes 8 --victims 50

One more process, with ``--victims`` members, is killed; they die at once. Seconds are those of the slowest process.
CPU seconds are those of all processes together, and hardly change with other load on the machine. Memory and
descriptors are what a member adds to a process that has torch and farcall loaded, in the worst process; idle cores and
messages are those of all. The members meet at a file. Every wait ends after ``--bound`` seconds, with an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, process_time, sleep, time
from typing import NamedTuple

import farcall
from farcall.testing.cluster import WorkerProcess, start_processes

REST_S = 5.0


class Figures(NamedTuple):
    """Of one process."""

    start_s: float
    start_cpu_s: float
    memory_bytes: float
    descriptors: float
    idle_cores: float
    deaths: int
    last_death_at: float
    death_cpu_s: float
    shutdown_s: float
    shutdown_cpu_s: float
    shutdown_dials: int


class Phase:
    """The seconds and the CPU seconds of this process since the phase began."""

    def __init__(self) -> None:
        self._began, self._worked = monotonic(), process_time()

    def end(self) -> tuple[float, float]:
        return monotonic() - self._began, process_time() - self._worked


class Signs:
    """Files by which the processes wait for each other, each at most ``bound_s``."""

    def __init__(self, folder: str, bound_s: float) -> None:
        self._folder = Path(folder)
        self._bound_s = bound_s

    def put(self, name: str) -> None:
        (self._folder / name).touch()

    def wait_for(self, *names: str, check: Callable[[], None] = lambda: None) -> None:
        deadline = monotonic() + self._bound_s
        while missing := [name for name in names if not (self._folder / name).exists()]:
            check()
            if monotonic() > deadline:
                raise TimeoutError(f"not there after {self._bound_s:g} s: {', '.join(missing)}")
            sleep(0.05)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Group(NamedTuple):
    """The members, spread evenly over processes, and those of one more process, which is killed."""

    members: int
    processes: int
    victims: int
    bound_s: float

    @property
    def size(self) -> int:
        return self.members + self.victims

    def ranks_of(self, process: int) -> range:
        each = self.members // self.processes
        return range(process * each, self.size if process == self.processes else (process + 1) * each)


def _start(node: farcall.Node) -> None:
    """Start a node; tell at once why it failed: the others of its process may wait for it until their time is up."""
    try:
        node.start()
    except BaseException as error:
        print(f"a member did not start: {type(error).__name__}: {error}", flush=True)
        raise


def serve(process: int, group: Group, folder: str) -> Figures:
    """One process: its nodes start, rest, hear of the deaths, and shut down."""
    bound_s = group.bound_s
    signs = Signs(folder, bound_s)
    # Each thread that waits for the GIL wakes up once in this time, and a node has an I/O thread: with the default of
    # 5 ms, fifty busy nodes in each of twenty processes keep two processors busy with waking up.
    sys.setswitchinterval(0.1)
    memory_bytes, descriptors = _resident_bytes(), _descriptors()
    options = farcall.RpcBackendOptions(init_method=f"file://{folder}/store", start_timeout_s=bound_s)
    ranks = group.ranks_of(process)
    nodes = [farcall.Node(f"w{rank}", rank, group.size, options) for rank in ranks]
    deaths: list[float] = []
    signs.put(f"{process}-there")
    signs.wait_for("start")
    phase = Phase()
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(_start, nodes))
        start_s, start_cpu_s = phase.end()
        for node in nodes:
            node.on_member(lambda event: deaths.append(time()) if event.kind == "dead" else None)
        signs.put(f"{process}-up")
        signs.wait_for("rest")
        phase = Phase()
        sleep(REST_S)
        rested_s, rest_cpu_s = phase.end()
        memory_bytes, descriptors = _resident_bytes() - memory_bytes, _descriptors() - descriptors
        phase = Phase()
        signs.put(f"{process}-rested")
        deadline = monotonic() + bound_s
        while len(deaths) < len(nodes) * group.victims and monotonic() < deadline and process < group.processes:
            sleep(0.05)
        signs.put(f"{process}-aware")
        signs.wait_for("end")
        _, death_cpu_s = phase.end()
        dials = sum(node.metrics().links_joined for node in nodes)
        runtimes = [node._runtime for node in nodes]
        phase = Phase()
        list(pool.map(lambda node: node.shutdown(timeout=bound_s), nodes))
        shutdown_s, shutdown_cpu_s = phase.end()
    return Figures(
        start_s,
        start_cpu_s,
        memory_bytes / len(nodes),
        descriptors / len(nodes),
        rest_cpu_s / rested_s,
        len(deaths),
        max(deaths, default=0.0),
        death_cpu_s,
        shutdown_s,
        shutdown_cpu_s,
        sum(runtime.connector.joined for runtime in runtimes) - dials,
    )


def measure(group: Group) -> None:
    """Run the group, and print what it cost."""
    bound_s = group.bound_s
    with tempfile.TemporaryDirectory() as folder:
        signs = Signs(folder, bound_s)
        found = start_processes(group.processes + 1, serve, group, folder)

        def all_live() -> None:
            for one in found:
                if not one.process.is_alive():
                    one.collect(monotonic() + 1.0)
                    raise RuntimeError(f"process {one.rank} ended: {one.error}")

        def wait_for_all(what: str, processes: list[WorkerProcess] = found, check: bool = True) -> None:
            since = monotonic()
            names = (f"{one.rank}-{what}" for one in processes)
            signs.wait_for(*names, check=all_live if check else lambda: None)
            print(f"all are {what} after {monotonic() - since:.1f} s", flush=True)

        try:
            wait_for_all("there")
            signs.put("start")
            wait_for_all("up")
            signs.put("rest")
            wait_for_all("rested")
            killed_at = time()
            found[-1].kill(signal.SIGKILL)
            wait_for_all("aware", found[:-1], check=False)
            signs.put("end")
            for one in found[:-1]:
                one.collect(monotonic() + bound_s)
                if one.error:
                    raise RuntimeError(f"process {one.rank} failed: {one.error}")
            _print([one.result for one in found[:-1]], group, killed_at)
        finally:
            for one in found:
                one.end()


def _print(figures: list[Figures], group: Group, killed_at: float) -> None:
    rows = (
        ("start", max(one.start_s for one in figures), 1, "s"),
        ("start, CPU of all", sum(one.start_cpu_s for one in figures), 1, "s"),
        ("memory each", max(one.memory_bytes for one in figures) / 2**20, 1, "MiB"),
        ("descriptors each", max(one.descriptors for one in figures), 0, ""),
        ("idle, all together", sum(one.idle_cores for one in figures), 3, "cores"),
        ("deaths known", sum(one.deaths for one in figures), 0, f"of {group.members * group.victims}"),
        ("known to all after", max(one.last_death_at for one in figures) - killed_at, 2, "s"),
        ("deaths, CPU of all", sum(one.death_cpu_s for one in figures), 1, "s"),
        ("shutdown", max(one.shutdown_s for one in figures), 1, "s"),
        ("shutdown, CPU of all", sum(one.shutdown_cpu_s for one in figures), 1, "s"),
        ("dials in shutdown, each", sum(one.shutdown_dials for one in figures) / group.members, 2, ""),
    )
    for name, value, digits, unit in rows:
        print(f"{name:24}{value:10.{digits}f} {unit}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", type=int)
    parser.add_argument("--processes", type=int, default=20, help="that the members are spread over")
    parser.add_argument("--victims", type=int, default=1, help="members of a further process, which is killed")
    parser.add_argument("--bound", type=float, default=300.0, help="seconds that each wait may take")
    given = parser.parse_args()
    if given.members % given.processes:
        parser.error(f"{given.members} members cannot be spread evenly over {given.processes} processes")
    group = Group(given.members, given.processes, given.victims, given.bound)
    print(f"{group.members} members in {group.processes} processes, and {group.victims} to be killed", flush=True)
    measure(group)


if __name__ == "__main__":
    main()
