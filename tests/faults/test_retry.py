"""Calls that are made again: only where asked for, only where the network failed them, and never beyond their time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import AnswerLost, Cancelled, Delivery, NetworkError, PeerDead, ReferenceLost, RpcTimeout
from farcall.rpc.retry import Pauses
from farcall.runtime.io.sigint import Gate
from farcall.runtime.node import runtime_of
from farcall.testing.faults import Faults

LARGE = 1 << 18
QUICKLY = farcall.Retry(attempts=3, backoff_s=0.001)

ran: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _nothing_ran_before() -> None:
    ran.clear()


def run(name: str, *_: Any) -> str:
    ran[name] += 1
    return name


def large(name: str) -> torch.Tensor:
    ran[name] += 1
    return torch.ones(LARGE)


def call_on(to: str, name: str) -> str:
    ran[f"through {name}"] += 1
    return farcall.rpc_sync(to, run, (name,))


def ways(node: farcall.Node, name: str, **more: Any) -> dict[str, Any]:
    return {
        "sync": lambda: node.rpc_sync("w1", run, (name,), **more),
        "async": lambda: node.rpc_async("w1", run, (name,), **more).wait(),
        "remote": lambda: node.remote("w1", run, (name,), **more).to_here(),
    }


@pytest.mark.parametrize("way", ["sync", "async", "remote"])
def test_what_was_not_sent_is_sent_again_if_asked(way: str) -> None:
    faults = Faults()
    with team(faults) as nodes:
        kind = "create" if way == "remote" else "call"
        with faults.fail(kind=kind, to="w1", count=2) as rule:
            assert ways(nodes[0], "a", retry=QUICKLY)[way]() == "a"
            assert rule.hits == 2
        with faults.fail(kind=kind, to="w1", count=3) as rule:
            with pytest.raises(NetworkError, match="injected") as caught:
                ways(nodes[0], "b", retry=QUICKLY)[way]()
            assert caught.value.delivery == Delivery.NOT_SENT
            assert rule.hits == 3
        with faults.fail(kind=kind, to="w1", count=1), pytest.raises(NetworkError):
            ways(nodes[0], "c")[way]()
        assert dict(ran) == {"a": 1}


def test_a_large_message_that_a_connection_lost_is_sent_again() -> None:
    faults = Faults()
    value = torch.ones(LARGE)
    with team(faults, transports=("tcp",)) as nodes, faults.cut(kind="request", to="w1", count=2):
        assert nodes[0].rpc_sync("w1", run, ("a", value), retry=QUICKLY) == "a"
        assert nodes[0].remote("w1", run, ("b", value), retry=QUICKLY).to_here() == "b"
        assert dict(ran) == {"a": 1, "b": 1}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_what_ran_is_called_again_only_if_that_was_asked_for_too(way: str) -> None:
    faults = Faults()
    with team(faults, transports=("tcp",)) as nodes:

        def call(name: str, retry: farcall.Retry) -> torch.Tensor:
            if way == "sync":
                return nodes[0].rpc_sync("w1", large, (name,), retry=retry)
            return nodes[0].rpc_async("w1", large, (name,), retry=retry).wait()

        with faults.cut(kind="response", to="w0", count=1), pytest.raises(AnswerLost):
            call("a", QUICKLY)
        with faults.cut(kind="response", to="w0", count=1):
            assert call("b", farcall.Retry(backoff_s=0.001, executed=True)).sum() == LARGE
        assert dict(ran) == {"a": 1, "b": 2}


def test_the_failure_of_a_call_that_the_function_made_is_not_that_of_ours() -> None:
    faults = Faults()
    with team(faults, 3) as nodes, faults.fail(kind="call", sender="w1", to="w2", count=2):
        with pytest.raises(NetworkError, match="injected"):
            nodes[0].rpc_sync("w1", call_on, ("w2", "a"), retry=QUICKLY)
        assert dict(ran) == {"through a": 1}
        retry = farcall.Retry(backoff_s=0.001, executed=True)
        assert nodes[0].rpc_sync("w1", call_on, ("w2", "b"), retry=retry) == "b"
        assert dict(ran) == {"through a": 1, "through b": 2, "b": 1}


def test_errors_of_functions_and_of_arguments_are_not_tried_again() -> None:
    with team([None, None]) as nodes:
        with pytest.raises(ZeroDivisionError):
            nodes[0].rpc_sync("w1", divmod, (1, 0), retry=QUICKLY)
        with pytest.raises(ZeroDivisionError):
            nodes[0].rpc_async("w1", divmod, (1, 0), retry=QUICKLY).wait()
        with pytest.raises(farcall.errors.SerializationError):
            nodes[0].rpc_async("w1", run, (threading.Lock(),), retry=QUICKLY)
        with pytest.raises(TypeError, match=r"farcall\.Retry, not int"):
            nodes[0].rpc_sync("w1", run, ("a",), retry=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_pause_that_would_take_too_long_is_not_begun(way: str) -> None:
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="call", to="w1", count=None) as failing:
        an_hour = farcall.Retry(attempts=1000, backoff_s=3600.0, longest_backoff_s=3600.0)
        with pytest.raises(NetworkError, match="injected"):  # and not after an hour
            ways(nodes[0], "a", retry=an_hour, timeout=60.0)[way]()
        assert failing.hits == 1
        moments = farcall.Retry(attempts=1_000_000, backoff_s=0.2, factor=1.0)
        # And not after a million attempts. The last one may begin just before the timeout, which is over first then.
        with pytest.raises((NetworkError, RpcTimeout), match=r"injected|more than set timeout"):
            ways(nodes[0], "a", retry=moments, timeout=2.0)[way]()


class LateClock:
    """The clock of the module of retries, past the deadline whenever a pause ends, as on a machine that is busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        after = Pauses.after
        clock = self

        class LateGate(Gate):
            def wait(self, timeout_s: float = -1) -> bool:
                in_time = super().wait(timeout_s)
                clock.turn()
                return in_time

        def after_and_late(self: Pauses, pause_s: float, act: Callable[[], None], give_up: Any) -> None:
            def act_late() -> None:
                clock.turn()
                act()

            after(self, pause_s, act_late, give_up)

        monkeypatch.setattr("farcall.rpc.retry.monotonic", lambda: monotonic() + self._ahead_s)
        monkeypatch.setattr("farcall.rpc.retry.Gate", LateGate)
        monkeypatch.setattr(Pauses, "after", after_and_late)

    def turn(self) -> None:
        self._ahead_s += 2 * LONG_S


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_pause_that_ends_late_leaves_the_error_that_came_before_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="call", to="w1", count=None) as failing:
        LateClock(monkeypatch)
        with pytest.raises(NetworkError, match="injected"):
            ways(nodes[0], "a", retry=QUICKLY, timeout=LONG_S)[way]()
        assert failing.hits == 1


may_end = threading.Event()


def wait_to_end() -> str:
    may_end.wait()
    return "done"


def test_a_use_of_what_is_still_being_created_waits_no_longer_than_it_may() -> None:
    may_end.clear()
    with team(Faults()) as nodes:
        try:
            rref = nodes[0].remote("w1", wait_to_end, timeout=None, retry=QUICKLY)
            for use in (lambda it: it.to_here(timeout=0.05), lambda it: it.rpc_sync(timeout=0.05).upper()):
                with pytest.raises(RpcTimeout, match="w1") as caught:
                    use(rref)
                assert caught.value.delivery == Delivery.NOT_SENT
                del caught
        finally:
            may_end.set()
        assert rref.to_here() == "done"
        del rref


def test_the_dead_are_called_in_vain() -> None:
    with team([None, None]) as nodes:
        nodes[1].shutdown(graceful=False)
        for way, error in (("sync", PeerDead), ("async", PeerDead), ("remote", ReferenceLost)):
            with pytest.raises(error):
                ways(nodes[0], "a", retry=QUICKLY)[way]()
        nodes[0].shutdown(graceful=False)


def test_a_pause_does_not_outlive_its_node() -> None:
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="request", to="w1", count=None) as rule:
        slow = farcall.Retry(backoff_s=30.0)
        future = nodes[0].rpc_async("w1", run, ("a",), retry=slow)
        rref = nodes[0].remote("w1", run, ("b",), retry=slow)
        rule.wait_hits(2)
        wait_until(lambda: len(runtime_of(nodes[0]).part(Pauses)._waiting) == 2)
        for node in nodes:
            node.shutdown(graceful=False)
        with pytest.raises(Cancelled, match="shut down"):
            future.wait()
        with pytest.raises((Cancelled, farcall.errors.NotInitialized)):
            rref.to_here()
        assert not ran


def test_a_graceful_shutdown_waits_for_a_pause() -> None:
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="request", to="w1", count=1) as rule:
        future = nodes[0].rpc_async("w1", run, ("a",), retry=farcall.Retry(backoff_s=0.3, jitter=0.0))
        rule.wait_hits(1)
    assert future.wait() == "a"
