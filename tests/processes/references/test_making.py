"""References between real processes: how they are made, and questions that come before the value."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kit.ports import held_port
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.processes.calls.callees import Gate
from tests.processes.references.callees import (
    Counter,
    add,
    boom,
    complete,
    fetch,
    identity,
    is_kept,
    kept_future,
    nothing_is_left,
)

import farcall
from farcall import api
from farcall.errors import (
    RpcError,
    RpcTimeout,
)
from farcall.runtime.node import runtime_of_thread
from farcall.testing.cluster import (
    finish,
    run_cluster,
    start_processes,
    temporary_file_url,
)


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


def busy_workers() -> int:
    node = runtime_of_thread()
    assert node is not None
    return node.executor.busy


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


def wait_for_futures(rank: int) -> None:
    if rank != 0:
        return
    done: list[str] = []
    for to in ("w1", "w0"):
        rref = farcall.remote(to, Gate.wait, (f"made at {to}",))
        future = rref._get_future()
        future.add_done_callback(lambda _: done.append(threading.current_thread().name))
        farcall.rpc_sync(to, Gate.open, (f"made at {to}",))
        assert future.wait() is None
        assert rref._get_future().wait() is None
        with pytest.raises(ValueError, match="at once"):
            farcall.remote(to, boom, ("at once",))._get_future().wait()
    wait_until(lambda: len(done) == 2)
    assert all("worker" in name for name in done), done


def test_the_future_of_a_creation() -> None:
    run_cluster(2, wait_for_futures)


def wait_for_what_is_being_made(rank: int) -> None:
    if rank != 0:
        return
    rref = farcall.remote("w1", kept_future, ("later",))
    wait_until(lambda: farcall.rpc_sync("w1", is_kept, ("later",)))
    third = farcall.rpc_async("w2", fetch, (rref,))
    futures = [rref.rpc_async().plus(1) for _ in range(30)]
    made = [rref.remote().plus(1) for _ in range(30)]
    types = rref._get_type(blocking=False)
    # If each waited in a thread, that thread would be busy until the end. Now at most the one that answers us is.
    wait_until(lambda: farcall.rpc_sync("w1", busy_workers) <= 1)
    assert not any(future.done() for future in futures)
    farcall.rpc_sync("w1", complete, ("later", Counter(0)))
    assert sorted([future.wait() for future in futures] + [one.to_here() for one in made]) == list(range(1, 61))
    assert third.wait()[2].count >= 0
    assert types.wait() is Counter
    del rref, third, futures, made, types
    nothing_is_left(["w0", "w1", "w2"])


def test_no_thread_waits_for_a_value_that_is_still_being_made() -> None:
    run_cluster(3, wait_for_what_is_being_made)


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


@farcall.functions.async_execution
def never_made() -> torch.futures.Future[int]:
    return torch.futures.Future()


class MadeLate:
    """A value with a method, made late or never."""

    def get(self) -> int:
        return 1


def make_late(opened: str) -> MadeLate:
    Gate.wait(opened)
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
        late = farcall.remote(to, make_late, (f"asked {to}",))
        with pytest.raises((RpcTimeout, RuntimeError)):
            late._get_type(timeout=0.01)
        farcall.rpc_sync(to, Gate.open, (f"asked {to}",))
        assert late._get_type() is MadeLate
        with pytest.raises(ValueError, match="more than 0 seconds, not -5"):
            late.to_here(timeout=-5)
        with pytest.raises(TypeError, match="number of seconds"):
            late.to_here(timeout="soon")  # type: ignore[arg-type]
    # Who received a reference learns the end of its creation as well.
    assert "late and wrong" in farcall.rpc_sync("w1", wait_future, (farcall.remote("w1", fail_late),))
    assert farcall.rpc_sync("w1", wait_future, (farcall.remote("w1", make_late, ("asked w1",)),)) == "done"
    # A method of an object that never comes: its result does not come, either.
    missing = farcall.remote("w1", never_made, timeout=0.2)
    with pytest.raises((RpcTimeout, RuntimeError), match="timeout"):
        missing.remote(timeout=None).get().to_here(timeout=None)
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
    finish(start_processes(2, ask_early_alone, held_port()), may_fail=[1])


def make_at_owner() -> Any:
    return farcall.remote("w0", len, ("four",))


def fetch_from_owner() -> int:
    length: int = farcall.rpc_sync("w2", make_at_owner).to_here()
    return length


QUESTION_S = 10.0
"""Longer than the question takes. Should it not come, the test is still right, though it shows nothing."""


def asked_before_the_creation_came(rank: int) -> None:
    if rank:
        return
    node: Any = api.current_runtime()
    io_thread_waits = threading.Event()

    def wait_for_the_question() -> None:
        # Meanwhile the creating call of w2 is not read. What comes from w1 is read by the thread that waits for w1.
        io_thread_waits.set()
        deadline = time.monotonic() + QUESTION_S
        while not any(request.peer.info.name == "w1" for request in node.server.active) and time.monotonic() < deadline:
            time.sleep(0.001)

    node.loop.call_soon(wait_for_the_question)
    assert io_thread_waits.wait(PATIENCE_S)
    assert farcall.rpc_sync("w1", fetch_from_owner) == 4


def test_a_value_that_is_asked_for_before_its_creation_came_is_waited_for() -> None:
    run_cluster(3, asked_before_the_creation_came)
