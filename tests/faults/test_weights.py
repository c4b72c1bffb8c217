"""Publishers and subscribers killed at any moment: nobody ever reads half a version, and the others go on.

The processes write down what they did, a line at a time. A trainer pushes as fast as it can, so that a kill mostly
falls into a push; a rollout worker loads as fast as it can, so that a kill mostly falls into a load.

``FARCALL_ROUNDS=1000`` makes so many rounds, in pieces of fifty that can be run one by one (``-k piece-7``); with
``FARCALL_SEED`` they are other ones. Each piece records its rounds and the longest wait of any call that a death could
have held up, as properties of the test; `benchmarks/weights.py` prints both.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import pytest
import torch
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import Superseded
from farcall.testing.cluster import WorkerProcess, temporary_file_url

ROUNDS = int(os.environ.get("FARCALL_ROUNDS", "1000" if os.environ.get("FARCALL_SOAK") == "full" else "5"))
PIECE_ROUNDS = 50
PIECES = [min(PIECE_ROUNDS, ROUNDS - made) for made in range(0, ROUNDS, PIECE_ROUNDS)]
SEED = int(os.environ.get("FARCALL_SEED", "1"))
ROLLOUTS = 2
TENSORS = 12
NUMEL = 1 << 18
SLOWEST_S = 2 * LONG_S

T = TypeVar("T")


class Journal:
    """A file of one process: lines written by it are there, whatever becomes of it.

    One that comes to nothing leaves the stacks of its threads there.
    """

    def __init__(self, folder: str, role: str) -> None:
        self._file = os.open(f"{folder}/{role}-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        faulthandler.dump_traceback_later(0.9 * SLOWEST_S, file=self._file)
        self._longest_s = 0.0

    def note(self, *words: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def timed(self, call: Callable[[], T]) -> T:
        """Make a call, and note how long it took if none took longer."""
        began = monotonic()
        result = call()
        took_s = monotonic() - began
        if took_s > self._longest_s:
            self._longest_s = took_s
            self.note("longest", took_s)
        return result


def lines(folder: Path, process: WorkerProcess) -> list[str]:
    return [line for path in folder.glob(f"*-{process.pid}") for line in path.read_text().splitlines()]


def member(name: str, rank: int, url: str) -> farcall.Node:
    return farcall.Node(name, rank, options=farcall.RpcBackendOptions(init_method=url))


def values() -> dict[str, torch.Tensor]:
    return {f"layers.{index}": torch.zeros(NUMEL) for index in range(TENSORS)}


def train(name: str, rank: int, url: str, folder: str) -> None:
    """Push until killed, or replaced. All elements of a version are its number."""
    torch.set_num_threads(1)
    journal = Journal(folder, "trainer")
    with member(name, rank, url) as node:
        weights = values()
        publication = journal.timed(lambda: node.publish("policy", weights))
        number = publication.machine.number
        journal.note("published", publication.machine.claim.epoch, number)
        try:
            while True:
                number += 1
                for tensor in weights.values():
                    tensor.fill_(number)
                assert journal.timed(publication.push).number == number
                journal.note("pushed", number, monotonic())
        except Superseded:
            journal.note("superseded")


def roll_out(name: str, rank: int, url: str, folder: str) -> None:
    """Load each newest version until killed, and look at every element; hold some versions for a while."""
    torch.set_num_threads(1)
    journal = Journal(folder, "rollout")
    source = random.Random(rank)
    held: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=2)
    with member(name, rank, url) as node:
        subscription = node.subscribe("policy")
        journal.note("subscribed", monotonic())
        model = values()
        version = None
        while True:
            newest = subscription.wait(newer_than=version, timeout=SLOWEST_S)
            assert version is None or newest > version
            version = journal.timed(lambda: subscription.load_into(model))
            at = monotonic()
            found = {tensor[index].item() for tensor in model.values() for index in (0, NUMEL // 2, -1)}
            whole = all(tensor.eq(version.number).all() for tensor in model.values())
            journal.note("loaded" if whole else "TORN", version, at, sorted(found))
            if source.random() < 0.3:
                tensors = journal.timed(subscription.get)
                held.append((int(tensors["layers.0"][0]), tensors))
            for number, tensors in held:
                if not all(tensor.eq(number).all() for tensor in tensors.values()):
                    journal.note("TORN", "held", number)


@pytest.fixture
def judge() -> Iterator[tuple[farcall.Node, str]]:
    """A member that stays, so that others have somebody to join."""
    url = temporary_file_url()
    with member("judge", 0, url) as node:
        yield node, url


@pytest.mark.timeout(300 + 60 * PIECE_ROUNDS)
@pytest.mark.parametrize("piece", range(len(PIECES)), ids=lambda piece: f"piece-{piece}")
def test_no_version_is_torn_by_deaths(
    tmp_path: Path,
    judge: tuple[farcall.Node, str],
    record_property: Callable[[str, object], None],
    piece: int,
) -> None:
    source, rounds = random.Random(SEED + piece), PIECES[piece]
    _, url = judge
    ranks = iter(range(1, 10**6))
    running: list[WorkerProcess] = []
    longest_s = 0.0  # that a call of a process took, or the first version of a new trainer on its way

    def start(role: object, name: str) -> WorkerProcess:
        rank = next(ranks)
        process = WorkerProcess(rank, role, (f"{name}-{rank}", rank, url, str(tmp_path)))  # type: ignore[arg-type]
        running.append(process)
        return process

    def end(process: WorkerProcess) -> None:
        running.remove(process)
        process.end()

    def journal(process: WorkerProcess) -> list[str]:
        found = lines(tmp_path, process)
        torn = [line for line in found if line.startswith("TORN")]
        assert not torn, torn
        if not process.process.is_alive():
            process.collect(monotonic() + LONG_S)
            raise AssertionError(f"{process.pid} ended by itself after {found[-3:]}: {process.error}")
        return found

    def all_go_on() -> None:
        """Every subscriber loads versions of the present trainer, or later ones."""
        nonlocal longest_s
        pushed_at = float(wait_for("pushed", trainer)[2])
        epoch = wait_for("published", trainer)[1]
        for rollout in rollouts:
            loaded_at = float(wait_for(f"loaded {epoch}.", rollout)[2])
            if float(wait_for("subscribed", rollout)[1]) < pushed_at:
                longest_s = max(longest_s, loaded_at - pushed_at)
        for process in (trainer, *rollouts):
            took_s = [float(line.split()[1]) for line in journal(process) if line.startswith("longest")]
            longest_s = max(longest_s, *took_s)

    def wait_for(what: str, process: WorkerProcess) -> list[str]:
        """The words of the first such line."""
        try:
            wait_until(lambda: any(line.startswith(what) for line in journal(process)), what, SLOWEST_S)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *journal(process)[-60:]])) from error
        return next(line.split() for line in journal(process) if line.startswith(what))

    trainer = start(train, "trainer")
    rollouts = [start(roll_out, "rollout") for _ in range(ROLLOUTS)]
    try:
        for _ in range(rounds):
            all_go_on()
            sleep(source.random() * 0.03)  # a kill at any moment
            what = source.choice(["trainer", "rollout", "takeover"])
            if what == "rollout":
                index = source.randrange(ROLLOUTS)
                end(rollouts[index])
                rollouts[index] = start(roll_out, "rollout")
            elif what == "trainer":
                end(trainer)
                trainer = start(train, "trainer")
            else:
                before, trainer = trainer, start(train, "trainer")
                wait_until(lambda: "superseded" in lines(tmp_path, before), "the old trainer's end", SLOWEST_S)  # noqa: B023
                before.process.join(SLOWEST_S)
                assert before.process.exitcode == 0
                end(before)
            for path in tmp_path.glob("*"):  # of those that are gone
                if not any(path.name.endswith(f"-{process.pid}") for process in (trainer, *rollouts)):
                    path.unlink()
        all_go_on()
        record_property("rounds", rounds)
        record_property("longest_wait_s", longest_s)
    finally:
        for process in list(running):
            end(process)
