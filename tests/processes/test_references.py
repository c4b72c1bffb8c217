"""References between real processes: made, used, sent around, dropped, leaked; what is dropped everywhere is freed."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import farcall
from farcall import api
from farcall.errors import (
    NotInitialized,
    ReferenceLeak,
    ReferenceLost,
    RemoteError,
    RpcError,
    RpcTimeout,
    SerializationError,
)
from farcall.remote.references import NodeReferences
from farcall.runtime.node import node_of_thread
from farcall.serialize import TablePickler
from farcall.testing.cluster import (
    MemberFailed,
    finish,
    free_port,
    run_cluster,
    start_processes,
    temporary_file_url,
)

PATIENCE_S = 10.0

# ---------------------------------------------------------------------- what the callees run


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} never came true"
        time.sleep(0.002)


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

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

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


def _scripted(left: torch.Tensor, right: int = 3) -> torch.Tensor:
    return left * right


scripted = torch.jit.script(_scripted)


def scripted_module() -> Any:
    return torch.jit.script(torch.nn.Linear(2, 3))


@farcall.functions.async_execution
def add_elsewhere(worker: str, left: int, right: int) -> torch.futures.Future[int]:
    return farcall.rpc_async(worker, add, (left, right))


async def add_slowly(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


def countdown(start: int) -> Iterator[int]:
    yield from range(start, 0, -1)


def boom(text: str) -> None:
    raise ValueError(text)


def unpicklable() -> Any:
    return threading.Lock()


def reference_to(value: Any) -> farcall.RRef[Any]:
    return farcall.RRef(value)


def fetch(rref: farcall.RRef[Any]) -> tuple[str, bool, Any]:
    return whoami(), rref.is_owner(), rref.to_here()


def pass_on(rref: farcall.RRef[Any], workers: list[str]) -> list[str]:
    """Send the reference along a chain of workers; who had it, and what they saw."""
    seen = [f"{whoami()}:{rref.to_here()}"]
    return seen + (farcall.rpc_sync(workers[0], pass_on, (rref, workers[1:])) if workers else [])


kept: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    kept[name] = value


def give(name: str) -> Any:
    return kept[name]


def forget(name: str) -> None:
    kept.pop(name, None)


@farcall.functions.async_execution
def kept_future(name: str) -> torch.futures.Future[Any]:
    """A future that `complete` completes; no thread waits for it."""
    kept[name] = torch.futures.Future()
    return kept[name]


def complete(name: str, value: Any) -> None:
    kept.pop(name).set_result(value)


def worker_threads() -> int:
    node = node_of_thread()
    assert node is not None
    return node.executor.threads


class Box:
    """An object that holds a reference in an attribute."""

    def __init__(self, rref: farcall.RRef[Any]) -> None:
        self.rref = rref


# ---------------------------------------------------------------------- making


def make_by_everything(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", 1, farcall.WorkerInfo("w1", 1), "w0"):
        assert farcall.remote(to, add, (1,), {"right": 2}).to_here() == 3
    for to in ("w1", "w0"):
        assert torch.equal(farcall.remote(to, torch.add, (torch.ones(2), 1)).to_here(), torch.full((2,), 2.0))
        assert torch.equal(farcall.remote(to, scripted, (torch.ones(2), 4)).to_here(), torch.full((2,), 4.0))
        assert farcall.remote(to, Counter, (5,)).to_here().count == 5
        assert farcall.remote(to, functools.partial(add, 1), (2,)).to_here() == 3
        assert farcall.remote(to, Counter(3).plus, (4,)).to_here() == 7
        assert farcall.remote(to, Counter.double, (4,)).to_here() == 8
        assert farcall.remote(to, Counter.named).to_here() == "Counter"
        assert farcall.remote(to, add_elsewhere, ("w2", 1, 2)).to_here() == 3
        assert farcall.remote(to, add_slowly, (1, 2)).to_here() == 3
        module = farcall.remote(to, scripted_module)
        assert module.rpc_sync().forward(torch.ones(2)).shape == (3,)
        numbers = farcall.remote(to, countdown, (2,))
        assert [numbers.rpc_sync().__next__(), numbers.rpc_sync().__next__()] == [2, 1]
        with pytest.raises(StopIteration):
            numbers.rpc_sync().__next__()
    del module, numbers
    nothing_is_left(["w0", "w1"])


def test_everything_that_can_be_called_can_make_a_reference() -> None:
    run_cluster(3, make_by_everything)


def use_values(rank: int) -> None:
    if rank != 0:
        return
    value = [1, 2]
    mine: farcall.RRef[list[int]] = farcall.RRef(value)
    assert mine.is_owner()
    assert mine.owner() == farcall.get_worker_info()
    assert mine.owner_name() == "w0"
    assert mine.confirmed_by_owner()
    assert mine.to_here() is value
    assert mine.local_value() is value
    assert mine._get_future().done()
    theirs = farcall.remote("w1", identity, (torch.ones(3),))
    first, second = theirs.to_here(), theirs.to_here()
    assert first.data_ptr() != second.data_ptr()
    assert not theirs.is_owner()
    assert theirs.owner() == farcall.get_worker_info("w1")
    assert theirs.owner_name() == "w1"
    assert theirs.confirmed_by_owner()
    with pytest.raises(RpcError, match=r"owner WorkerInfo\(id=1, name=w1\)"):
        theirs.local_value()
    assert "w1" in repr(theirs)
    assert "w0" in repr(mine)
    assert len({repr(farcall.remote("w1", add, (1,))) for _ in range(3)}) == 3
    large = farcall.remote("w1", torch.ones, (1 << 20,))
    assert large.to_here().sum() == 1 << 20
    assert large.rpc_sync().sum() == 1 << 20
    # Types, also of what is still being made, and of what is of one's own.
    assert theirs._get_type() is torch.Tensor
    assert theirs._get_type(blocking=False) is theirs._get_type(blocking=False)
    asked = farcall.remote("w1", add, (1,))
    asked._get_type(blocking=False).wait()
    wait_until(lambda asked=asked: asked._type is not None, "the answer, kept although its future is gone,")
    del asked
    assert mine._get_type() is list
    assert mine._get_type(blocking=False).wait() is list
    slow = farcall.remote("w1", time.sleep, (0.2,))
    assert slow._get_type() is type(None)
    with pytest.raises(ValueError, match="no type"):
        farcall.remote("w1", boom, ("no type",))._get_type()
    with pytest.raises(ValueError, match="no type"):
        farcall.remote("w0", boom, ("no type",))._get_type(blocking=False).wait()
    with pytest.raises(RpcTimeout):
        farcall.remote("w1", time.sleep, (0.3,))._get_type(timeout=0.05)
    del mine, theirs, first, second, large, slow
    nothing_is_left(["w0", "w1"])


def test_a_reference_tells_what_it_refers_to() -> None:
    run_cluster(2, use_values)


def wait_for_futures(rank: int) -> None:
    if rank != 0:
        return
    done: list[str] = []
    for to in ("w1", "w0"):
        rref = farcall.remote(to, time.sleep, (0.1,))
        future = rref._get_future()
        future.add_done_callback(lambda _: done.append(threading.current_thread().name))
        assert future.wait() is None
        assert rref._get_future().wait() is None
        with pytest.raises(ValueError, match="at once"):
            farcall.remote(to, boom, ("at once",))._get_future().wait()
    wait_until(lambda: len(done) == 2)
    assert all("worker" in name for name in done), done


def test_the_future_of_a_creation() -> None:
    run_cluster(2, wait_for_futures)


# ---------------------------------------------------------------------- methods


def call_methods(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", "w0"):
        counter = farcall.remote(to, Counter, (5,))
        assert counter.rpc_sync().plus(1) == 6
        assert counter.rpc_async().plus(more=1).wait() == 7
        assert counter.remote().plus(1).to_here() == 8
        # Names that our own parameters have.
        assert counter.rpc_sync().plus(0, rref=1, name=1, timeout_s=1, what=1) == 12
        assert counter.rpc_sync().where() == to
        assert counter.rpc_sync().double(4) == 8
        assert counter.rpc_sync().named() == "Counter"
        for call in (
            counter.rpc_sync().elsewhere,
            lambda *args, counter=counter: counter.rpc_async().elsewhere(*args).wait(),
            lambda *args, counter=counter: counter.remote().elsewhere(*args).to_here(),
        ):
            assert call("w2", 10) == 22
        assert counter.rpc_sync().class_elsewhere("w2") == "w2"
        assert counter.rpc_sync().slowly(1) == 13
        assert counter.remote().slowly(1).to_here() == 13
        with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
            counter.rpc_sync().no_future()
        with pytest.raises(KeyError, match="from a method") as caught:
            counter.rpc_sync().fail()
        assert "in fail" in caught.value.remote_traceback
        for use in (
            lambda counter=counter: counter.rpc_sync().missing(),
            lambda counter=counter: counter.rpc_async().missing().wait(),
            lambda counter=counter: counter.remote().missing().to_here(),
        ):
            with pytest.raises(AttributeError, match="has no attribute 'missing'"):
                use()
        with pytest.raises(RpcTimeout, match="sleep"):
            counter.rpc_sync(timeout=0.05).sleep(0.5)
        with pytest.raises(RpcTimeout):
            counter.rpc_async(timeout=0.05).sleep(0.5).wait()
        with pytest.raises(RpcTimeout):
            counter.remote(timeout=0.05).sleep(0.5).to_here()
        proxy = counter.rpc_sync()
        assert [proxy.plus(), proxy.plus()] == [12, 12]
        assert asyncio.run(await_method(counter)) == 12
        # The object may be dropped while a call of its method is under way: the call keeps it.
        future = farcall.remote(to, Counter, (1,)).rpc_async().plus(1)
        chained = farcall.remote(to, Counter, (1,)).remote().plus(1)
        assert (future.wait(), chained.to_here()) == (2, 2)
    del counter, proxy, future, chained, call, use, caught
    nothing_is_left(["w0", "w1", "w2"])


async def await_method(counter: farcall.RRef[Counter]) -> Any:
    return await counter.rpc_async().plus()


def test_methods_of_the_value() -> None:
    run_cluster(3, call_methods)


# ---------------------------------------------------------------------- travelling


def travel(rank: int) -> None:
    if rank != 0:
        return
    workers = ["w0", "w1", "w2"]
    for owner in workers:
        rref = farcall.RRef("value") if owner == "w0" else farcall.remote(owner, identity, ("value",))
        for to in workers:
            assert farcall.rpc_sync(to, fetch, (rref,)) == (to, to == owner, "value")
            assert farcall.rpc_async(to, fetch, (rref,)).wait() == (to, to == owner, "value")
            assert farcall.remote(to, fetch, (rref,)).to_here() == (to, to == owner, "value")
            back = farcall.rpc_sync(to, identity, (rref,))
            assert back.owner_name() == owner
            assert back.to_here() == "value"
            box = farcall.rpc_sync(to, identity, ({"deep": [(Box(rref), rref, rref)]},))
            held, one, other = box["deep"][0]
            assert one is other
            assert held.rref is one
            assert one.to_here() == "value"
            # A reference to a reference.
            assert farcall.remote(to, identity, (rref,)).to_here().to_here() == "value"
        assert farcall.rpc_sync("w1", pass_on, (rref, ["w2", "w1", "w0", "w2", "w0"])) == [
            f"{name}:value" for name in ("w1", "w2", "w1", "w0", "w2", "w0")
        ]
        # Kept there, given up here, used from a third.
        farcall.rpc_sync("w1", keep, ("it", rref))
        del rref, back, box, held, one, other
        assert farcall.rpc_sync("w2", fetch, (farcall.rpc_sync("w1", give, ("it",)),))[2] == "value"
        farcall.rpc_sync("w1", forget, ("it",))
        nothing_is_left(workers)
    # Made by the callee.
    made = farcall.rpc_sync("w1", reference_to, (torch.ones(2),))
    assert made.owner_name() == "w1"
    assert made.to_here().sum() == 2
    # A result kept at its owner may be a reference to a third worker's value.
    nested = farcall.remote("w1", farcall.remote, ("w2", identity, (5,)))
    assert nested.to_here().to_here() == 5
    assert nested.rpc_sync().to_here() == 5
    del made, nested
    nothing_is_left(workers)


def test_references_travel_anywhere_and_everything_dropped_is_freed() -> None:
    run_cluster(3, travel)


def juggle(rank: int, size: int, turns: int) -> None:
    """Everybody sends everybody references, from several threads, and drops them at any moment."""
    farcall.rpc_sync(rank, keep, ("hand", []))

    def play(seed: int) -> None:
        state = seed
        for turn in range(turns):
            state = (state * 1103515245 + 12345) % (1 << 31)
            to, owner = (state >> 8) % size, (state >> 16) % size
            rref = farcall.remote(owner, identity, ((rank, turn),))
            other = farcall.RRef((rank, turn))
            if state % 3:
                assert farcall.rpc_sync(to, take, (rref, other)) == [(rank, turn), (rank, turn)]
            else:
                future = farcall.rpc_async(to, swap, (rref,))
                del rref
                got = future.wait()
                if got is not None:
                    got.to_here()

    threads = [threading.Thread(target=play, args=(rank * 7 + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    farcall.api._barrier([f"w{index}" for index in range(size)])
    farcall.rpc_sync(rank, keep, ("hand", []))
    farcall.api._barrier([f"w{index}" for index in range(size)])
    if rank == 0:
        nothing_is_left([f"w{index}" for index in range(size)])


def take(*rrefs: farcall.RRef[Any]) -> list[Any]:
    return [rref.to_here() for rref in rrefs]


def swap(rref: farcall.RRef[Any]) -> Any:
    hand: list[Any] = kept["hand"]
    hand.append(rref)
    return hand.pop(0) if len(hand) > 3 else None


def test_nothing_is_lost_or_left_when_everybody_juggles() -> None:
    run_cluster(3, juggle, 3, 60)


def fail_on_the_way(rank: int) -> None:
    if rank != 0:
        return
    for owner in ("w0", "w1", "w2"):
        rref = farcall.RRef(1) if owner == "w0" else farcall.remote(owner, identity, (1,))
        # The message cannot be written, after the reference was.
        with pytest.raises(SerializationError):
            farcall.rpc_sync("w1", identity, ((rref, threading.Lock()),))
        with pytest.raises(SerializationError):
            farcall.remote("w1", identity, ((rref, threading.Lock()),))
        with pytest.raises(SerializationError):
            farcall.rpc_sync("w1", with_lock, (rref,))
        # It cannot be read, before the reference was.
        with pytest.raises(RpcError, match="cannot be read here"):
            farcall.rpc_sync("w1", identity, ((Unreadable(), rref),))
        # Nobody waits for the answer any more.
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", answer_late, (rref,), timeout=0.05)
        with pytest.raises(RpcTimeout):
            farcall.rpc_async("w1", answer_late, (rref,), timeout=0.05).wait()
        # The answer is an exception that holds one.
        with pytest.raises(Carrier) as caught:
            farcall.rpc_sync("w1", raise_carrier, (rref,))
        assert caught.value.rref.to_here() == 1
        del rref, caught
        nothing_is_left(["w0", "w1", "w2"])


def with_lock(rref: farcall.RRef[Any]) -> Any:
    return rref, threading.Lock()


def answer_late(rref: farcall.RRef[Any]) -> list[farcall.RRef[Any]]:
    time.sleep(0.2)
    return [rref, farcall.RRef("mine")]


class Carrier(Exception):
    def __init__(self, rref: farcall.RRef[Any]) -> None:
        super().__init__("carries")
        self.rref = rref


def raise_carrier(rref: farcall.RRef[Any]) -> None:
    raise Carrier(rref)


def _unreadable() -> None:
    raise RuntimeError("cannot be read here")


class Unreadable:
    def __reduce__(self) -> Any:
        return _unreadable, ()


def test_a_message_that_fails_takes_no_reference_with_it() -> None:
    run_cluster(3, fail_on_the_way)


def send_by_other_picklers(rank: int) -> None:
    if rank != 0:
        return
    rref = farcall.remote("w1", identity, ("value",))
    with farcall._use_rpc_pickler(TablePickler()):
        assert farcall.rpc_sync("w2", fetch, (rref,))[2] == "value"
        assert farcall.rpc_sync("w2", identity, ([rref, torch.ones(2)],))[0].to_here() == "value"
        assert rref.rpc_sync().upper() == "VALUE"
        assert farcall.remote("w2", fetch, (rref,)).to_here()[2] == "value"
    with farcall._use_rpc_pickler(PlainPickler()):
        assert farcall.rpc_sync("w2", fetch, (rref,))[2] == "value"
    for write in (pickle.dumps, copy.copy, copy.deepcopy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(SerializationError, match="pickle rref"):
            write(rref)
        if write is not copy.copy:
            with pytest.raises(SerializationError, match="pickle rref"):
                write([farcall.RRef(1)])
    del rref
    nothing_is_left(["w0", "w1", "w2"])


class PlainPickler:
    """A user's pickler that knows nothing of farcall."""

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        return pickle.dumps(value), []

    def deserialize(self, data: bytes, tensors: Any) -> Any:
        return pickle.loads(data)


def test_only_calls_carry_references_whatever_their_pickler() -> None:
    run_cluster(3, send_by_other_picklers)


# ---------------------------------------------------------------------- what goes wrong at the owner


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
        with pytest.raises(RemoteError, match="local exception"):
            farcall.remote(to, raise_local).to_here()
        with pytest.raises(SerializationError):
            farcall.remote(to, lambda: None)
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
        rref = farcall.remote(to, time.sleep, (1.0,), timeout=0.1)
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
        assert max(ended) - started < 0.9, "the function's end woke them, not the timeout"
        for use in (rref.to_here, lambda rref=rref: farcall.rpc_sync("w2", fetch, (rref,))):
            with pytest.raises(RpcTimeout, match="RRef creation"):
                use()
        with pytest.raises(RpcTimeout):
            rref._get_future().wait()
        wait.__defaults__ = None
        del rref, use, wait, waiting, thread
    # Their own timeouts.
    slow = farcall.remote("w1", time.sleep, (0.5,))
    with pytest.raises(RpcTimeout):
        slow.to_here(timeout=0.05)
    assert slow.to_here() is None
    slow = farcall.remote("w0", time.sleep, (0.5,))
    with pytest.raises(RpcTimeout):
        slow.to_here(timeout=0.05)
    assert slow.to_here(timeout=0) is None
    del slow
    nothing_is_left(["w0", "w1", "w2"])


def test_a_creation_that_times_out_wakes_those_who_wait() -> None:
    run_cluster(3, time_out)


def wait_for_what_is_being_made(rank: int) -> None:
    if rank != 0:
        return
    rref = farcall.remote("w1", kept_future, ("later",))
    wait_until(lambda: farcall.rpc_sync("w1", is_kept, ("later",)))
    before = farcall.rpc_sync("w1", worker_threads)
    third = farcall.rpc_async("w2", fetch, (rref,))
    futures = [rref.rpc_async().plus(1) for _ in range(30)]
    made = [rref.remote().plus(1) for _ in range(30)]
    types = rref._get_type(blocking=False)
    assert farcall.rpc_sync("w1", worker_threads) <= before + 1, "each waits in a thread of its own"
    assert not any(future.done() for future in futures)
    farcall.rpc_sync("w1", complete, ("later", Counter(0)))
    assert sorted([future.wait() for future in futures] + [one.to_here() for one in made]) == list(range(1, 61))
    assert third.wait()[2].count >= 0
    assert types.wait() is Counter
    del rref, third, futures, made, types
    nothing_is_left(["w0", "w1", "w2"])


def is_kept(name: str) -> bool:
    return name in kept


def test_no_thread_waits_for_a_value_that_is_still_being_made() -> None:
    run_cluster(3, wait_for_what_is_being_made)


def drop_while_it_is_made(rank: int) -> None:
    if rank != 0:
        return
    for to in ("w1", "w0"):
        farcall.remote(to, kept_future, ("dropped",))
        wait_until(lambda to=to: farcall.rpc_sync(to, is_kept, ("dropped",)))
        value = Canary()
        farcall.rpc_sync(to, complete, ("dropped", value))
    del value
    nothing_is_left(["w0", "w1"])
    for to in ("w1", "w0"):
        wait_until(lambda to=to: farcall.rpc_sync(to, canaries) == 0, "the value is gone")


class Canary:
    """Dies slowly, and says so."""

    alive: ClassVar[weakref.WeakSet[Canary]] = weakref.WeakSet()
    died_on: ClassVar[list[str]] = []

    def __init__(self) -> None:
        Canary.alive.add(self)

    def __setstate__(self, state: object) -> None:
        Canary.alive.add(self)

    def __reduce__(self) -> Any:
        return Canary, ()

    def __del__(self) -> None:
        Canary.died_on.append(threading.current_thread().name)
        time.sleep(0.01)


def canaries() -> int:
    gc.collect()
    return len(Canary.alive)


def death_places() -> list[str]:
    return Canary.died_on


def test_a_value_dropped_while_it_is_made_is_freed() -> None:
    run_cluster(2, drop_while_it_is_made)


def die_on_a_worker(rank: int) -> None:
    if rank == 0:
        for _ in range(5):
            farcall.remote("w1", Canary)
        nothing_is_left(["w1"])
        wait_until(lambda: farcall.rpc_sync("w1", canaries) == 0)
        places = farcall.rpc_sync("w1", death_places)
        assert len(places) == 5
        assert not any("farcall-io" in place for place in places), "user code ran on the I/O thread"


def test_destructors_of_values_do_not_run_on_the_io_thread() -> None:
    run_cluster(2, die_on_a_worker)


# ---------------------------------------------------------------------- backward


def run_backward(rank: int) -> None:
    if rank != 0:
        return
    leaf = torch.ones(3, requires_grad=True)
    root = farcall.RRef((leaf * 2).sum())
    root.backward(retain_graph=True)
    root.backward()
    assert torch.equal(leaf.grad, torch.full((3,), 4.0))
    with pytest.raises(RuntimeError, match=r"should contain a tensor for \.backward\(\)"):
        farcall.RRef("text").backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        farcall.RRef(torch.ones(1)).backward()
    with pytest.raises(RuntimeError, match="dist_autograd_ctx_id"):
        farcall.remote("w1", torch.ones, (1,)).backward()


def test_backward_from_a_local_value() -> None:
    run_cluster(2, run_backward)


# ---------------------------------------------------------------------- many, and the end


def resident_kib() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def make_many(rank: int, count: int) -> None:
    if rank != 0:
        return
    sizes = []
    for _ in range(4):
        for number in range(count):
            rref = farcall.remote("w1", identity, (number,))
        assert rref.to_here() == count - 1
        del rref
        nothing_is_left(["w0", "w1"])
        sizes.append((resident_kib(), farcall.rpc_sync("w1", resident_kib)))
    for end in (0, 1):
        assert sizes[-1][end] - sizes[0][end] < 8 * 1024, sizes


def test_many_references_leave_memory_flat_at_both_ends() -> None:
    run_cluster(2, make_many, 5_000)


def drop_from_threads(rank: int) -> None:
    if rank != 0:
        return
    for _ in range(3):
        rrefs = [farcall.remote("w1", identity, (number,)) for number in range(300)]
        parts = [rrefs[start::3] for start in range(3)]
        del rrefs
        threads = [threading.Thread(target=part.clear) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    nothing_is_left(["w0", "w1"])
    # In cycles, too.
    loop: list[Any] = [farcall.remote("w1", identity, (1,))]
    loop.append(loop)
    del loop
    nothing_is_left(["w0", "w1"])


def test_destructors_on_any_thread() -> None:
    run_cluster(2, drop_from_threads)


held_to_the_end: list[Any] = []


def hold_to_the_end(rank: int, size: int) -> None:
    api._ignore_rref_leak = False
    held_to_the_end.append(farcall.remote((rank + 1) % size, identity, (1,)))
    held_to_the_end.append(farcall.RRef(2))
    farcall.rpc_sync((rank + 1) % size, keep, ("end", held_to_the_end[:]))
    # Sent on at the last moment: its registration is under way while we leave.
    farcall.rpc_async((rank + 2) % size, keep, ("end too", held_to_the_end[:]))


def test_what_is_held_at_the_end_is_given_up_and_is_no_leak() -> None:
    for _ in range(3):
        run_cluster(3, hold_to_the_end, 3)


def leak(rank: int) -> None:
    api._ignore_rref_leak = False
    farcall.debug.trace_references()
    held_to_the_end.append(farcall.remote(1 - rank, Counter, (1,)))  # this very line is in the report
    held_to_the_end[-1].to_here()
    node = api.current_node()
    node.part(NodeReferences).parting.give_up = lambda: None


def test_a_leak_says_who_holds_what_created_where() -> None:
    line = leak.__code__.co_firstlineno + 3
    with pytest.raises(MemberFailed) as caught:
        run_cluster(2, leak)
    text = str(caught.value)
    for rank in (0, 1):
        assert f"Leaking RRef: values of w{rank} were held to the last" in text
        assert f"w{1 - rank} holds {1 - rank}:0, a Counter, created at {__file__}:{line} on w{1 - rank}" in text
    assert ReferenceLeak.__name__ in text


def use_after_the_end(rank: int, size: int) -> None:
    rref = farcall.remote((rank + 1) % size, identity, (1,))
    mine = farcall.RRef([rank])
    assert rref.to_here() == 1
    farcall._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(ReferenceLost):
        farcall.rpc_sync((rank + 1) % size, identity, (rref,))
    held_to_the_end.extend((rref, mine))


def after_the_end() -> None:
    rref, mine = held_to_the_end
    with pytest.raises(NotInitialized):
        rref.to_here()
    with pytest.raises(NotInitialized):
        rref.rpc_sync().anything()
    assert "w" in repr(rref)
    assert mine.local_value() in ([0], [1])
    held_to_the_end.clear()


def live_twice(rank: int, urls: list[str]) -> None:
    for url in urls:
        number = rank
        farcall.init_rpc(
            f"w{number}", rank=number, world_size=2, rpc_backend_options=farcall.RpcBackendOptions(init_method=url)
        )
        use_after_the_end(number, 2)
        farcall.shutdown()
        after_the_end()


def test_references_after_shutdown_and_another_life() -> None:
    urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    finish(start_processes(2, live_twice, urls))


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


def test_debug_information() -> None:
    run_cluster(3, count)


def test_references_left_at_the_end_of_the_interpreter_make_no_noise() -> None:
    script = f"""
        import farcall, threading, operator
        options = farcall.RpcBackendOptions(init_method="tcp://127.0.0.1:{free_port()}")
        farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        kept = [farcall.remote("alone", operator.add, (1, 2)) for _ in range(100)]
        more = farcall.RRef(kept)
        assert kept[0].to_here() == 3
        class Late:
            def __del__(self): self.rref = None
        late = Late(); late.rref = farcall.RRef(1); late.me = late
        threading.current_thread().late = late
    """
    for ending in ("", "farcall.shutdown()"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script) + ending], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_nodes_of_one_process_keep_their_references_apart() -> None:
    options = farcall.RpcBackendOptions(init_method=temporary_file_url())
    nodes = [farcall.Node(f"n{rank}", rank, 2, options) for rank in range(2)]
    starting = [threading.Thread(target=node.start) for node in nodes]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    try:
        rref = nodes[0].remote("n1", identity, ("value",))
        assert rref.to_here() == "value"
        assert nodes[0].rpc_sync("n1", fetch, (rref,)) == ("n1", True, "value")
        with pytest.raises(RpcError, match="another node"):
            nodes[1].rpc_sync("n0", identity, (rref,))
        del rref
        wait_until(lambda: not farcall.debug.references(nodes[1]).owned)
    finally:
        ending = [threading.Thread(target=node.shutdown) for node in nodes]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


def test_references_are_generic_under_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import farcall

            def length(text: str) -> int:
                return len(text)

            there: farcall.RRef[int] = farcall.remote("w1", length, ("abc",))
            here = farcall.RRef(["a"])
            reveal_type(there.to_here())
            reveal_type(here.local_value())
            wrong: farcall.RRef[str] = farcall.remote("w1", length)
            """
        )
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=100)
    lines = [line.partition(": ")[2].replace("builtins.", "") for line in done.stdout.splitlines()]
    assert lines[:2] == ['note: Revealed type is "int"', 'note: Revealed type is "list[str]"'], done.stdout
    assert ["error" in line for line in lines[2:]] == [True], done.stdout


@farcall.functions.async_execution
def never_made() -> torch.futures.Future[int]:
    return torch.futures.Future()


class MadeLate:
    """A value with a method, made late or never."""

    def get(self) -> int:
        return 1


def make_late() -> MadeLate:
    threading.Event().wait(0.3)
    return MadeLate()


def fail_late() -> None:
    threading.Event().wait(0.2)
    raise ValueError("late and wrong")


def wait_future(rref: Any) -> str:
    try:
        rref._get_future().wait()
    except Exception as error:
        return str(error)
    return "done"


def ask_early(rank: int) -> None:
    if rank:
        return
    # The type of what is not there yet: each question has its own time, here and elsewhere.
    for to in ("w0", "w1"):
        with pytest.raises((RpcTimeout, RuntimeError)):
            farcall.remote(to, never_made, timeout=0.1)._get_type(timeout=5.0)
        late = farcall.remote(to, make_late)
        with pytest.raises((RpcTimeout, RuntimeError)):
            late._get_type(timeout=0.01)
        assert late._get_type() is MadeLate
        with pytest.raises(ValueError, match="at least 0"):
            late.to_here(timeout=-5)
        with pytest.raises(TypeError, match="number of seconds"):
            late.to_here(timeout="soon")  # type: ignore[arg-type]
    # Who received a reference learns the end of its creation as well.
    assert "late and wrong" in farcall.rpc_sync("w1", wait_future, (farcall.remote("w1", fail_late),))
    assert farcall.rpc_sync("w1", wait_future, (farcall.remote("w1", make_late),)) == "done"
    # A method of an object that never comes: its result does not come, either.
    missing = farcall.remote("w1", never_made, timeout=0.2)
    with pytest.raises((RpcTimeout, RuntimeError), match="timeout"):
        missing.remote(timeout=0).get().to_here(timeout=0)
    farcall.shutdown(graceful=False)  # w1 would wait for what never comes


def ask_early_alone(rank: int, port: int) -> None:
    farcall.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}"),
    )
    if rank:
        farcall.shutdown()
    else:
        ask_early(rank)


def test_questions_before_the_value_is_there() -> None:
    finish(start_processes(2, ask_early_alone, free_port()), may_fail=[1])


def make_at_owner() -> Any:
    return farcall.remote("w0", len, ("four",))


def fetch_from_owner() -> int:
    length: int = farcall.rpc_sync("w2", make_at_owner).to_here()
    return length


def asked_before_the_creation_came(rank: int) -> None:
    if rank:
        return
    node: Any = api.current_node()
    io_thread_waits = threading.Event()

    def wait_for_the_question() -> None:
        # Meanwhile the creating call of w2 is not read. What comes from w1 is read by the thread that waits for w1.
        io_thread_waits.set()
        deadline = time.monotonic() + PATIENCE_S
        while not any(request.peer.info.name == "w1" for request in node.server.active) and time.monotonic() < deadline:
            time.sleep(0.001)

    node._loop.call_soon(wait_for_the_question)
    assert io_thread_waits.wait(PATIENCE_S)
    assert farcall.rpc_sync("w1", fetch_from_owner) == 4


def test_a_value_that_is_asked_for_before_its_creation_came_is_waited_for() -> None:
    run_cluster(3, asked_before_the_creation_came)
