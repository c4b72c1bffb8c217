"""References between real processes: the value, its methods and its type, and what is known of references."""

from __future__ import annotations

import asyncio
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.type_check import run_mypy
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate
from tests.processes.references.callees import Counter, add, boom, count, identity, nothing_is_left

import farcall
from farcall.errors import (
    RpcError,
    RpcTimeout,
)
from farcall.testing.cluster import (
    run_cluster,
)


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
    # The value's copy may overtake the answer to the creation.
    wait_until(theirs.confirmed_by_owner, "the owner's word that it knows the reference")
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
        farcall.remote("w1", Gate.wait, ("the type",))._get_type(timeout=0.05)
    farcall.rpc_sync("w1", Gate.open, ("the type",))
    del mine, theirs, first, second, large, slow
    nothing_is_left(["w0", "w1"])


def test_a_reference_tells_what_it_refers_to() -> None:
    run_cluster(2, use_values)


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
            counter.rpc_sync(timeout=0.05).sleep_until(f"awake {to}")
        with pytest.raises(RpcTimeout):
            counter.rpc_async(timeout=0.05).sleep_until(f"awake {to}").wait()
        with pytest.raises(RpcTimeout):
            counter.remote(timeout=0.05).sleep_until(f"awake {to}").to_here()
        farcall.rpc_sync(to, Gate.open, (f"awake {to}",))
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


def test_debug_information() -> None:
    run_cluster(3, count)


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
    done = run_mypy(program, "--no-error-summary")
    lines = [line.partition(": ")[2].replace("builtins.", "") for line in done.stdout.splitlines()]
    assert lines[:2] == ['note: Revealed type is "int"', 'note: Revealed type is "list[str]"'], done.stdout
    assert ["error" in line for line in lines[2:]] == [True], done.stdout
