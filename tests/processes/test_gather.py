"""All-gather and barrier between real processes, and several nodes in one process."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed
from tests.kit.ports import tcp_url
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate, add, whoami

import farcall
from farcall.errors import PeerDead, RpcError, RpcTimeout
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import finish, run_cluster, start_cluster

PATIENCE_S = 30.0


def gather_all(rank: int) -> None:
    everyone = {f"w{other}" for other in range(4)}
    for turn in range(20):
        got = farcall.all_gather((rank, turn))
        assert got == {f"w{other}": (other, turn) for other in range(4)}
        assert list(got) == sorted(everyone)
    tensors = farcall.all_gather(torch.full((50_000,), rank))
    assert [int(tensors[f"w{other}"][-1]) for other in range(4)] == [0, 1, 2, 3]
    # Subgroups go on independently of each other, whatever the order of their names.
    mine = ["w2", "w0"] if rank % 2 == 0 else ["w3", "w1"]
    for turn in range(10 + rank % 2):
        assert farcall.all_gather(turn, mine) == dict.fromkeys(mine, turn)
    for _ in range(5):
        farcall.barrier(everyone)
    farcall.barrier(mine)
    farcall.barrier([farcall.worker(name) for name in mine])  # as handles, ranks and the like name them, too
    farcall.barrier([farcall.get_worker_info(name) for name in mine])
    farcall.barrier([int(name[1:]) for name in mine])
    assert farcall.all_gather(rank, [f"w{rank}"]) == {f"w{rank}": rank}
    with pytest.raises(RpcError, match=f"w{rank} is not one"):
        farcall.all_gather(rank, everyone - {f"w{rank}"})
    with pytest.raises(RpcError, match="stranger"):
        farcall.all_gather(rank, [f"w{rank}", "stranger"])
    assert farcall.all_gather(rank) == {f"w{other}": other for other in range(4)}


def test_gathers_and_barriers_of_all_and_of_some() -> None:
    run_cluster(4, gather_all)


class Dispatcher:
    """A barrier must not open before the last one came."""

    count = 0
    lock = threading.Lock()

    @classmethod
    def arrive(cls) -> None:
        with cls.lock:
            cls.count += 1

    @classmethod
    def seen(cls) -> int:
        return cls.count


def meet(rank: int) -> None:
    names = ["w0", "w1", "w2"]
    for turn in range(1, 11):
        farcall.rpc_sync("w0", Dispatcher.arrive)
        farcall.barrier(names)
        assert farcall.rpc_sync("w0", Dispatcher.seen) >= 3 * turn


def test_a_barrier_waits_for_the_last() -> None:
    run_cluster(3, meet)


def miss_one(rank: int) -> None:
    if rank < 2:
        farcall.barrier(["w0", "w1"])  # or one of these would be missing, too, on a busy machine
        with pytest.raises(RpcTimeout, match="missing: w2"):
            farcall.all_gather(rank, timeout=8.0)
        if rank == 0:
            Gate.open("timed out")
    else:
        farcall.rpc_sync("w0", Gate.wait, ("timed out",))
        # Too late for that one: told at once, and whom it was that came late.
        with pytest.raises(RpcTimeout, match="missing: w2"):
            farcall.all_gather(rank, timeout=PATIENCE_S)
    assert farcall.all_gather(rank, timeout=PATIENCE_S) == {"w0": 0, "w1": 1, "w2": 2}


def test_a_gather_that_times_out_names_who_is_missing() -> None:
    run_cluster(3, miss_one)


def lose_one(rank: int) -> str | None:
    if rank == 2:
        farcall.rpc_sync("w0", Gate.wait, ("begun",))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        # On another thread, so that this one can see that it has begun.
        failures: list[BaseException] = []

        def take_part() -> None:
            try:
                farcall.all_gather(rank, timeout=PATIENCE_S)
            except PeerDead as error:
                failures.append(error)

        thread = threading.Thread(target=take_part)
        thread.start()
        farcall.rpc_sync("w1", Gate.wait, ("w1 begins",))
        Gate.open("begun")
        thread.join()
        assert "w2" in str(failures[0]).partition("missing: ")[2]
    else:
        Gate.open("w1 begins")
        with pytest.raises(PeerDead, match=r"missing: .*w2"):
            farcall.all_gather(rank, timeout=PATIENCE_S)
    # Begun after the death: it cannot end well, and says so at once.
    with pytest.raises(PeerDead, match=r"missing: .*w2"):
        farcall.all_gather(rank, timeout=PATIENCE_S)
    assert farcall.all_gather(rank, ["w0", "w1"], timeout=PATIENCE_S) == {"w0": 0, "w1": 1}
    return "survived"


def test_a_death_in_the_middle_of_a_gather() -> None:
    members = start_cluster(3, lose_one)
    assert finish(members, may_fail=[2])[:2] == ["survived", "survived"]


def lose_the_leader(rank: int) -> str | None:
    if rank == 0:
        farcall.rpc_sync("w1", Gate.wait, ("waiting",))
        os.kill(os.getpid(), signal.SIGKILL)
    Gate.open("waiting")
    with pytest.raises(PeerDead, match="w0"):
        farcall.barrier(["w0", "w1"])
    return "survived"


def test_the_death_of_the_leader() -> None:
    assert finish(start_cluster(2, lose_the_leader), may_fail=[0])[1] == "survived"


# ---------------------------------------------------------------------- several nodes in one process


def started_nodes(count: int) -> list[farcall.Node]:
    """Nodes that start together: each start waits for the others, so each has a thread."""
    options = farcall.RpcBackendOptions(init_method=tcp_url())
    nodes = [farcall.Node(f"n{rank}", rank, count, options) for rank in range(count)]
    in_threads([node.start for node in nodes])
    return nodes


def in_threads(functions: list[Any]) -> None:
    failures: list[BaseException] = []

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def ask(worker: str) -> str:
    return farcall.rpc_sync(worker, whoami)


def test_two_nodes_in_one_process() -> None:
    first, second = started_nodes(2)
    assert first.get_worker_info() == farcall.WorkerInfo("n0", 0)
    assert first.get_worker_info("n1") == second.get_worker_info()
    for node, other in ((first, "n1"), (second, "n0")):
        assert node.rpc_sync(other, whoami) == other
        assert node.rpc_async(other, add, (1,), {"right": 2}).wait() == 3
        # Inside a function, the module's own calls come from the node that serves it.
        assert node.rpc_sync(other, ask, (node.get_worker_info().name,)) == node.get_worker_info().name
        assert float(node.rpc_sync(other, torch.sum, (torch.ones(100_000),))) == 100_000
    gathered: dict[str, Any] = {}
    in_threads(
        [
            lambda node=node: gathered.update({node.get_worker_info().name: node.all_gather(node.get_worker_info().id)})  # type: ignore[misc]
            for node in (first, second)
        ]
    )
    assert gathered == {"n0": {"n0": 0, "n1": 1}, "n1": {"n0": 0, "n1": 1}}
    in_threads([first.barrier, second.barrier])
    in_threads([first.shutdown, second.shutdown])
    with pytest.raises(farcall.errors.NotInitialized, match="n0"):
        first.rpc_sync("n1", whoami)


def test_one_of_two_nodes_leaves_at_once() -> None:
    first, second = started_nodes(2)
    pending = first.rpc_async("n1", Gate.wait, ("of two",), timeout=None)
    wait_until(lambda: runtime_of(second).server.awaited, "the arrival of the call")
    Gate.open("of two")
    assert pending.wait() == "of two"
    second.shutdown(graceful=False)
    with pytest.raises(PeerDead, match="n1"):
        first.rpc_sync("n1", whoami)
    first.shutdown()
