"""References whose owner is not known yet: messages that bring them wait for word of it, and others pass them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.rpc.references import NodeReferences
from farcall.runtime.node import runtime_of

kept: list[Any] = []


def value_of(rref: farcall.RRef[str]) -> str:
    return rref.to_here()


def hand_out() -> Any:
    return kept[0]


class Log:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, what: str, rref: farcall.RRef[str] | None = None) -> list[str]:
        self.calls.append(what)
        return self.calls


@contextmanager
def unheard_of(node: farcall.Node, owner: str) -> Iterator[Any]:
    """``node`` has not heard of ``owner`` yet; what is yielded announces it. Before the end, messages have to wait."""
    references = runtime_of(node).part(NodeReferences)
    peer: Any = runtime_of(node).peer(owner)
    with references._lock:
        del references._workers[peer.number]

    def announce() -> None:
        wait_until(lambda: references._deferring)
        references._on_peer_joined(peer)

    yield announce


def test_a_request_waits_and_others_pass_it() -> None:
    with team(None, 3) as (caller, callee, _):
        rref = caller.remote("w2", str, (13,))
        rref.to_here()
        with unheard_of(callee, "w2") as announce:
            future = caller.rpc_async("w1", value_of, (rref,))
            assert caller.rpc_sync("w1", int, ("7",)) == 7
            assert not future.done()
            announce()
        assert future.wait() == "13"
        del rref


def test_an_answer_waits_however_it_is_waited_for() -> None:
    with team(None, 3) as (callee, caller, _):
        kept.append(callee.remote("w2", str, (13,)))
        kept[0].to_here()
        asks = [
            lambda: caller.rpc_sync("w0", hand_out),
            lambda: caller.rpc_async("w0", hand_out).wait(),
            lambda: farcall.gather(caller.rpc_async("w0", hand_out)).wait()[0],
        ]
        for ask in asks:
            got: list[Any] = []
            with unheard_of(caller, "w2") as announce:
                thread = threading.Thread(target=lambda ask=ask, got=got: got.append(ask()))
                thread.start()
                announce()
                thread.join(LONG_S)
            assert got.pop().to_here() == "13"
        kept.clear()
        del ask, asks, thread


def test_calls_of_one_object_keep_their_order() -> None:
    with team(None, 3) as (caller, callee, _):
        log = caller["w1"].options(serial=True).create(Log)
        rref = caller.remote("w2", str, (13,))
        assert log.rpc_sync().note("a") == ["a"]
        with unheard_of(callee, "w2") as announce:
            futures = [log.rpc_async().note("b", rref), log.rpc_async().note("c"), log.rpc_async().note("d", rref)]
            futures.append(log.rpc_async().note("e"))
            announce()
        assert futures[-1].wait() == ["a", "b", "c", "d", "e"]
        del log, rref, futures
