"""References between real processes: what goes wrong where the value is made surfaces where it is used."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.kit.times import AT_ONCE_S
from tests.processes.calls.callees import Gate
from tests.processes.references.callees import boom, fetch, nothing_is_left

import farcall
from farcall.errors import (
    RpcTimeout,
    SerializationError,
)
from farcall.testing.cluster import (
    run_cluster,
)


def unpicklable() -> Any:
    return threading.Lock()


def surface(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", "w0"):
        rref = farcall.remote(to, boom, ("the reason",))
        for use in (
            rref.to_here,
            rref.to_here,  # not only the first time
            lambda rref=rref: rref.rpc_sync().anything(),
            lambda rref=rref: rref.rpc_async().anything().wait(),
            lambda rref=rref: rref.remote().anything().to_here(),
            lambda rref=rref: farcall.rpc_sync("w2", fetch, (rref,)),
            lambda rref=rref, to=to: farcall.rpc_sync(to, farcall.RRef.local_value, (rref,)),
        ):
            with pytest.raises(ValueError, match="the reason") as caught:
                use()
            assert "in boom" in caught.value.remote_traceback
            assert caught.value.remote_traceback.count("Traceback (most recent call last)") <= 3
        # No such thing, or nothing that could be sent: all at first use.
        with pytest.raises(RuntimeError, match="no 'missing' here"):
            farcall.remote(to, Unfindable()).to_here()
        lock = farcall.remote(to, unpicklable)
        if to == "w1":
            with pytest.raises(SerializationError):
                lock.to_here()
        assert lock.rpc_sync().locked() is False
        with pytest.raises(Exception, match="local exception"):
            farcall.remote(to, raise_local).to_here()
    del rref, use, caught, lock
    nothing_is_left(["w0", "w1", "w2"])


class Unfindable:
    def __call__(self) -> None: ...

    def __reduce__(self) -> Any:
        return _unfindable, ()


def _unfindable() -> None:
    raise RuntimeError("no 'missing' here")


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("local exception")


def test_errors_of_the_creation_surface_at_use_with_their_traceback() -> None:
    run_cluster(3, surface)


def time_out(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", "w0"):
        started = time.monotonic()
        rref = farcall.remote(to, Gate.wait, (f"late at {to}",), timeout=0.1)
        ended: list[float] = []

        def wait(rref: farcall.RRef[Any] = rref, ended: list[float] = ended) -> None:
            with pytest.raises(RpcTimeout, match=r"RRef creation|was not confirmed"):
                rref.to_here()
            ended.append(time.monotonic())

        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        with pytest.raises(RpcTimeout, match="RRef creation"):
            rref.rpc_async().anything().wait() if to == "w1" else rref.to_here()
        for thread in waiting:
            thread.join()
        assert max(ended) - started < AT_ONCE_S, "the timeout wakes them: the function has not ended"
        for use in (rref.to_here, lambda rref=rref: farcall.rpc_sync("w2", fetch, (rref,))):
            with pytest.raises(RpcTimeout, match="RRef creation"):
                use()
        with pytest.raises(RpcTimeout):
            rref._get_future().wait()
        wait.__defaults__ = None
        del rref, use, wait, waiting, thread
        farcall.rpc_sync(to, Gate.open, (f"late at {to}",))
    # Their own timeouts.
    for to in ("w1", "w0"):
        slow = farcall.remote(to, Gate.wait, (f"slow at {to}",))
        with pytest.raises(RpcTimeout):
            slow.to_here(timeout=0.05)
        farcall.rpc_sync(to, Gate.open, (f"slow at {to}",))
        assert (slow.to_here() if to == "w1" else slow.to_here(timeout=None)) == f"slow at {to}"
    del slow
    nothing_is_left(["w0", "w1", "w2"])


def test_a_creation_that_times_out_wakes_those_who_wait() -> None:
    run_cluster(3, time_out)
