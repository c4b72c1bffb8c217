"""Groups with a table of what others may do: a member that lies ends nobody, and the honest ones go on as in others."""

from __future__ import annotations

import msgspec
import pytest
from tests.simulation.membership_cluster import Cluster, Node, Process
from tests.simulation.test_membership import check_nobody_wronged, churn, run, seeds

from farcall.protocol.membership.events import MembershipOptions
from farcall.protocol.membership.messages import (
    Ack,
    Deny,
    Entries,
    Gossip,
    Message,
    Obituary,
    Ping,
    Resurfaced,
    Status,
    Update,
)
from farcall.protocol.membership.table import MAX_LEAP

OPTIONS = MembershipOptions(accusers=2, name_kept_s=10.0)


class Liar:
    """A member that says of random others whatever may end them, to random members, many times a second."""

    def __init__(self, cluster: Cluster, node: Node, span_s: float) -> None:
        self.cluster = cluster
        self.node = node
        self.random = cluster.random
        for turn in range(round(span_s * 20)):
            cluster.at(cluster.now + turn / 20, self.lie)

    def lie(self) -> None:
        others = [node for node in self.cluster.members() if node is not self.node]
        to, victim = self.random.choice(others), self.random.choice(others)
        self.cluster.send(self.node, to.incarnation, self.about(victim, to))

    def about(self, victim: Node, to: Node) -> Message:
        status = self.random.choice([Status.UNRESPONSIVE, Status.DEAD, Status.LEFT])
        version = self.random.choice([0, self.random.randrange(5), MAX_LEAP, 2**53])
        updates = (Update(victim.incarnation, status, version, victim.member, "so I say"),)
        stolen = msgspec.structs.replace(victim.member, incarnation=self.random.randrange(1, 2**60), admission=2**20)
        theft = (Update(stolen.incarnation, Status.ALIVE, 0, stolen),)
        lies = [
            Gossip(updates),
            Ping(updates),
            Ack(updates),
            Entries((0,), updates, False),
            Deny(victim.incarnation, updates),
            Gossip(theft),
            Entries((0,), theft, True),
            Obituary(to.incarnation, "so I say", 2**53, 0),
            Obituary(to.incarnation, "so I say", 2**53, 0, hinted=True),
            Obituary(to.incarnation, "so I say", 2**53, 0, alone=True),
            Resurfaced(victim.incarnation),
        ]
        return self.random.choice(lies)


@seeds(10, 500)
def test_a_liar_ends_nobody(seed: int) -> None:
    """But for itself: whom it calls dead, it is dead to."""
    cluster = Cluster(seed, 4 + seed % 9, OPTIONS, is_fixed=seed % 2 > 0)
    run(cluster, seed, 2)
    honest = cluster.members()
    liar = honest.pop(cluster.random.randrange(len(honest)))
    Liar(cluster, liar, 60)
    run(cluster, seed, 60)
    assert all(node.is_member for node in honest), f"seed {seed}: {[node.expelled for node in honest]}"
    wronged = [text for text in cluster.false_deaths if f" {liar.member.name} " not in text]
    assert not wronged, f"seed {seed}: {wronged[:5]}"
    incarnations = {node.incarnation for node in honest}
    for node in honest:
        table = node.machine.table
        assert {*table.others, table.me} - {liar.incarnation} == incarnations, f"seed {seed}: {node.member.name}"


@seeds(20, 500)
def test_small_clusters_with_churn_and_loss(seed: int) -> None:
    churn(seed, size=5 + seed % 10, events=seed % 3, span_s=10, options=OPTIONS)


@pytest.mark.parametrize("how", [Process.CRASHED, Process.SILENT])
def test_in_a_large_group_everybody_finds_a_death_out_by_itself(how: Process) -> None:
    """Later than where one tells the other: each dials, or waits until the silence has lasted."""
    options = msgspec.structs.replace(OPTIONS, full_mesh=8)
    cluster = Cluster(1, 60, options)
    run(cluster, 1, 5)
    dead = cluster.random.choice(cluster.members())
    cluster.end(dead, how)
    cluster.expect_end_known(dead, 10.0 if how is Process.CRASHED else 2 * options.death_bound_s(60))
    run(cluster, 1, 2 * options.death_bound_s(60) + 1)
    check_nobody_wronged(cluster, 1)
    cluster.check_converged()


@seeds(2, 100)
def test_after_a_long_partition_the_larger_side_stays(seed: int) -> None:
    cluster = Cluster(seed, 7, OPTIONS, returns=True)
    run(cluster, seed, 2)
    smaller = cluster.sample(cluster.members(), 2)
    cluster.split(smaller)
    run(cluster, seed, 3 * OPTIONS.death_bound_s(7))
    cluster.heal()
    run(cluster, seed, 20 * OPTIONS.reconnect_interval_s)
    assert all(node.expelled for node in smaller), f"seed {seed}"
    assert len(cluster.members()) == 7, f"seed {seed}"
    cluster.check_converged()
