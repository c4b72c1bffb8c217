"""Publishers and subscribers killed at any moment: nobody ever reads half a version, and the others go on.

The processes write down what they did, a line at a time. A trainer pushes as fast as it can, so that a kill mostly
falls into a push; a rollout worker loads as fast as it can, so that a kill mostly falls into a load.

``FARCALL_SOAK=full`` makes a thousand rounds, in twenty pieces that can be run one by one (``-k piece-7``); with
``FARCALL_SEED`` they are other ones.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import Superseded
from farcall.testing.cluster import WorkerProcess, temporary_file_url

PIECES, ROUNDS = (20, 50) if os.environ.get("FARCALL_SOAK") == "full" else (1, 5)
SEED = int(os.environ.get("FARCALL_SEED", "1"))
ROLLOUTS = 2
TENSORS = 12
NUMEL = 1 << 18
SLOWEST_S = 2 * LONG_S


class Journal:
    """A file of one process: lines written by it are there, whatever becomes of it.

    One that comes to nothing leaves the stacks of its threads there.
    """

    def __init__(self, folder: str, role: str) -> None:
        self._file = os.open(f"{folder}/{role}-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        faulthandler.dump_traceback_later(0.9 * SLOWEST_S, file=self._file)

    def note(self, *words: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


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
        publication = node.publish("policy", weights)
        number = publication.machine.number
        journal.note("published", publication.machine.claim.epoch, number)
        try:
            while True:
                number += 1
                for tensor in weights.values():
                    tensor.fill_(number)
                assert publication.push().number == number
                journal.note("pushed", number)
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
        model = values()
        version = None
        while True:
            newest = subscription.wait(newer_than=version, timeout=SLOWEST_S)
            assert version is None or newest > version
            version = subscription.load_into(model)
            found = {tensor[at].item() for tensor in model.values() for at in (0, NUMEL // 2, -1)}
            whole = all(tensor.eq(version.number).all() for tensor in model.values())
            journal.note("loaded" if whole else "TORN", version, sorted(found))
            if source.random() < 0.3:
                tensors = subscription.get()
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


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("seed", range(SEED, SEED + PIECES), ids=[f"piece-{piece}" for piece in range(PIECES)])
def test_no_version_is_torn_by_deaths(tmp_path: Path, judge: tuple[farcall.Node, str], seed: int) -> None:
    source = random.Random(seed)
    _, url = judge
    ranks = iter(range(1, 10**6))
    started: list[WorkerProcess] = []

    def start(role: object, name: str) -> WorkerProcess:
        rank = next(ranks)
        process = WorkerProcess(rank, role, (f"{name}-{rank}", rank, url, str(tmp_path)))  # type: ignore[arg-type]
        started.append(process)
        return process

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
        wait_for("pushed", trainer)
        epoch = next(line.split()[1] for line in journal(trainer) if line.startswith("published"))
        for rollout in rollouts:
            wait_for(f"loaded {epoch}.", rollout)

    def wait_for(what: str, process: WorkerProcess) -> None:
        try:
            wait_until(lambda: any(line.startswith(what) for line in journal(process)), what, SLOWEST_S)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *journal(process)[-60:]])) from error

    trainer = start(train, "trainer")
    rollouts = [start(roll_out, "rollout") for _ in range(ROLLOUTS)]
    try:
        for _ in range(ROUNDS):
            all_go_on()
            sleep(source.random() * 0.03)  # a kill at any moment
            what = source.choice(["trainer", "rollout", "takeover"])
            if what == "rollout":
                index = source.randrange(ROLLOUTS)
                rollouts[index].kill()
                rollouts[index].end()
                rollouts[index] = start(roll_out, "rollout")
            elif what == "trainer":
                trainer.kill()
                trainer.end()
                trainer = start(train, "trainer")
            else:
                before, trainer = trainer, start(train, "trainer")
                wait_until(lambda: "superseded" in lines(tmp_path, before), "the old trainer's end", SLOWEST_S)  # noqa: B023
                before.process.join(SLOWEST_S)
                assert before.process.exitcode == 0
                before.end()
            for path in tmp_path.glob("*"):  # of those that are gone
                if not any(path.name.endswith(f"-{process.pid}") for process in (trainer, *rollouts)):
                    path.unlink()
        all_go_on()
    finally:
        for process in (trainer, *rollouts):
            process.end()
