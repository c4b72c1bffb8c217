"""Groups without a fixed size: members join and leave while the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
import torch

import farcall
from farcall import api
from farcall.errors import BadRank, DuplicateName
from farcall.testing.cluster import finish, free_port, start_processes, temporary_file_url

BOUND_S = 30.0


def wait_until(condition: Callable[[], Any], bound_s: float = BOUND_S) -> None:
    deadline = monotonic() + bound_s
    while not condition():
        assert monotonic() < deadline, "it did not come true in time"
        sleep(0.005)


@pytest.fixture
def url() -> str:
    return temporary_file_url()


def member(name: str, rank: int, url: str, **options: Any) -> farcall.Node:
    return farcall.Node(name, rank, options=farcall.RpcBackendOptions(init_method=url, **options))


def names(node: farcall.Node) -> list[str]:
    return [info.name for info in node.workers()]


@contextmanager
def team(size: int, url: str, **options: Any) -> Iterator[list[farcall.Node]]:
    """``size`` members in this process, one after the other."""
    with ExitStack() as stack:
        nodes = [member(f"w{rank}", rank, url, **options) for rank in range(size)]
        for node in nodes:
            node.start()
            stack.callback(node.shutdown, False)
        yield nodes


def test_members_join_call_and_leave(url: str) -> None:
    with team(3, url) as nodes:
        for node in nodes:
            wait_until(lambda node=node: names(node) == ["w0", "w1", "w2"])
            for to in ("w0", "w1", "w2"):
                assert node.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
        nodes[1].shutdown()
        for node in (nodes[0], nodes[2]):
            wait_until(lambda node=node: names(node) == ["w0", "w2"])
        assert nodes[0].rpc_sync("w2", int, ("7",)) == 7


def test_rank_0_leaves_and_the_others_go_on(url: str) -> None:
    with team(3, url) as nodes:
        nodes[0].shutdown()
        wait_until(lambda: names(nodes[1]) == ["w1", "w2"])
        assert nodes[1].rpc_sync("w2", int, ("7",)) == 7
        late = member("late", 7, url)
        with late:
            assert late.rpc_sync("w1", int, ("8",)) == 8
            wait_until(lambda: "late" in names(nodes[2]))
            assert nodes[2].rpc_sync("late", int, ("9",)) == 9


def test_a_taken_name_and_a_taken_rank_are_refused(url: str) -> None:
    with team(2, url) as nodes:
        with pytest.raises(DuplicateName, match="w1"):
            member("w1", 5, url).start()
        with pytest.raises(BadRank, match="rank 1"):
            member("other", 1, url).start()
        assert nodes[0].rpc_sync("w1", int, ("7",)) == 7


def _all_meet(rank: int, url: str, size: int) -> list[str]:
    farcall.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=farcall.RpcBackendOptions(init_method=url))
    node = api.current_node()
    wait_until(lambda: len(node.workers()) == size)
    farcall.rpc_sync(f"w{(rank + 1) % size}", int, ("7",))
    api._barrier([f"w{other}" for other in range(size)])
    farcall.shutdown()
    return [info.name for info in node.workers()]


def test_processes_that_start_together_found_one_group_at_the_store_of_rank_0() -> None:
    finish(start_processes(4, _all_meet, f"tcp://127.0.0.1:{free_port()}", 4), BOUND_S)


def test_processes_that_start_together_found_one_group_at_a_file(url: str) -> None:
    finish(start_processes(4, _all_meet, url, 4), BOUND_S)
