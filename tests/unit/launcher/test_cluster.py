"""What people read while they wait for workers."""

from __future__ import annotations

from farcall.launcher.cluster import status_of
from farcall.launcher.engine import ProcessState
from farcall.launcher.lives import Event, Restarts
from farcall.launcher.supervisor import Supervised


def workers(size: int, running: int) -> list[Supervised]:
    made = [Supervised(f"worker{rank}", rank, Restarts()) for rank in range(size)]
    for one in made[:running]:
        one.life.handle(Event.JOINED, 0.0)
        one.life.handle(Event.PREPARED, 0.0)
    return made


def test_the_bar_names_the_first_that_is_missing() -> None:
    found = workers(4, running=1)
    found[1].process = ProcessState("queued", "pending in Slurm: Priority")
    assert status_of(found) == "[#####...............] 1 of 4 workers run; worker1: pending in Slurm: Priority"
    found[1].process = ProcessState("running", "srun on node7")
    assert status_of(found).endswith("worker1: joining, srun on node7")
    found[1].life.handle(Event.JOINED, 0.0)
    assert status_of(found) == "[#####...............] 1 of 4 workers run; worker1: preparing"


def test_the_bar_is_full_at_the_end() -> None:
    assert status_of(workers(3, running=3)) == "[####################] 3 of 3 workers run"
