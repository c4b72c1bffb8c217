"""What the tests of references run on the workers, and how they wait."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import torch
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.processes.calls.callees import Gate

import farcall
from farcall import api


def known_here() -> tuple[int, int]:
    """How many values this worker owns, and how many references to others' values it holds."""
    gc.collect()
    found = farcall.debug.references()
    return len(found.owned), len(found.used)


def nothing_is_left(workers: list[str]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    for worker in workers:
        while farcall.rpc_sync(worker, known_here) != (0, 0):
            assert time.monotonic() < give_up_at, farcall.rpc_sync(worker, shown_here)
            time.sleep(0.002)


def shown_here() -> str:
    return str(farcall.debug.references())


def whoami() -> str:
    return farcall.get_worker_info().name


def identity(value: Any) -> Any:
    return value


def add(left: Any, right: Any = 100) -> Any:
    return left + right


class Counter:
    """A value with every kind of method."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def plus(self, more: int = 0, **named: int) -> int:
        self.count += more + sum(named.values())
        return self.count

    def where(self) -> str:
        return whoami()

    def fail(self) -> None:
        raise KeyError("from a method")

    def sleep_until(self, opened: str) -> None:
        Gate.wait(opened)

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @farcall.functions.async_execution
    def elsewhere(self, worker: str, more: int) -> torch.futures.Future[int]:
        return farcall.rpc_async(worker, add, (self.count, more))

    @classmethod
    @farcall.functions.async_execution
    def class_elsewhere(cls, worker: str) -> torch.futures.Future[str]:
        return farcall.rpc_async(worker, whoami)

    @farcall.functions.async_execution
    def no_future(self) -> int:
        return 7

    async def slowly(self, more: int) -> int:
        await asyncio.sleep(0)
        return self.count + more

    def me(self) -> Counter:
        return self


def boom(text: str) -> None:
    raise ValueError(text)


def fetch(rref: farcall.RRef[Any]) -> tuple[str, bool, Any]:
    return whoami(), rref.is_owner(), rref.to_here()


kept: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    kept[name] = value


@farcall.functions.async_execution
def kept_future(name: str) -> torch.futures.Future[Any]:
    """A future that `complete` completes; no thread waits for it."""
    kept[name] = torch.futures.Future()
    return kept[name]


def complete(name: str, value: Any) -> None:
    kept.pop(name).set_result(value)


def is_kept(name: str) -> bool:
    return name in kept


def count(rank: int) -> None:
    if rank != 0:
        return
    rref = farcall.RRef(1)
    assert farcall._rref_context_get_debug_info()["num_owner_rrefs"] == "0"
    farcall.rpc_sync("w1", keep, ("counted", rref))
    info = farcall._rref_context_get_debug_info()
    assert (info["num_owner_rrefs"], info["num_forks"], info["num_pending_users"]) == ("1", "1", "0")
    theirs = farcall.remote("w1", kept_future, ("pending",))
    assert farcall._rref_context_get_debug_info()["num_pending_users"] == "1"
    wait_until(lambda: farcall.rpc_sync("w1", api._rref_context_get_debug_info)["num_pending_futures"] == "1")
    farcall.rpc_sync("w1", complete, ("pending", None))
    wait_until(lambda: farcall._rref_context_get_debug_info()["num_pending_users"] == "0")
    farcall.rpc_sync("w2", keep, ("counted", theirs))
    wait_until(lambda: farcall._rref_context_get_debug_info()["num_children"] == "0")
    shown = str(farcall.rpc_sync("w1", farcall.debug.references))
    assert "NoneType; held by w0 1, w2 1" in shown
    assert str(farcall.debug.references()).startswith("w0 owns 1 and uses 1 references")
