"""No torn, lost or mixed version, whatever the order of messages, and whoever dies: seeded schedules."""

from __future__ import annotations

import gc
import os

import pytest
from tests.simulation.weights_cluster import Cluster, Member

from farcall.protocol.weights.publisher import PublisherState
from farcall.protocol.weights.subscriber import SubscriberState

SEEDS = range(2_000 if os.environ.get("FARCALL_SOAK") == "full" else 100)
STEPS = 150
MEMBERS = 4


def run(seed: int) -> Cluster:
    """A schedule: what programs do, and what happens by itself, in any order."""
    cluster = Cluster(seed)
    source = cluster.random
    for _ in range(MEMBERS):
        cluster.join()
    cluster.publish(source.choice(cluster.members))
    for _ in range(STEPS):
        member = source.choice(cluster.alive)
        what = source.random()
        if what < 0.10:
            cluster.subscribe(member)
        elif what < 0.13:
            cluster.unsubscribe(member)
        elif what < 0.25:
            for one in cluster.alive:
                cluster.push(one)
        elif what < 0.35:
            cluster.read(member)
        elif what < 0.42:
            cluster.let_go(member)
        elif what < 0.45:
            cluster.publish(member)
        elif what < 0.46:
            cluster.close_publication(member)
        elif what < 0.48:
            cluster.cut_links(*source.sample(cluster.alive, 2))
        elif what < 0.51 and len(cluster.alive) > 2:
            cluster.kill(member)
            cluster.join()
        else:
            for _ in range(source.randrange(12)):
                cluster.background()
        cluster.judge_all()
    return cluster


@pytest.mark.parametrize("seeds", [SEEDS[start::10] for start in range(10)], ids=lambda seeds: f"from {seeds[0]}")
def test_every_version_that_is_read_is_whole(seeds: range) -> None:
    for seed in seeds:
        try:
            cluster = run(seed)
            cluster.settle()
            come_to_rest(cluster)
            cluster.close()
        except BaseException:
            print("seed", seed)
            raise


def nothing_is_missing(cluster: Cluster, active: list[Member]) -> None:
    """At rest every subscriber has the newest version of the publisher, and waits for none that is not to come."""
    for member in cluster.alive:
        if member.subscription is None:
            continue
        machine = member.subscription._versions.machine
        assert machine.state is not SubscriberState.ENDED or machine.is_over, member.name
        assert not machine.arriving, (member.name, machine.arriving)
        if active and active[0].publication is not None and active[0].publication.version is not None:
            assert member.subscription.version is not None, member.name
            assert member.subscription.version.number == active[0].publication.version.number, member.name


def come_to_rest(cluster: Cluster) -> None:
    """At rest one publisher is left at most; its next version comes to all who want it, and memory is bounded."""
    source = cluster.random
    active = [
        member
        for member in cluster.alive
        if member.publication is not None and member.publication.machine.state is PublisherState.PUBLISHED
    ]
    assert len(active) <= 1, [member.name for member in active]
    nothing_is_missing(cluster, active)
    for member in cluster.alive:
        cluster.subscribe(member)
        member.held.clear()
    gc.collect()
    publisher = active[0] if active else source.choice(cluster.alive)
    if not active:
        cluster.publish(publisher)
        cluster.settle()
    for _ in range(4):
        cluster.push(publisher)
        cluster.settle()
    assert publisher.publication is not None
    newest = publisher.publication.version
    for member in cluster.alive:
        assert member.subscription is not None
        assert member.subscription.version == newest, member.name
        cluster.read(member)
        member.held.clear()
    gc.collect()
    cluster.settle()
    versions = publisher.publication.versions
    assert len(versions) <= publisher.publication.keep
    assert len(publisher.weights.blocks._blocks) <= publisher.publication.keep + 3
    for member in cluster.alive:
        if member is not publisher:
            assert not [one for one in member.weights._past if one.versions]
