"""A function that closes descriptors which are not its own: the node ends, and says so."""

from __future__ import annotations

import os
from pathlib import Path

from tests.kit.waiting import wait_until

import farcall
from farcall.errors import NotInitialized, PeerDead
from farcall.testing.cluster import finish, start_cluster


def close_everything() -> None:
    os.closerange(3, 4096)


def is_over() -> bool:
    try:
        farcall.rpc_sync("w1", os.getpid, timeout=1.0)
    except NotInitialized as error:
        return "descriptors" in str(error)
    except farcall.errors.RpcError:
        pass
    return False


def lose(rank: int, verdict: str) -> str:
    if rank == 0:
        try:
            farcall.rpc_sync("w1", close_everything)
        except PeerDead:
            return "dead"
        return "alive"
    wait_until(is_over)
    # The pipe to the test is gone, too. And a new file may get a number that the ending node still closes as its own.
    os.symlink("over", verdict)
    os._exit(0)


def test_a_node_whose_descriptors_were_closed_ends_truthfully(tmp_path: Path) -> None:
    """It used to stay "running", and answered nobody."""
    verdict = tmp_path / "verdict"
    assert finish(start_cluster(2, lose, str(verdict)), may_fail=(1,))[0] == "dead"
    assert os.readlink(verdict) == "over"
