"""torch's number of threads that a program sets holds in every thread that runs functions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.runtime.calls.executor import BRIEF_S

PROGRAM = """
import os
import torch
import farcall

def tasks():
    return len(os.listdir("/proc/self/task"))

def more_tasks(matrix):
    before = tasks()
    matrix @ matrix
    return tasks() - before

torch.set_num_threads(1)
farcall.init_rpc("alone", rank=0, world_size=1)
print(farcall.rpc_sync("alone", more_tasks, args=(torch.ones(600, 600),)))
farcall.shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that the kernel knows")
def test_a_number_set_at_the_start_leaves_products_without_a_team(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program],
        env={"OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    before = torch.get_num_threads()
    try:
        with team([None, None]) as made:
            yield made
    finally:
        torch.set_num_threads(before)


def where() -> tuple[str, int]:
    return threading.current_thread().name, torch.get_num_threads()


def where_long() -> tuple[str, int]:
    time.sleep(BRIEF_S)  # too long for the I/O thread
    return where()


async def where_async() -> tuple[str, int]:
    return where()


def on_each_kind(node: farcall.Node) -> dict[str, int]:
    """The number on the I/O thread, a worker and the event loop of the other node."""
    kinds = ("farcall-io", "farcall-worker", "farcall-asyncio")
    found: dict[str, int] = {}

    def has_all() -> bool:
        for function in (where, where_long, where_async):
            name, number = node.rpc_sync(1, function)
            found.update({kind: number for kind in kinds if name.startswith(kind)})
        return len(found) == len(kinds)

    wait_until(has_all)
    return found


def test_a_change_holds_in_threads_that_have_computed(nodes: list[farcall.Node]) -> None:
    for number in (3, 1, 2):
        torch.set_num_threads(number)
        assert set(on_each_kind(nodes[0]).values()) == {number}


def test_a_function_changes_it_as_well(nodes: list[farcall.Node]) -> None:
    on_each_kind(nodes[0])
    nodes[0].rpc_sync(1, torch.set_num_threads, args=(3,))
    assert set(on_each_kind(nodes[0]).values()) == {3}


def test_a_thread_of_others_sets_its_own(nodes: list[farcall.Node]) -> None:
    """As the one of a DataLoader that pins memory does."""
    torch.set_num_threads(2)
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
    assert set(on_each_kind(nodes[0]).values()) == {2}


def test_torch_has_its_own_function_back_after_the_last_node() -> None:
    before = torch.set_num_threads
    with team([None, None]):
        assert torch.set_num_threads is not before
    assert torch.set_num_threads is before
