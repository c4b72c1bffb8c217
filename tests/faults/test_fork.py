"""Forked children of a worker: no workers themselves, harmless to the parent, and free to become one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from tests.kit.forks import in_a_fork
from tests.kit.ports import held_port
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import NotInitialized, PeerDead
from farcall.testing.cluster import finish, run_cluster, start_cluster


def try_to_call() -> list[str]:
    gc.collect()  # destructors of what the parent made run here as well
    texts = []
    for call in (
        lambda: farcall.rpc_sync("w1", os.getpid),
        lambda: farcall.rpc_async("w1", os.getpid),
        farcall.get_worker_info,
        farcall.shutdown,
    ):
        with pytest.raises(NotInitialized) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def fork_and_go_on(rank: int) -> list[str]:
    if rank == 1:
        return []
    big = farcall.rpc_sync("w1", torch.ones, (1 << 18,))  # lies in the other's shared memory
    texts: list[str] = in_a_fork(try_to_call)
    assert farcall.rpc_sync("w1", os.getpid) != os.getpid()
    assert bool((big == 1).all())
    assert len(farcall.rpc_sync("w1", torch.ones, (1 << 18,))) == 1 << 18
    return texts


def test_child_gets_a_clear_error_and_the_parent_goes_on() -> None:
    texts = run_cluster(2, fork_and_go_on)[0]
    assert len(texts) == 4
    assert all("forked" in text and "init_rpc" in text for text in texts)


def become_a_worker(port: int) -> int:
    gc.collect()
    farcall.init_rpc(
        "child",
        rank=0,
        world_size=1,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}"),
    )
    found: int = farcall.rpc_sync("child", os.getpid)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    farcall.shutdown()
    return found


def fork_within_a_function(port: int) -> int:
    """On a worker thread: in the child, that thread is the main one, and no worker any more."""
    found: int = in_a_fork(become_a_worker, port)
    assert farcall.get_worker_info().name == "w1"
    return found


def become_new_workers(rank: int) -> list[int]:
    if rank == 1:
        return []
    return [
        in_a_fork(become_a_worker, held_port()),
        farcall.rpc_sync("w1", fork_within_a_function, (held_port(),)),
        os.getpid(),
        farcall.rpc_sync("w1", os.getpid),
    ]


def test_child_can_become_a_worker_of_its_own() -> None:
    found = run_cluster(2, become_new_workers)[0]
    assert len(set(found)) == 4


def hold(connection: Connection) -> None:
    """A child that lives on, with copies of whatever it inherited, until the other end is closed."""
    try:
        connection.recv()
    except EOFError:
        pass
    os._exit(0)


def die_with_a_child_alive(rank: int, done: Connection) -> float:
    if rank == 0:
        if os.fork() == 0:
            hold(done)
        done.close()
        wait_until(lambda: api.current_runtime().server.active)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerDead):
        farcall.rpc_sync("w0", time.sleep, (LONG_S,), timeout=LONG_S)
    return time.monotonic() - started


def test_death_of_the_parent_is_noticed_although_its_child_lives() -> None:
    done, kept = multiprocessing.Pipe(duplex=False)
    try:
        members = start_cluster(2, die_with_a_child_alive, done)
        done.close()
        members[1].collect(time.monotonic() + 4 * LONG_S)
        kept.close()  # only now may the child end
        finish(members[:1], may_fail=[0])
        assert members[1].error is None
        assert members[1].result < LONG_S / 2
    finally:
        done.close()
        kept.close()
        members[1].end()
