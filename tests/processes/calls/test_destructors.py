"""Destructors that call: a garbage collection runs them anywhere, also amid farcall's own reading and writing."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.kit.team import team
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import RpcError

ROUNDS = 1500
served: Counter[object] = Counter()


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
