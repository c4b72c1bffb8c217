"""Real processes under load, killed and stopped at random moments: every call ends, truthfully, and ran at most once.

This process and one worker are left alone; of the others one is killed, or stopped for a moment, or stopped until the
cluster has given it up, again and again. Whoever is gone is started again under its name. All of them call each other
all the time (`soak_load.py`). A failure prints its seed; run it with ``FARCALL_SEED=...``, and for ten minutes with
``FARCALL_SOAK=full``.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.conftest import descriptors, segments
from tests.faults.soak_journal import calls, executed, lives, untruth
from tests.faults.soak_load import Load, double, execute, journal, note_life, start_load, work
from tests.kit.stopping import stop

import farcall
from farcall.options import MembershipOptions
from farcall.protocol.member import incarnation_text
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import WorkerProcess, temporary_file_url

FULL = os.environ.get("FARCALL_SOAK") == "full"
SEED = int(os.environ.get("FARCALL_SEED", "6"))
DURATION_S = 600.0 if FULL else 8.0
BOUND_S = 60.0
LATE_S = 15.0
"""How much later than its timeout a call may end on a busy machine."""
DISTURBED = 4
SHORTEST_DEATH_S = 6.0
OPTIONS: dict[str, Any] = {
    "membership": MembershipOptions(
        rejoin=False,  # who is expelled ends, and is started again
        probe_interval_s=0.3,
        probe_timeout_s=0.2,
        suspicion_s=SHORTEST_DEATH_S,
        unresponsive_s=SHORTEST_DEATH_S,
    ),
    "num_worker_threads": 4,
}
NAMES = ["here", "calm", *(f"w{number}" for number in range(DISTURBED))]
LOAD = Load(NAMES, SEED)


def wait_until(condition: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> None:
    deadline = monotonic() + bound_s
    while not condition():
        assert monotonic() < deadline, f"seed {SEED}: {what}"
        sleep(0.01)


class Worker:
    """A name, and the processes that have it one after another."""

    def __init__(self, rank: int, url: str, directory: str) -> None:
        self.rank = rank
        self.name = NAMES[rank]
        self.process: WorkerProcess
        self.frozen: list[tuple[int, float, float]] = []
        """Which process stood still, from when to when."""
        self._args = (rank, url, directory, LOAD, OPTIONS)
        self.start()

    def start(self) -> None:
        self.process = WorkerProcess(self.rank, work, self._args)
        self.ended = False

    def end(self) -> None:
        """Make sure that the process is gone."""
        if not self.ended:
            self.ended = True
            self.process.end()

    @property
    def running(self) -> bool:
        return bool(self.process.process.is_alive())

    def freeze(self) -> None:
        stop(self.process.pid)
        self.frozen.append((self.process.pid, monotonic(), float("inf")))

    def thaw(self) -> None:
        self.process.kill(signal.SIGCONT)
        pid, since, _ = self.frozen.pop()
        self.frozen.append((pid, since, monotonic()))

    def finish(self, becomes: str) -> None:
        """The process ends by itself, soon."""
        self.process.collect(monotonic() + BOUND_S)
        error, result = self.process.error, self.process.result
        self.end()
        assert error is None, f"seed {SEED}: {self.name}: {error}"
        assert result == becomes, f"seed {SEED}: {self.name} {result}"


class Soak:
    """The cluster, and what is done to it. Each of these is a generator that yields while it waits."""

    def __init__(self, node: farcall.Node, workers: list[Worker], directory: Path) -> None:
        self.node = node
        self.workers = workers
        self.directory = directory
        self.source = random.Random(SEED)
        self.first = [self.kill, self.stop_briefly, self.stop_for_long]
        """What is done at first, so that everything is done at least once."""
        self.source.shuffle(self.first)
        self.done: Counter[str] = Counter()
        self.killed: set[int] = set()
        self.dead: set[str] = set()
        node.on_member(lambda event: self.dead.add(event.incarnation) if event.kind == "dead" else None)

    def run(self) -> None:
        """Disturb one worker after another, up to two at a time, until time is up."""
        under_way: dict[Worker, Iterator[None]] = {}
        end = monotonic() + DURATION_S
        next_at = monotonic()
        try:
            while monotonic() < end or under_way or self.first:
                if next_at <= monotonic() and (monotonic() < end or self.first) and len(under_way) < 2:
                    next_at = monotonic() + self.source.uniform(0.05, 0.6)
                    worker = self.source.choice(self.workers[1:])
                    if worker not in under_way:
                        kinds = [self.kill, self.kill, self.stop_briefly, self.stop_for_long]
                        kind = self.first.pop() if self.first else self.source.choice(kinds)
                        under_way[worker] = kind(worker)
                for worker, steps in list(under_way.items()):
                    if next(steps, self) is self:
                        del under_way[worker]
                sleep(0.005)
        finally:
            for worker in self.workers:
                if worker.frozen and worker.frozen[-1][2] == float("inf"):
                    worker.thaw()

    def kill(self, worker: Worker) -> Iterator[None]:
        """At any moment, be it while it starts."""
        self.done["kill"] += 1
        self.killed.add(worker.process.pid)
        worker.process.kill()
        worker.end()
        yield from self.pause(0.3)
        worker.start()
        yield from self.pause(1.0)

    def stop_briefly(self, worker: Worker) -> Iterator[None]:
        """For less than what makes it dead."""
        self.done["stop briefly"] += 1
        worker.freeze()
        yield from self.pause(SHORTEST_DEATH_S / 3)
        worker.thaw()

    def stop_for_long(self, worker: Worker) -> Iterator[None]:
        """Until the others have given it up; then it learns that, and ends."""
        deadline = monotonic() + BOUND_S
        before = self._incarnation(worker)
        while before is None:  # it is just starting
            assert monotonic() < deadline, f"seed {SEED}: {worker.name} did not join"
            yield
            before = self._incarnation(worker)
        self.done["stop for long"] += 1
        since = monotonic()
        worker.freeze()
        while before not in self.dead:
            assert monotonic() < since + BOUND_S, f"seed {SEED}: {worker.name} stands still, and nobody says so"
            yield
        # It may have been under suspicion already: since it was stopped briefly.
        assert monotonic() - since >= SHORTEST_DEATH_S * 2 / 3, f"seed {SEED}: {worker.name} was given up too early"
        yield from self.pause(0.5)
        worker.thaw()
        since = monotonic()
        while worker.running:
            assert monotonic() < since + BOUND_S, f"seed {SEED}: {worker.name} was expelled, and does not end"
            yield
        worker.finish("expelled")
        worker.start()

    def _incarnation(self, worker: Worker) -> str | None:
        try:
            peer = runtime_of(self.node).peer(worker.name)
        except farcall.errors.UnknownWorker:
            return None
        incarnation = incarnation_text(peer.incarnation)
        # That of a process before this one may not be known to be dead yet.
        is_present = lives(self.directory).get(incarnation) == worker.process.pid
        return incarnation if is_present and not peer.broken and incarnation not in self.dead else None

    def pause(self, longest_s: float) -> Iterator[None]:
        until = monotonic() + self.source.uniform(0.0, longest_s)
        while monotonic() < until:
            yield


@contextmanager
def soak(directory: str) -> Iterator[Soak]:
    url = temporary_file_url()
    here = journal(directory)
    node = farcall.Node(NAMES[0], 0, options=farcall.RpcBackendOptions(init_method=url, **OPTIONS))
    node.start()
    note_life(node)
    workers = [Worker(rank, url, directory) for rank in range(1, len(NAMES))]
    try:
        wait_until(lambda: len(node.workers()) == len(NAMES), "not all have come")
        yield Soak(node, workers, Path(directory))
    finally:
        Path(directory, "stop").touch()
        Path(directory, "leave").touch()
        for worker in workers:
            worker.end()
        node.shutdown(graceful=False)
        here.close()


def held() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    return len(descriptors()), len(segments())


@pytest.mark.timeout(DURATION_S + 600)
def test_calls_end_truthfully_whoever_is_killed_or_stopped(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with soak(directory) as found:
        node = found.node
        stop = tmp_path / "stop"
        for name in NAMES[1:]:
            node.rpc_sync(name, double, (f"first.{name}", torch.ones(300_000)))
        held_before = held()
        threads = start_load([node], LOAD, stop.exists)
        found.run()
        wait_until(lambda: len(node.workers()) == len(NAMES), "not all have come back")
        stop.touch()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), f"seed {SEED}: a call does not end"
        wait_until(
            lambda: all(Path(directory, f"idle-{worker.process.pid}").exists() for worker in found.workers),
            "a worker's calls do not end",
        )
        for name in NAMES[1:]:
            assert node.rpc_sync(name, execute, (f"last.{name}",)) == f"last.{name}"
        # Nothing is kept of the many that came and went. (Memory for sending is trimmed after a while.)
        wait_until(lambda: held() <= held_before, f"{held()} descriptors and mappings, {held_before} before")
        Path(directory, "leave").touch()
        for worker in found.workers:
            worker.finish("stayed")
        check(tmp_path, found)


def check(directory: Path, found: Soak) -> None:
    """Read the journals."""
    ran, lived = executed(directory), lives(directory)
    twice = [call_id for call_id, count in ran.items() if count > 1]
    assert not twice, f"seed {SEED}: executed more than once: {twice[:5]}"
    frozen = defaultdict(list)
    for worker in found.workers:
        for pid, since, until in worker.frozen:
            frozen[pid].append((since, until))
    stayed = {os.getpid(), *(worker.process.pid for worker in found.workers)}
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for call in calls(directory):
        is_of_one_that_stayed = call.pid in stayed
        if call.ended_at is None:
            if is_of_one_that_stayed:
                wrong.append(f"never ended: {call}")
            continue
        took_s = call.ended_at - call.begun_at
        took_s -= sum(max(0.0, min(call.ended_at, b) - max(call.begun_at, a)) for a, b in frozen[call.pid])
        outcome, times = call.outcome, ran[call.call_id]
        outcomes[f"{outcome.error} {outcome.delivery}".strip() or "result"] += 1
        if took_s > call.bound_s + LATE_S:
            wrong.append(f"too late: ran {times}, took {took_s:.2f} s: {call}")
        if problem := untruth(call, times, is_of_one_that_stayed):
            wrong.append(f"{problem}: ran {times}: {call}")
        # To one that was expelled all others are gone, before it knows why.
        if is_of_one_that_stayed and lived.get(outcome.incarnation) in stayed:
            wrong.append(f"it lives: {call}")
    assert not wrong, f"seed {SEED}: {len(wrong)} of {outcomes.total()}: " + "\n".join(wrong[:10])
    print(f"seed {SEED}: {dict(found.done)}; {dict(outcomes)}")
    assert outcomes["result"] > 20
    assert found.done["kill"]
    assert found.done["stop briefly"]
    assert found.done["stop for long"]
    assert any(name.startswith("PeerDead") for name in outcomes)
