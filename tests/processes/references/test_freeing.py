"""References between real processes: what is dropped everywhere is freed, soon, and on the right thread."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

from tests.kit.waiting import wait_until
from tests.processes.references.callees import complete, identity, is_kept, kept_future, nothing_is_left

import farcall
from farcall.testing.cluster import (
    run_cluster,
)


def drop_while_it_is_made(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", "w0"):
        farcall.remote(to, kept_future, ("dropped",))
        wait_until(lambda to=to: farcall.rpc_sync(to, is_kept, ("dropped",)))
        value = Canary()
        farcall.rpc_sync(to, complete, ("dropped", value))
    del value
    nothing_is_left(["w0", "w1"])
    for to in ("w1", "w0"):
        wait_until(lambda to=to: farcall.rpc_sync(to, canaries) == 0, "the value is gone")


class Canary:
    """Dies slowly, and says so."""

    alive: ClassVar[weakref.WeakSet[Canary]] = weakref.WeakSet()
    died_on: ClassVar[list[str]] = []

    def __init__(self) -> None:
        Canary.alive.add(self)

    def __setstate__(self, state: object) -> None:
        Canary.alive.add(self)

    def __reduce__(self) -> Any:
        return Canary, ()

    def __del__(self) -> None:
        Canary.died_on.append(threading.current_thread().name)
        time.sleep(0.01)


def canaries() -> int:
    gc.collect()
    return len(Canary.alive)


def death_places() -> list[str]:
    return Canary.died_on


def test_a_value_dropped_while_it_is_made_is_freed() -> None:
    run_cluster(2, drop_while_it_is_made)


def die_on_a_worker(rank: int) -> None:
    if rank == 0:
        for _ in range(5):
            farcall.remote("w1", Canary)
        nothing_is_left(["w1"])
        wait_until(lambda: farcall.rpc_sync("w1", canaries) == 0)
        places = farcall.rpc_sync("w1", death_places)
        assert len(places) == 5
        assert not any("farcall-io" in place for place in places), "user code ran on the I/O thread"


def test_destructors_of_values_do_not_run_on_the_io_thread() -> None:
    run_cluster(2, die_on_a_worker)


def resident_kib() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def make_many(rank: int, count: int) -> None:
    if rank != 0:
        return
    sizes = []
    for _ in range(4):
        for number in range(count):
            rref = farcall.remote("w1", identity, (number,))
        assert rref.to_here() == count - 1
        del rref
        nothing_is_left(["w0", "w1"])
        sizes.append((resident_kib(), farcall.rpc_sync("w1", resident_kib)))
    for end in (0, 1):
        assert sizes[-1][end] - sizes[0][end] < 8 * 1024, sizes


def test_many_references_leave_memory_flat_at_both_ends() -> None:
    run_cluster(2, make_many, 5_000)


def drop_from_threads(rank: int) -> None:
    if rank != 0:
        return
    for _ in range(3):
        rrefs = [farcall.remote("w1", identity, (number,)) for number in range(300)]
        parts = [rrefs[start::3] for start in range(3)]
        del rrefs
        threads = [threading.Thread(target=part.clear) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    nothing_is_left(["w0", "w1"])
    # In cycles, too.
    loop: list[Any] = [farcall.remote("w1", identity, (1,))]
    loop.append(loop)
    del loop
    nothing_is_left(["w0", "w1"])


def test_destructors_on_any_thread() -> None:
    run_cluster(2, drop_from_threads)
