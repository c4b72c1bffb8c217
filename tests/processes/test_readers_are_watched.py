"""User code that a reading thread runs unseen (chains that torch makes in C++, unpickling) stops nobody else."""

from __future__ import annotations

import threading
from typing import Any

import torch

import farcall
from farcall.testing.cluster import run_cluster

released = threading.Event()


def nothing() -> None:
    pass


def wait_a_little() -> None:
    threading.Event().wait(0.05)


class SlowToRebuild:
    """Rebuilding it takes until another call was answered."""

    def __reduce__(self) -> Any:
        return _rebuild, ()


def _rebuild() -> str:
    assert released.wait(30)
    return "rebuilt"


def make_slow() -> SlowToRebuild:
    return SlowToRebuild()


def chains(rank: int) -> None:
    if rank:
        return
    farcall.rpc_sync("w1", nothing)
    entered = threading.Event()
    go_on = threading.Event()

    def block(_: Any) -> None:
        entered.set()
        assert go_on.wait(30)

    blocked = torch.futures.collect_all([farcall.rpc_async("w1", wait_a_little)]).then(block)
    assert entered.wait(30)
    farcall.rpc_sync("w1", nothing, timeout=20)  # while the callback sits on the thread that read the answer
    go_on.set()
    blocked.wait()
    # A callback that waits the way torch does it, deaf to us.
    chained = torch.futures.collect_all([farcall.rpc_async("w1", wait_a_little)]).then(
        lambda _: torch.futures.wait_all([farcall.rpc_async("w1", nothing, timeout=20)])
    )
    chained.wait()


def test_callbacks_behind_chains_of_torch_block_nobody() -> None:
    run_cluster(2, chains)


def rebuild_slowly(rank: int) -> Any:
    if rank:
        return None
    slow = farcall.rpc_async("w1", make_slow, timeout=60)
    farcall.rpc_sync("w1", nothing, timeout=20)
    released.set()
    return slow.wait()


def test_a_result_that_is_slow_to_rebuild_blocks_nobody() -> None:
    assert run_cluster(2, rebuild_slowly)[0] == "rebuilt"
