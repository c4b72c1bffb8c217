"""Injected faults in groups without a fixed size: what bad links do to membership."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
from tests.kit.times import AT_ONCE_S
from tests.kit.waiting import wait_until

import farcall
from farcall.options import MembershipOptions
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import temporary_file_url
from farcall.testing.faults import Faults

BOUND_S = 40.0
SUSPICION_S = 1.5
OPTIONS = MembershipOptions(probe_interval_s=0.3, probe_timeout_s=0.25, suspicion_s=SUSPICION_S, reconnect_s=1.0)


class Team:
    """Three members in this process, all with the same faults, and what each was told of the others."""

    def __init__(self, nodes: list[farcall.Node], faults: Faults) -> None:
        self.nodes = nodes
        self.faults = faults
        self.events: list[tuple[str, str, str]] = []
        for node in nodes:
            me = node.get_worker_info().name
            node.on_member(
                lambda event, name=me: self.events.append((name, event.kind, event.worker.name))  # type: ignore[misc]
            )

    def deaths(self) -> list[tuple[str, str, str]]:
        return [event for event in self.events if event[1] == "dead"]


@contextmanager
def team() -> Iterator[Team]:
    url, faults = temporary_file_url(), Faults(seed=3)
    with ExitStack() as stack:
        nodes = []
        for rank in range(3):
            node = farcall.Node(
                f"w{rank}", rank, options=farcall.RpcBackendOptions(init_method=url, membership=OPTIONS)
            )
            with faults.installed():
                node.start()
            stack.callback(node.shutdown, False)
            nodes.append(node)
        wait_until(lambda: all(len(node.workers()) == 3 for node in nodes))
        yield Team(nodes, faults)
        faults.lift_all()


def between(faults: Faults, fault: str) -> list[Any]:
    """Nothing passes between w0 and w1, over this or any later connection."""
    make = getattr(faults, fault)
    return [make(to="w1", sender="w0", count=None), make(to="w0", sender="w1", count=None)]


@pytest.mark.parametrize("fault", ["cut", "half_open"])
def test_one_bad_link_is_no_death_however_long_it_lasts(fault: str) -> None:
    with team() as found:
        assert found.nodes[0].rpc_sync("w1", int, ("6",)) == 6
        rules = between(found.faults, fault)
        rules[0].wait_hits()
        call = found.nodes[0].rpc_async("w1", int, ("7",), timeout=BOUND_S)
        since = monotonic()
        while monotonic() - since < 3 * SUSPICION_S:  # as long as a death takes, and longer
            assert found.nodes[2].rpc_sync("w1", int, ("8",)) == 8
            sleep(0.05)
        assert not call.done()
        for rule in rules:
            rule.lift()
        assert call.wait() == 7
        assert found.deaths() == []


def test_who_is_silent_to_all_but_can_be_connected_to_is_not_dead() -> None:
    """Its host is there, whatever becomes of the connections."""
    with team() as found:
        rules = [found.faults.half_open(sender="w2", count=None), found.faults.half_open(to="w2", count=None)]
        call = found.nodes[0].rpc_async("w2", int, ("7",), timeout=BOUND_S)
        wait_until(lambda: ("w0", "unresponsive", "w2") in found.events)
        wait_until(lambda: (found.nodes[0].members()[2].unresponsive_s or 0.0) > 3 * SUSPICION_S)
        assert found.nodes[0].rpc_sync("w1", int, ("7",)) == 7
        for rule in rules:
            rule.lift()
        assert call.wait() == 7
        wait_until(lambda: ("w0", "recovered", "w2") in found.events)
        assert found.deaths() == []


@pytest.mark.parametrize("kind", ["Join", "Decision", "JoinAnswer"])
def test_who_is_not_answered_asks_again(kind: str) -> None:
    with team() as found:
        rule = found.faults.drop(kind=kind, count=1)
        url = runtime_of(found.nodes[0]).options.init_method
        options = farcall.RpcBackendOptions(init_method=url, membership=OPTIONS)
        since = monotonic()
        with found.faults.installed(), farcall.Node("late", 7, options=options) as late:
            assert monotonic() - since < AT_ONCE_S
            assert rule.hits
            assert late.rpc_sync("w1", int, ("7",)) == 7
