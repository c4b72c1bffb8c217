"""Destructors that call: a garbage collection runs them anywhere, also amid farcall's own reading and writing."""

from __future__ import annotations

import functools
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.waiting import PATIENCE_S, wait_until

import farcall
from farcall.errors import RpcError

ROUNDS = 1500
LARGE = torch.ones(1 << 15)
served: Counter[object] = Counter()
leave = threading.Event()


def stay() -> bool:
    return leave.wait(PATIENCE_S)


def serve(what: object) -> object:
    served[what] += 1
    return what


class Cyclic:
    """Only a garbage collection ends it."""

    node: farcall.Node
    ended = 0
    refused = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        number = Cyclic.ended = Cyclic.ended + 1
        try:
            assert self.node.rpc_sync("w1", serve, (("destructor", number),)) == ("destructor", number)
        except RpcError as error:
            if "a destructor cannot wait for another worker here" not in str(error):
                raise
            Cyclic.refused += 1


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)


def test_a_destructor_that_waits_breaks_no_link(eager_collector: None) -> None:
    """Its answer would be read amid a frame of the interrupted thread's. Its call is made all the same, once."""
    with team([None] * 2, 2) as nodes:
        Cyclic.node = nodes[0]
        for number in range(ROUNDS):
            Cyclic()
            futures = [nodes[0].rpc_async("w1", serve, ((number, other),)) for other in range(number % 4)]
            assert nodes[0].rpc_sync("w1", serve, (number,)) == number
            assert [future.wait() for future in futures] == [(number, other) for other in range(number % 4)]
        gc.disable()
        ended = Cyclic.ended
        try:
            assert Cyclic.refused
            wait_until(
                lambda: sum(1 for what in served if isinstance(what, tuple) and what[0] == "destructor") == ended
            )
            assert set(served.values()) == {1}
        finally:
            gc.enable()
            gc.set_threshold(700)
            gc.collect()  # the rest, while there is a node


class Sender:
    """Only a garbage collection ends it; then it calls."""

    def __init__(self, call: Callable[[], object], ends: list[object]) -> None:
        self.itself = self
        self.call = call
        self.ends = ends

    def __del__(self) -> None:
        self.ends.append(self.call())


first: Any = None  # these two: in the globals that the test gives to `collects`
original: Any = None


def collects(self: Any, *args: Any) -> Any:
    first()
    gc.collect()
    return original(self, *args)


@pytest.mark.parametrize(("place", "to"), [("pool._arena.take", "w1"), ("executor._spawn", "w0")])
def test_a_destructor_that_interrupts_the_holder_of_a_lock_sends_all_the_same(place: str, to: str) -> None:
    """Of shared memory, of the workers: large tensors, and calls of this node, need them."""
    *path, method = place.split(".")
    ends: list[farcall.Future[torch.Tensor]] = []
    leave.clear()
    with team([None] * 2, 2) as nodes, pytest.MonkeyPatch.context() as patch:
        for _ in range(3):  # the first ones introduce the segments
            nodes[0].rpc_sync("w1", torch.neg, (LARGE,))
        owner = functools.reduce(getattr, path, nodes[0]._runtime)
        made = [Sender(lambda: nodes[0].rpc_async(to, torch.neg, (LARGE,)), ends)]
        # As if the collection began in that very method of farcall's.
        found = {"first": made.clear, "gc": gc, "original": getattr(type(owner), method)}
        amid = FunctionType(collects.__code__, {"__name__": type(owner).__module__, **found})
        patch.setattr(type(owner), method, amid)
        futures = [nodes[0].rpc_async("w1" if place.startswith("pool") else "w0", torch.neg, (LARGE,))]
        futures += [nodes[0].rpc_async("w0", stay) for _ in range(20 * place.startswith("executor"))]
        wait_until(lambda: ends)
        leave.set()
        assert torch.equal(ends[0].wait(), -LARGE)
        assert torch.equal(futures[0].wait(), -LARGE)
        made.clear()
