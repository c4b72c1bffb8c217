"""A reader that does not read: its sender's memory stays bounded, and its sender gets its timeout."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ports import held_port
from tests.kit.stopping import stop
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.core.contract import Traffic
from farcall.errors import RpcTimeout
from farcall.options import LimitOptions, MembershipOptions, MemoryOptions
from farcall.testing.cluster import finish, start_processes

LIMIT_BYTES = 4 << 20
BLOB = bytes(60 * 1024)  # small enough to be queued, not written by its own thread


def options(port: int, **more: Any) -> farcall.RpcBackendOptions:
    return farcall.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        limits=LimitOptions(send_backlog_limit_bytes=LIMIT_BYTES),
        membership=MembershipOptions(suspicion_s=600.0),  # the frozen are not to be dead
        **more,
    )


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def traffic() -> Traffic:
    return api.current_runtime().links.peers.remotes[1].link.traffic


def queued_bytes() -> int:
    return traffic().unsent_bytes


def swallow(blob: object) -> int:
    return len(blob)  # type: ignore[arg-type]


most_seen: list[int] = [0]


def flood() -> None:
    for _ in range(20_000):  # 1.2 GB, if nobody stopped it
        started = time.monotonic()
        future = farcall.rpc_async("w1", swallow, (BLOB,), timeout=1.0)
        most_seen.append(queued_bytes())
        if time.monotonic() - started > 0.9:
            future.wait()  # it had to wait for room, and that took too long


def flood_a_frozen_one(rank: int, port: int, transports: tuple[str, ...], with_pieces: bool) -> tuple[int, int, float]:
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=options(port, transports=transports, memory=MemoryOptions(shared_memory=False)),
    )
    grown = most_queued = 0
    took = 0.0
    if rank == 0:
        victim = farcall.rpc_sync("w1", os.getpid)
        assert farcall.rpc_sync("w1", swallow, (BLOB,)) == len(BLOB)
        before = memory_bytes()
        stop(victim)
        writer = threading.Thread(target=send_much)
        if with_pieces:
            # Another thread sits in the middle of a large message and holds the link meanwhile.
            sent = traffic().sent_bytes
            writer.start()
            wait_until(lambda: traffic().sent_bytes > sent + len(BLOB))
        started = time.monotonic()
        with pytest.raises((RpcTimeout, RuntimeError), match=r"does not read|in time|timeout"):
            flood()
        most_queued = max(most_seen)
        took = time.monotonic() - started
        queued = queued_bytes()
        for _ in range(50):
            with pytest.raises((RpcTimeout, RuntimeError)):
                farcall.rpc_async("w1", swallow, (BLOB,), timeout=0.005).wait()
        # What was given up leaves nothing behind; that somebody asks after the frozen one now and then is small.
        assert queued_bytes() - queued < len(BLOB)
        grown = memory_bytes() - before
        os.kill(victim, signal.SIGCONT)
        if with_pieces:
            writer.join()
        # Whatever was queued goes out, and the link is as good as before.
        assert farcall.rpc_sync("w1", swallow, (BLOB,), timeout=LONG_S) == len(BLOB)
    farcall.shutdown()
    return grown, most_queued, took


def send_much() -> None:
    assert farcall.rpc_sync("w1", swallow, (torch.zeros(32 << 20, dtype=torch.uint8),), timeout=LONG_S) == 32 << 20


@pytest.mark.parametrize("with_pieces", [False, True])
@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_frozen_reader_bounds_the_sender(transports: tuple[str, ...], with_pieces: bool) -> None:
    members = start_processes(2, flood_a_frozen_one, held_port(), transports, with_pieces)
    grown, most_queued, took = finish(members)[0]
    large = (32 << 20) if with_pieces else 0
    assert most_queued <= large + LIMIT_BYTES + (4 << 20)
    assert grown < large + LIMIT_BYTES + (64 << 20)
    assert took < AT_ONCE_S


def read_slowly(rank: int, port: int) -> int:
    """The reader reads, in bursts: each burst makes room for a little, not for another whole backlog."""
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=options(port, transports=("tcp",), memory=MemoryOptions(shared_memory=False)),
    )
    most_queued = 0
    if rank == 0:
        victim = farcall.rpc_sync("w1", os.getpid)
        ended = threading.Event()

        def freeze_and_thaw() -> None:
            while not ended.is_set():
                os.kill(victim, signal.SIGSTOP)
                ended.wait(0.02)
                answered = traffic().frames
                os.kill(victim, signal.SIGCONT)
                ended.wait(0.001)
                # On a busy machine it would never have its turn otherwise.
                wait_until(lambda: ended.is_set() or traffic().frames > answered)  # noqa: B023

        thread = threading.Thread(target=freeze_and_thaw)
        thread.start()
        futures = []
        for _ in range(1000):  # 60 MB
            futures.append(farcall.rpc_async("w1", swallow, (BLOB,), timeout=4 * LONG_S))
            most_queued = max(most_queued, queued_bytes())
        ended.set()
        thread.join()
        assert {future.wait() for future in futures} == {len(BLOB)}
    farcall.shutdown()
    return most_queued


def test_slow_reader_bounds_the_sender_all_the_time() -> None:
    assert finish(start_processes(2, read_slowly, held_port()))[0] <= LIMIT_BYTES + (4 << 20)


def one_gets_stuck(rank: int, port: int) -> bool:
    """Two peers of one sender: that one of them is frozen must not hold up the other."""
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=3,
        rpc_backend_options=options(port, memory=MemoryOptions(shared_memory=False)),
    )
    if rank == 0:
        victim = farcall.rpc_sync("w1", os.getpid)
        stop(victim)
        sent = traffic().sent_bytes
        threads = [threading.Thread(target=send_much) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: traffic().sent_bytes > sent + len(BLOB))
        started = time.monotonic()
        for number in range(100):
            assert farcall.rpc_sync("w2", max, (number, -1), timeout=LONG_S) == number
        seconds = time.monotonic() - started
        os.kill(victim, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert seconds < AT_ONCE_S
    farcall.shutdown()
    return True


def test_frozen_reader_does_not_hold_up_the_others() -> None:
    assert all(finish(start_processes(3, one_gets_stuck, held_port())))
