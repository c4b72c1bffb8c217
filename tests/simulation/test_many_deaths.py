"""Many members that die at once, in a group of a thousand on two processors: what the others send, dial and believe.

The members of one process die together. If each survivor's part in the news of that grows with the number of the dead,
the survivors have no time to answer each other, hold each other for unresponsive, and spread that, too.
"""

from __future__ import annotations

import pytest
from tests.simulation.busy_cluster import BusyCluster
from tests.simulation.membership_cluster import Process

from farcall.protocol.membership.neighbours import ORDERS
from farcall.protocol.membership.probing import CONFIRMED_S

KNOWN_S = 5.0
"""As one death, in `test_news.py`."""
NEIGHBOURS = 2 * ORDERS


@pytest.mark.parametrize(
    ("count", "victims", "processors", "one_host"), [(400, 20, 1, False), (1_000, 50, 2, False), (1_000, 50, 2, True)]
)
def test_deaths_of_many_at_once_are_known_as_quickly_as_one(
    count: int, victims: int, processors: int, one_host: bool
) -> None:
    known_s = KNOWN_S if one_host else CONFIRMED_S + KNOWN_S
    cluster = BusyCluster(1, count, processors, one_host=one_host)
    cluster.run_until(10.0)
    cluster.forget_account()
    dead = list(cluster.nodes.values())[-victims:]
    for node in dead:
        cluster.end(node, Process.CRASHED)
    for node in dead:
        cluster.expect_end_known(node, known_s)
    cluster.run_until(cluster.now + known_s)
    assert not cluster.false_deaths
    survivors = count - victims
    assert cluster.told["MemberRecovered"] <= survivors / 10, "those who live were held for unresponsive"
    # Each neighbour dials, and so do those whom it asks; nobody else.
    assert len(cluster.dials) <= victims * NEIGHBOURS * 4
    assert sum(cluster.dials.values()) <= 1.5 * victims * NEIGHBOURS * 4
    assert cluster.sent["Gossip"] <= 4 * survivors * known_s
    assert cluster.worked_s <= 12e-3 * survivors


@pytest.mark.parametrize("victims", [1, 20])
def test_the_dead_are_left_in_peace(victims: int) -> None:
    """After a partition the dead come back, so they are tried again; all members together do that now and then."""
    cluster = BusyCluster(2, 200, 200)
    dead = list(cluster.nodes.values())[-victims:]
    for node in dead:
        cluster.end(node, Process.CRASHED)
    cluster.run_until(30.0)
    cluster.forget_account()
    cluster.run_until(90.0)
    assert 0 < sum(cluster.dials.values()) <= 60 * 4.0


def test_members_that_are_starved_are_not_asked_about() -> None:
    """Each question about a member makes three others connect to it: it would have even less time to answer."""
    cluster = BusyCluster(3, 200, 200)
    cluster.starved = {node.incarnation for node in cluster.sample(cluster.members(), 60)}
    cluster.run_until(120.0)
    assert cluster.told["MemberUnresponsive"] == 0
    assert cluster.sent["Ask"] == 0
    assert not cluster.false_deaths
