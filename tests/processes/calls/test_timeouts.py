"""Calls between real processes: timeouts, and answers that come after them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import PATIENCE_S, Gate, live_bytes, whoami

import farcall
from farcall.errors import (
    RpcTimeout,
)
from farcall.testing.cluster import run_cluster


def time_out(rank: int) -> None:
    if rank:
        return
    assert farcall.get_rpc_timeout() == 60
    for to in ("w0", "w1"):
        with pytest.raises(RpcTimeout, match=rf"50 ms.*{to}.*Gate\.wait"):
            farcall.rpc_sync(to, Gate.wait, ("per call",), timeout=0.05)
        future = farcall.rpc_async(to, Gate.wait, ("per call",), timeout=0.05)
        with pytest.raises(RpcTimeout, match="50 ms"):
            future.wait()
        assert future.done()
        failed: list[BaseException] = []
        seen = threading.Event()

        def note(done: torch.futures.Future[Any], failed: list[BaseException] = failed, seen: Any = seen) -> None:
            try:
                done.wait()
            except RpcTimeout as error:
                failed.append(error)
            seen.set()

        farcall.rpc_async(to, Gate.wait, ("per call",), timeout=0.05).add_done_callback(note)
        assert seen.wait(PATIENCE_S)
        assert failed
    farcall._set_rpc_timeout(0.05)
    assert farcall.get_rpc_timeout() == 0.05
    with pytest.raises(TimeoutError):
        farcall.rpc_sync("w1", Gate.wait, ("default",))
    with pytest.raises(TimeoutError):
        farcall.rpc_async("w1", Gate.wait, ("default",)).wait()
    # None is no limit: this outlasts others that were started later.
    unlimited = farcall.rpc_async("w1", Gate.wait, ("unlimited",), timeout=None)
    with pytest.raises(TimeoutError):
        farcall.rpc_sync("w1", Gate.wait, ("default",))
    assert not unlimited.done()
    farcall._set_rpc_timeout(None)
    assert farcall.get_rpc_timeout() is None
    farcall.rpc_sync("w1", Gate.open, ("unlimited",))
    assert unlimited.wait() == "unlimited"
    for to in ("w0", "w1"):
        for name in ("per call", "default"):
            farcall.rpc_sync(to, Gate.open, (name,))
    # A near deadline after a far one.
    far = farcall.rpc_async("w1", Gate.wait, ("far",), timeout=PATIENCE_S)
    near = farcall.rpc_async("w1", Gate.wait, ("far",), timeout=0.05)
    with pytest.raises(RpcTimeout):
        near.wait()
    farcall.rpc_sync("w1", Gate.open, ("far",))
    assert far.wait() == "far"


def refuse(rank: int) -> None:
    made = farcall.remote("w0", Gate)
    here = farcall.RRef(1)
    done = farcall.rpc_async("w1", whoami)
    done.wait()
    farcall.publish(f"of {rank}", {"x": torch.ones(1)})
    subscription = farcall.subscribe(f"of {rank}")
    shared = farcall.share(torch.ones(1), writable=True)
    doors: list[Callable[[Any], object]] = [
        lambda bad: farcall.rpc_sync("w1", whoami, timeout=bad),
        lambda bad: farcall.rpc_sync("w1", whoami, timeout=bad, retry=farcall.Retry()),
        lambda bad: farcall.rpc_async("w1", whoami, timeout=bad),
        lambda bad: farcall.rpc_async("w1", whoami, timeout=bad, retry=farcall.Retry()),
        lambda bad: farcall.remote("w1", whoami, timeout=bad),
        lambda bad: farcall.remote("w1", whoami, timeout=bad, retry=farcall.Retry()),
        lambda bad: made.to_here(bad),
        lambda bad: here.to_here(bad),
        lambda bad: made.rpc_sync(bad).open("it"),
        lambda bad: made.rpc_async(bad).open("it"),
        lambda bad: made.remote(bad).open("it"),
        lambda bad: farcall.barrier(timeout=bad),
        lambda bad: farcall.all_gather(1, timeout=bad),
        lambda bad: shared.read_into(torch.ones(1), timeout=bad),
        lambda bad: shared.write_from(torch.ones(1), timeout=bad),
        lambda bad: farcall._set_rpc_timeout(bad),
        lambda bad: farcall.shutdown(timeout=bad),
    ]
    waits: list[Callable[[Any], object]] = [
        lambda bad: done.wait(bad),
        lambda bad: done.result(bad),
        lambda bad: subscription.wait(timeout=bad),
    ]
    for door in doors + waits:
        for bad in (-1, -1.0) if door in waits else (0, 0.0, -1, -1.0):
            with pytest.raises(ValueError, match="write timeout=None for no limit, or leave it out for the default"):
                door(bad)
    assert done.result(timeout=0) == done.wait(0)
    with pytest.raises(RpcTimeout):
        subscription.wait(timeout=0)
    farcall.barrier()


def test_0_and_negative_timeouts_are_refused() -> None:
    run_cluster(2, refuse)


def test_timeouts_per_call_default_and_none() -> None:
    run_cluster(2, time_out)


def answer_late(rank: int) -> None:
    import farcall.api

    if rank:
        return
    assert farcall.get_rpc_timeout() is None
    count = 1 << 20
    # Once, so that the segment is known to both, and large answers go through it.
    for name in ("warm 1", "warm 2", "warm 3"):
        farcall.rpc_sync("w1", Gate.open, (name,))
        farcall.rpc_sync("w1", Gate.wait_and_return, (name, count))
    node = farcall.api.current_runtime()
    for attempt in range(3):
        late = farcall.rpc_async("w1", Gate.wait_and_return, (f"late {attempt}", count), timeout=0.02)
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", Gate.wait_and_return, (f"late {attempt}", count), timeout=0.02)
        with pytest.raises(RpcTimeout):
            late.wait()
        farcall.rpc_sync("w1", Gate.open, (f"late {attempt}",))
    assert farcall.rpc_sync("w1", whoami) == "w1"
    # The late answers have come, were dropped, and their memory went back.
    wait_until(lambda: farcall.rpc_sync("w1", live_bytes) == 0, "the release of late answers")
    assert len(node.calls) == 0


def test_late_answers_are_dropped_and_their_memory_released() -> None:
    run_cluster(2, answer_late, rpc_timeout=None)
