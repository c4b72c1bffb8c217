"""Many members in few processes, with links on demand, under ring, tree and all-to-all traffic: what they bear.

At random moments processes are killed and started again, stopped for a while, or leave and come back; connections are
cut at any byte. Half of the processes reach others over TCP only, encrypted, the rest over unix sockets, too.
No request may run twice, no call outlive its timeout, no member be declared dead that lives, nothing be left behind in
a process whose nodes have ended. A failure prints its seed: ``FARCALL_SEED=...``. With ``FARCALL_SOAK=full``: 200
members for ten minutes (``FARCALL_SOAK_S``: another time), and the figures of docs/scale.md.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any, NamedTuple

import pytest
from tests.conftest import descriptors, remains
from tests.faults.soak_journal import Call, calls, executed, lives, untruth
from tests.faults.soak_load import DIRECT, Load, check_nothing_remains, journal, note_life, start_load
from tests.kit.stopping import stop
from tests.kit.waiting import wait_until

import farcall
from farcall.options import MembershipOptions
from farcall.protocol.frames import Frame
from farcall.runtime.link import parting
from farcall.runtime.peers.interference import interfering
from farcall.runtime.peers.peer import Peer
from farcall.testing.cluster import WorkerProcess, temporary_file_url
from farcall.transport.interface import Transport

FULL = os.environ.get("FARCALL_SOAK") == "full"
SEED = int(os.environ.get("FARCALL_SEED", "6"))
BOUND_S = 300.0
LATE_S = 15.0
"""How much later than its timeout a call may end on a busy machine."""


class Size(NamedTuple):
    """Of a soak."""

    processes: int
    nodes_each: int
    duration_s: float
    pause_s: float
    """Between two faults, on average."""
    stop_s: float
    """The longest time for which a process stands still."""
    cut_s: float
    """Between two cuts in one process, on average."""
    part_after_s: float
    load_pause_s: float
    full_mesh: int

    @property
    def names(self) -> list[str]:
        return [f"w{rank}" for rank in range(self.processes * self.nodes_each)]


SHORT = Size(5, 4, 5.0, 0.6, 1.0, 0.3, 0.3, 0.1, 8)
LONG = Size(20, 10, float(os.environ.get("FARCALL_SOAK_S", "600")), 3.0, 8.0, 2.0, parting.PART_AFTER_S, 1.2, 32)
CALM = 2
"""So many processes, the first ones, are left alone but for cuts."""


# --- a process -----------------------------------------------------------------------------------------------


class Cutter:
    """Cuts connections of this process, as a network does: both ends see their end, at any byte."""

    def __init__(self) -> None:
        self._transports: list[weakref.ref[Transport]] = []

    def wrap_transport(
        self, transport: Transport, here: str, there: str, fail_call: Callable[[int, str], None]
    ) -> Transport:
        self._transports.append(weakref.ref(transport))
        return transport

    def wrap_delivery(self, deliver: Callable[[Peer, Frame], None], here: str) -> Callable[[Peer, Frame], None]:
        return deliver

    def cut_one(self, source: random.Random) -> bool:
        found = []
        for known in list(self._transports):
            transport = known()
            if transport is None:
                self._transports.remove(known)
            elif (transport.fileno() or -1) >= 0:
                found.append(transport)
        if not found:
            return False
        try:
            with socket.socket(fileno=os.dup(source.choice(found).fileno() or -1)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # it ended this moment
        return True


def work(place: int, url: str, directory: str, size: Size, options: dict[str, Any]) -> dict[str, float]:
    """The life of the nodes of one process, until they are to leave; what they needed."""
    faulthandler.enable()
    folder, found = Path(directory), journal(directory)
    before = remains(set())
    parting.PART_AFTER_S = size.part_after_s
    cutter, source = Cutter(), random.Random(f"{SEED}/{os.getpid()}")
    ranks = range(place * size.nodes_each, (place + 1) * size.nodes_each)
    chosen = farcall.RpcBackendOptions(init_method=url, start_timeout_s=BOUND_S, **options)
    nodes = [farcall.Node(size.names[rank], rank, options=chosen) for rank in ranks]
    stopping = [folder / "stop", folder / f"leave-{os.getpid()}"]

    def stops() -> bool:
        return any(path.exists() for path in stopping)

    with ThreadPoolExecutor(len(nodes)) as pool:
        since = monotonic()
        with interfering(cutter, ()):
            list(pool.map(farcall.Node.start, nodes))
        start_s = monotonic() - since
        for node in nodes:
            note_life(node)
        (folder / f"up-{os.getpid()}").touch()
        wait_until(lambda: (folder / "go").exists() or stops(), "the start of all", BOUND_S)
        given = Load(size.names, SEED, threads=1, pause_s=size.load_pause_s, timeouts_s=(0.5, 60.0, 60.0, 60.0))
        worked_s, since = process_time(), monotonic()
        threads = start_load(nodes, given, stops)
        next_cut = monotonic() + source.uniform(0.0, 2 * size.cut_s)
        while any(thread.is_alive() for thread in threads):
            sleep(0.05)
            if monotonic() > next_cut and not stops():
                next_cut = monotonic() + source.uniform(0.0, 2 * size.cut_s)
                if cutter.cut_one(source):
                    found.write("cuts", monotonic())
        figures = {
            "start_s": start_s,
            "cores": (process_time() - worked_s) / (monotonic() - since),
            "descriptors": float(len(descriptors())),
            "threads": float(threading.active_count()),
            "memory_mib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        }
        (folder / f"idle-{os.getpid()}").touch()
        wait_until(lambda: (folder / "leave").exists() or stopping[1].exists(), "the end of all", BOUND_S)
        list(pool.map(farcall.Node.shutdown, nodes))
    del nodes, node
    check_nothing_remains(before)
    return figures


# --- the processes, and what is done to them -------------------------------------------------------------------


class Soak:
    """The processes, and the faults. Each fault is a generator that yields while it waits."""

    def __init__(self, size: Size, directory: Path, options: dict[str, Any]) -> None:
        self.size = size
        self.directory = directory
        self._url = temporary_file_url()
        self._options = options
        self._source = random.Random(SEED)
        self.processes = [self._start(place) for place in range(size.processes)]
        self.done: Counter[str] = Counter()
        self.disturbed: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """When a process was not what it should be: by its number, from when to when."""
        self.killed: dict[int, float] = {}
        self.ended_at = 0.0
        """When all were to leave. Of those who leave at once, some find others gone before anybody tells them why."""
        self._first = [self.kill, self.stop, self.leave]

    def _start(self, place: int) -> WorkerProcess:
        options = dict(self._options, transports=["tcp"] if place % 2 else ["unix", "tcp"])
        return WorkerProcess(place, work, (place, self._url, str(self.directory), self.size, options))

    def all_have(self, what: str) -> bool:
        self._check_alive(range(len(self.processes)))
        return all((self.directory / f"{what}-{process.pid}").exists() for process in self.processes)

    def _check_alive(self, places: Iterable[int]) -> None:
        for process in (self.processes[place] for place in places):
            if not process.process.is_alive():
                finish(process)  # raises, most likely, for the reason
                raise AssertionError(f"seed {SEED}: process {process.rank} has ended")

    def run(self) -> None:
        """Disturb one process after another, up to three at a time, until time is up."""
        under_way: dict[int, Iterator[None]] = {}
        end = next_at = monotonic()
        end += self.size.duration_s
        while monotonic() < end or under_way or self._first:
            if next_at <= monotonic() and (monotonic() < end or self._first) and len(under_way) < 3:
                next_at = monotonic() + self._source.uniform(0.0, 2 * self.size.pause_s)
                place = self._source.randrange(CALM, self.size.processes)
                if place not in under_way:
                    kinds = [self.kill, self.kill, self.stop, self.stop, self.leave]
                    kind = self._first.pop() if self._first else self._source.choice(kinds)
                    under_way[place] = kind(place)
            for place, steps in list(under_way.items()):
                if next(steps, self) is self:
                    del under_way[place]
            self._check_alive(set(range(len(self.processes))) - set(under_way))
            sleep(0.02)

    def kill(self, place: int) -> Iterator[None]:
        """At any moment, also while it starts."""
        self.done["kills"] += 1
        process = self.processes[place]
        self.killed[process.pid] = monotonic()
        process.kill()
        process.end()
        yield from self._pause(self.size.stop_s)
        self.processes[place] = self._start(place)
        yield from self._pause(self.size.stop_s)

    def stop(self, place: int) -> Iterator[None]:
        self.done["stops"] += 1
        process, since = self.processes[place], monotonic()
        stop(process.pid)
        try:
            yield from self._pause(self.size.stop_s)
        finally:
            if process.process.is_alive():
                process.kill(signal.SIGCONT)
            self.disturbed[process.pid].append((since, monotonic()))

    def leave(self, place: int) -> Iterator[None]:
        """Of its own will, once it is there; then another process comes in its place."""
        process = self.processes[place]
        up = self.directory / f"up-{process.pid}"
        yield from self._until(lambda: up.exists() or not process.process.is_alive(), f"{self._who(place)} is not up")
        if not up.exists():
            self._check_alive([place])  # raises: nobody has ended it
        self.done["leaves"] += 1
        since = monotonic()
        (self.directory / f"leave-{process.pid}").touch()
        yield from self._until(lambda: not process.process.is_alive(), f"{self._who(place)} does not leave")
        self.disturbed[process.pid].append((since, float("inf")))
        finish(process)
        self.processes[place] = self._start(place)

    def _who(self, place: int) -> str:
        each = self.size.nodes_each
        names = self.size.names[place * each : (place + 1) * each]
        return f"process {place} (pid {self.processes[place].pid}; {names[0]} to {names[-1]})"

    def _until(self, done: Callable[[], bool], what_is_wrong: str) -> Iterator[None]:
        """Yield until ``done``, for BOUND_S at most."""
        deadline = monotonic() + BOUND_S
        while not done():
            assert monotonic() < deadline, f"seed {SEED}: after {BOUND_S:g} s, {what_is_wrong}"
            yield

    def wait_for_all(self, what: str) -> None:
        """Wait until every process has left a sign of this kind; an error names those that have not."""
        deadline = monotonic() + BOUND_S
        while not self.all_have(what):
            signs = [self.directory / f"{what}-{process.pid}" for process in self.processes]
            late = [self._who(place) for place, sign in enumerate(signs) if not sign.exists()]
            assert monotonic() < deadline, f"seed {SEED}: after {BOUND_S:g} s, not {what}: {'; '.join(late)}"
            sleep(0.02)

    def _pause(self, longest_s: float) -> Iterator[None]:
        until = monotonic() + self._source.uniform(0.0, longest_s)
        while monotonic() < until:
            yield

    def end(self) -> None:
        """Make sure that no process is left."""
        for process in self.processes:
            if process.process._closed is False:  # type: ignore[attr-defined]
                process.end()


def finish(process: WorkerProcess) -> dict[str, float]:
    """A process ends by itself, soon: its figures."""
    process.collect(monotonic() + BOUND_S)
    error, result, exit_code = process.error, process.result, process.process.exitcode
    process.end()
    assert error is None, f"seed {SEED}: process {process.rank}, exit code {exit_code}: {error}"
    return dict(result)


@pytest.mark.timeout(LONG.duration_s + 1200)
def test_many_members_bear_kills_stops_cuts_leaves_and_joins(tmp_path: Path) -> None:
    size = LONG if FULL else SHORT
    options = {
        "membership": MembershipOptions(rejoin=False, full_mesh=size.full_mesh),  # who is expelled says so
        "num_worker_threads": 4,
    }
    began = monotonic()
    found = Soak(size, tmp_path, options)
    try:
        found.wait_for_all("up")
        print(f"seed {SEED}: {len(size.names)} members are up after {monotonic() - began:.1f} s")
        (tmp_path / "go").touch()
        found.run()
        found.wait_for_all("up")
        (tmp_path / "stop").touch()
        found.wait_for_all("idle")
        found.ended_at = monotonic()
        (tmp_path / "leave").touch()
        figures = [finish(process) for process in found.processes]
    finally:
        found.end()
    check(found)
    for name in figures[0]:
        values = [one[name] for one in figures]
        print(f"{name}: {min(values):.2f} to {max(values):.2f} in a process, {sum(values):.2f} in all")


def check(found: Soak) -> None:
    """Read the journals."""
    directory, ran, lived = found.directory, executed(found.directory), lives(found.directory)
    twice = [call_id for call_id, count in ran.items() if count > 1]
    assert not twice, f"seed {SEED}: executed more than once: {twice[:5]}"
    wrong: list[str] = []
    gone = {*found.killed, *(pid for pid, times in found.disturbed.items() if times[-1][1] == float("inf"))}
    for path in directory.glob("deaths-*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        told = {incarnation for incarnation, when in lines if float(when) < found.ended_at}
        # One that was killed while it started has not written down that it lives. Nodes of one process leave together:
        # those whom they told may be gone, too, before the others hear of it, and find nobody there.
        wrong += [f"{path.name}: {one} lives" for one in told if one in lived and lived[one] not in gone]
    outcomes: Counter[str] = Counter()
    silences: list[tuple[float, Call]] = []
    for call in calls(directory):
        if call.pid in found.killed:
            continue
        if call.ended_at is None:
            wrong.append(f"never ended: {call}")
            continue
        stood_still_s = sum(
            max(0.0, min(call.ended_at, b) - max(call.begun_at, a)) for a, b in found.disturbed[call.pid] if b < 1e12
        )
        took_s, times = call.ended_at - call.begun_at - stood_still_s, ran[call.call_id]
        outcomes[f"{call.outcome.error} {call.outcome.delivery}".strip() or "result"] += 1
        if took_s > call.bound_s + LATE_S:
            wrong.append(f"too late: ran {times}, took {took_s:.2f} s: {call}")
        if problem := untruth(call, times, stayed=True):
            wrong.append(f"{problem}: ran {times}: {call}")
        if lived.get(call.outcome.incarnation, 0) not in {0, *gone}:
            wrong.append(f"it lives: {call}")
        silences.append((took_s, call))
    assert not wrong, f"seed {SEED}: {len(wrong)} of {outcomes.total()}: " + "\n".join(wrong[:20])
    cuts = sum(len(path.read_text().splitlines()) for path in directory.glob("cuts-*"))
    print(f"seed {SEED}: {dict(found.done)}, {cuts} cuts; {dict(outcomes)}")
    report(found, silences)
    assert outcomes["result"] > 20
    assert cuts
    assert all(found.done[kind] for kind in ("kills", "stops", "leaves"))


def report(found: Soak, silences: list[tuple[float, Call]]) -> None:
    """How long calls took, between members that were both well all the time."""
    calm = {process.pid for process in found.processes[:CALM]}
    places = {name: rank // found.size.nodes_each for rank, name in enumerate(found.size.names)}
    well = sorted(
        (took_s, call)
        for took_s, call in silences
        if call.pid in calm and places[call.to] < CALM and call.kind in DIRECT and call.kind != 5
    )
    if well:
        for part in (0.5, 0.99, 0.999):
            print(f"well: {part:.1%} of {len(well)} within {well[int(part * len(well))][0] * 1e3:.1f} ms")
        print(f"longest silence of one that is well: {well[-1][0]:.3f} s, {well[-1][1]}")
    print(f"longest call: {max(silences)}")
