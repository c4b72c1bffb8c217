"""Large messages that do not get through: nothing of the caller's is read too late, and nothing leaks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.kit.stopping import stop
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import PeerDead, RpcTimeout
from farcall.options import MembershipOptions, MemoryOptions
from farcall.testing.cluster import finish, run_cluster, start_cluster
from farcall.testing.faults import Faults

values: list[tuple[float, float]] = []


def note(tensor: torch.Tensor) -> None:
    values.append((tensor.min().item(), tensor.max().item()))


def noted() -> list[tuple[float, float]]:
    return values


def swallow(tensor: torch.Tensor) -> int:
    return tensor.numel()


def give_up_in_the_middle(rank: int) -> None:
    if rank:
        return
    victim = farcall.rpc_sync("w1", os.getpid)
    tensor = torch.zeros(16 << 20)
    stop(victim)
    try:
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", note, (tensor,), timeout=0.5)
        tensor.fill_(7)  # ours again: the call is over
    finally:
        os.kill(victim, signal.SIGCONT)
    # Whether the call ran there or not, it never saw what was written after its end.
    assert set(farcall.rpc_sync("w1", noted)) <= {(0.0, 0.0)}


@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_a_message_given_up_half_way_is_not_torn(transports: tuple[str, ...]) -> None:
    run_cluster(2, give_up_in_the_middle, memory=MemoryOptions(shared_memory=False), transports=transports)


def call_the_dead(rank: int, ready: str) -> None:
    if rank:
        Path(ready).touch()
        time.sleep(10 * LONG_S)  # killed in the middle of it
        return
    pool = api.current_runtime().pool
    assert pool is not None
    tensor = torch.ones(1 << 20)
    for _ in range(3):
        farcall.rpc_sync("w1", swallow, (tensor,))
    os.kill(farcall.rpc_sync("w1", os.getpid), signal.SIGKILL)
    for _ in range(20):
        with pytest.raises(PeerDead):
            farcall.rpc_sync("w1", swallow, (tensor,))
    # The I/O thread, which hears of the death by itself, forgets what was lent.
    wait_until(lambda: pool.live_bytes == 0, "the I/O thread's giving back what was lent")


def test_calls_to_the_dead_leave_no_memory_behind(tmp_path: Path) -> None:
    members = start_cluster(2, call_the_dead, str(tmp_path / "ready"))
    finish(members, may_fail=[1])


def nothing() -> None:
    pass


def give(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes, dtype=torch.uint8)


def test_a_large_message_kills_nobody_and_small_ones_pass_it() -> None:
    """40 MiB at 20 MB/s each way, where a silence of half a second counts as a death."""
    size_bytes = 40 << 20
    answered: list[float] = []
    over = threading.Event()
    events: list[farcall.MemberEvent] = []
    faults = Faults()
    quick = MembershipOptions(probe_interval_s=0.1, probe_timeout_s=0.1, suspicion_s=0.5)
    with (
        team(faults, memory=MemoryOptions(shared_memory=False), membership=quick) as nodes,
        faults.throttle(20e6),
    ):

        def ask() -> None:
            while not over.is_set():
                nodes[0].rpc_sync("w1", nothing)
                answered.append(time.monotonic())

        for node in nodes:
            node.on_member(events.append)
        asker = threading.Thread(target=ask)
        asker.start()
        began = time.monotonic()
        assert nodes[0].rpc_sync("w1", swallow, (give(size_bytes),)) == size_bytes
        between = time.monotonic()
        assert nodes[0].rpc_sync("w1", give, (size_bytes,)).numel() == size_bytes
        ended = time.monotonic()
        over.set()
        asker.join(LONG_S)
    assert between - began > 1.8
    assert ended - between > 1.8
    # A small call waits for what is queued before it, never for a whole message: else there would be two at most.
    assert sum(began < at < between for at in answered) > 2
    assert sum(between < at < ended for at in answered) > 2
    assert "dead" not in [event.kind for event in events]
