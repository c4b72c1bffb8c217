"""Calls between real processes: to a peer that dies, and by a node that leaves in the middle."""

from __future__ import annotations

import contextlib
import threading

import pytest
from tests.kit.ports import tcp_url
from tests.processes.calls.callees import PATIENCE_S, Gate, whoami

import farcall
from farcall.errors import (
    Cancelled,
    NotInitialized,
    PeerDead,
)
from farcall.testing.cluster import finish, run_cluster, start_cluster


def leave_in_the_middle(rank: int) -> None:
    futures = [
        farcall.rpc_async(to, Gate.wait, (f"never {rank}",), timeout=timeout)
        for to in ("w0", "w1")
        for timeout in (None, PATIENCE_S)
    ]
    with_callbacks = [
        farcall.rpc_async(to, Gate.wait, (f"never {rank}",)).then(lambda done: done.wait()) for to in ("w0", "w1")
    ]
    with contextlib.suppress(PeerDead):  # w0 may leave before its last answer is out
        farcall.all_gather(None)
    farcall.shutdown(graceful=False)
    for name in ("never 0", "never 1"):
        Gate.open(name)
    # Nobody is left waiting, callbacks or not.
    for future in futures:
        with pytest.raises((Cancelled, PeerDead)):
            future.wait()
    for future in with_callbacks:
        with pytest.raises(Exception, match=r"shut down|gone|left"):
            future.wait()
    with pytest.raises(NotInitialized, match="shut down"):
        farcall.rpc_sync("w0", whoami)
    with pytest.raises(NotInitialized, match="shut down"):
        farcall.get_worker_info()
    # And once more from the beginning, for the harness to shut down.
    farcall.init_rpc(
        "alone",
        rank=0,
        world_size=1,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=tcp_url()),
    )
    assert farcall.rpc_sync("alone", whoami) == "alone"


def outlive_a_peer(rank: int) -> str | None:
    if rank == 2:
        farcall.rpc_sync("w0", Gate.open, ("w2 is up",))
        threading.Event().wait(PATIENCE_S)
        return None
    if rank == 1:
        return None
    Gate.wait("w2 is up")
    pending = farcall.rpc_async("w2", Gate.wait, ("never",), timeout=None)
    with_callback = farcall.rpc_async("w2", Gate.wait, ("never",), timeout=None).then(lambda done: done.wait())
    farcall.rpc_sync("w0", Gate.open, ("w2 is called",))
    # No addresses and no numbers of errors: those are in the log, at the level of info.
    ended = r"w2 is gone: its process has ended \(its own output may say why\); "
    with pytest.raises(PeerDead, match=f"^{ended}whether the call ran there is unknown$"):
        farcall.rpc_sync("w2", die)
    with pytest.raises(PeerDead, match=f"^{ended}whether the call ran there is unknown$"):
        pending.wait()
    with pytest.raises(Exception, match="w2"):
        with_callback.wait()
    with pytest.raises(PeerDead, match=f"^{ended}the call was not sent$") as refused:
        farcall.rpc_sync("w2", whoami)
    assert refused.value.delivery == "not_sent"
    # A fan-out is not torn by one dead member: its future fails, the others live.
    fan_out = [farcall.rpc_async(to, whoami) for to in ("w0", "w2", "w1")]
    assert fan_out[0].wait() == "w0"
    assert fan_out[2].wait() == "w1"
    with pytest.raises(PeerDead, match="w2"):
        fan_out[1].wait()
    return "survived"


def die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_a_peer_that_dies() -> None:
    members = start_cluster(3, outlive_a_peer)
    assert finish(members, may_fail=[2])[0] == "survived"


def test_leaving_at_once_ends_every_wait() -> None:
    run_cluster(2, leave_in_the_middle)
