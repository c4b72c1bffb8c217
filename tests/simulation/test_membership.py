"""Clusters of up to a thousand members that come, go, sleep and die, on a network that loses and splits; from a seed.

Safety: while the network holds, nobody is declared dead who lives, however long it sleeps, though one message in
twenty is lost. Liveness: every death, join and leave is known to all within the bound that ``MembershipOptions``
states. Load: what a member sends does not depend on how many there are. A failing run
prints its seed; run it alone with ``-k seed-N``. ``FARCALL_SOAK=full`` runs more seeds, and more churn.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.simulation.membership_cluster import Cluster, Node, Process

from farcall.protocol.membership.events import MembershipOptions
from farcall.protocol.membership.machine import State
from farcall.protocol.membership.messages import MAX_UPDATES
from farcall.protocol.membership.probing import CONFIRMED_S, REFUSED_S

FULL = os.environ.get("FARCALL_SOAK") == "full"
LOSS = 0.05

soak_timeout = pytest.mark.timeout(3600 if FULL else 600)


def seeds(quick: int, full: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seed", range(full if FULL else quick), ids=lambda seed: f"seed-{seed}")


@pytest.fixture(autouse=True)
def no_cycles_to_collect() -> Iterator[None]:
    """A million table entries, and nothing to find in them: the collector would take a third of the time."""
    gc.disable()
    yield
    gc.enable()


def run(cluster: Cluster, seed: int, seconds: float) -> None:
    try:
        cluster.run_until(cluster.now + seconds)
    except AssertionError as failure:
        failure.add_note(f"seed {seed}, at {cluster.now:.2f} s")
        raise


class Churn:
    """Members come, leave, die in two ways, and sleep, for longer than a host may be silent, too."""

    def __init__(self, cluster: Cluster, size: int, events: int, span_s: float) -> None:
        self.cluster = cluster
        self.random = cluster.random
        self.ranks = itertools.count(size)
        self.came: list[Node] = []
        self.went: list[Node] = []
        options = cluster.options
        self.death_s, self.news_s = options.death_bound_s(size), options.news_bound_s(size)
        happenings: list[Callable[[], None]] = [
            self.join,
            self.join,
            self.leave,
            partial(self.die, Process.CRASHED),
            partial(self.die, Process.SILENT),
            self.sleep,
            self.sleep,
        ]
        for _ in range(events):
            cluster.at(cluster.now + self.random.uniform(0, span_s), self.random.choice(happenings))

    def somebody(self) -> Node:
        return self.random.choice([node for node in self.cluster.members() if node.sleeps_until <= self.cluster.now])

    def join(self) -> None:
        rank = next(self.ranks)
        self.came.append(self.cluster.join(f"worker{rank}", rank))

    def leave(self) -> None:
        node = self.somebody()
        self.went.append(node)
        self.cluster.leave(node)
        self.cluster.expect_end_known(node, self.news_s)

    def die(self, how: Process) -> None:
        node = self.somebody()
        self.went.append(node)
        self.cluster.end(node, how)
        self.cluster.expect_end_known(node, self.death_s if how is Process.SILENT else self.news_s)

    def sleep(self) -> None:
        self.cluster.sleep(self.somebody(), self.random.uniform(0.1, 3.0) * self.cluster.options.suspicion_s)


def check_nobody_wronged(cluster: Cluster, seed: int) -> None:
    assert not cluster.false_deaths, f"seed {seed}: {cluster.false_deaths[:5]}"
    wronged = {node.member.name: node.expelled for node in cluster.nodes.values() if node.expelled}
    assert not wronged, f"seed {seed}: {wronged}"


def churn(seed: int, size: int, events: int, span_s: float, options: MembershipOptions | None = None) -> Cluster:
    cluster = Cluster(seed, size, options, loss=LOSS)
    changes = Churn(cluster, size, events, span_s)
    run(cluster, seed, span_s + changes.death_s + 1)
    check_nobody_wronged(cluster, seed)
    assert all(node.is_member or node in changes.went for node in changes.came), f"seed {seed}: somebody did not get in"
    assert cluster.most_updates <= MAX_UPDATES + 2
    try:
        cluster.check_converged()
    except AssertionError as failure:
        failure.add_note(f"seed {seed}")
        raise
    return cluster


@seeds(60, 2_000)
def test_small_clusters_with_churn_and_loss(seed: int) -> None:
    """Small, but never so small that the last one hears nobody."""
    churn(seed, size=5 + seed % 10, events=seed % 3, span_s=10)


@soak_timeout
@seeds(4, 200)
def test_a_hundred_members_with_churn_and_loss(seed: int) -> None:
    churn(seed, size=100, events=40, span_s=20)


@soak_timeout
@seeds(1, 10)
def test_hundreds_of_members_with_churn_and_loss(seed: int) -> None:
    """A thousand in a full run."""
    churn(seed, size=1000 if FULL else 300, events=200 if FULL else 14, span_s=60 if FULL else 2)


@soak_timeout
@seeds(1, 10)
def test_the_load_does_not_grow_with_the_cluster(seed: int) -> None:
    """At rest two messages a second, a fifth of that in a large group; and the same while the same things happen."""
    at_rest, busy = {}, {}
    for size in (10, 100, 1000):
        cluster = Cluster(seed, size)
        run(cluster, seed, 3)
        sent = cluster.messages
        run(cluster, seed, 30)
        at_rest[size] = (cluster.messages - sent) / size / 30
        cluster.end(cluster.random.choice(cluster.members()), Process.CRASHED)
        sent = cluster.messages
        run(cluster, seed, 3)
        busy[size] = (cluster.messages - sent) / size / 3
    assert 1.9 < at_rest[10] < 2.2, at_rest
    assert all(0.38 < at_rest[size] < 0.5 for size in (100, 1000)), at_rest
    # Three members each fifth of a second, a probe, its questions; not more in a large cluster than in a small one.
    assert max(busy.values()) < 20, busy


@soak_timeout
@seeds(2, 50)
def test_a_third_of_the_cluster_dies_at_once(seed: int) -> None:
    size = 60
    cluster = Cluster(seed, size, loss=LOSS)
    run(cluster, seed, 5)
    for node in cluster.random.sample(cluster.members(), size // 3):
        cluster.end(node, cluster.random.choice((Process.CRASHED, Process.SILENT)))
        cluster.expect_end_known(node, 2 * cluster.options.death_bound_s(size))
    run(cluster, seed, 2 * cluster.options.death_bound_s(size) + 1)
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@seeds(10, 200)
def test_a_killed_process_is_known_dead_long_before_the_suspicion_is_over(seed: int) -> None:
    cluster = Cluster(seed, 20)
    run(cluster, seed, 3)
    victim = cluster.random.choice(cluster.members())
    cluster.end(victim, Process.CRASHED)
    cluster.expect_end_known(victim, CONFIRMED_S + 1.0)
    run(cluster, seed, CONFIRMED_S + 2.0)


@seeds(10, 200)
def test_who_is_refused_for_a_moment_is_not_dead(seed: int) -> None:
    """Proxies and NATs restart: between two members, or before one, which still reaches the others itself."""
    cluster = Cluster(seed, 2 + seed % 7)
    run(cluster, seed, 2)
    for _ in range(13):
        one, other = cluster.sample(cluster.members(), 2)
        seconds = cluster.random.uniform(0.1, 3.0)
        if cluster.random.random() < 0.5:
            cluster.refuse_for(one, other, seconds)
        else:
            for node in cluster.members():
                if node is not other:
                    cluster.refuse_for(node, other, seconds, one_way=True)
        run(cluster, seed, cluster.random.uniform(seconds, seconds + 3.0))
    assert not cluster.deaths
    cluster.check_converged()


@seeds(6, 200)
def test_where_no_third_member_can_tell_a_killed_process_is_dead_once_it_was_refused_for_long(seed: int) -> None:
    cluster = Cluster(seed, 2)
    run(cluster, seed, 2)
    survivor, killed = cluster.sample(cluster.members(), 2)
    cluster.end(killed, Process.CRASHED)
    run(cluster, seed, REFUSED_S - 0.1)
    assert not cluster.deaths
    run(cluster, seed, 0.5)
    assert survivor.machine.table.others == []


@seeds(10, 200)
def test_bad_links_are_no_death(seed: int) -> None:
    """One pair in five cannot reach each other, for good; all others can, and say so."""
    cluster = Cluster(seed, 20)
    incarnations = list(cluster.nodes)
    for one, other in itertools.combinations(incarnations, 2):
        if cluster.random.random() < 0.2:
            cluster.cut_pairs.add(frozenset((one, other)))
    run(cluster, seed, 60)
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@seeds(6, 200)
def test_one_that_hears_nobody_or_is_heard_by_nobody_harms_no_other(seed: int) -> None:
    """A half-open network: it accuses all, or is accused by all; when it can hear again, it learns that it is out."""
    cluster = Cluster(seed, 3 + seed)
    run(cluster, seed, 2)
    broken = cluster.random.choice(cluster.members())
    (cluster.deaf if seed % 2 else cluster.mute).add(broken.incarnation)
    run(cluster, seed, 200)
    cluster.deaf.clear()
    cluster.mute.clear()
    run(cluster, seed, 30)
    others = [node for node in cluster.nodes.values() if node is not broken]
    assert all(node.is_member for node in others), f"seed {seed}: {[node.expelled for node in others]}"
    assert broken.expelled, f"seed {seed}"
    cluster.check_converged()


@seeds(6, 200)
def test_the_last_one_on_a_host_knows_at_once_that_all_others_were_killed(seed: int) -> None:
    cluster = Cluster(seed, 4 + seed, one_host=True)
    run(cluster, seed, 2)
    survivor, *killed = cluster.sample(cluster.members(), 4 + seed)
    for node in killed:
        cluster.end(node, Process.CRASHED)
    for node in killed:
        cluster.at(cluster.now + 0.01, partial(cluster.lose_link, survivor, node))
    run(cluster, seed, 1.5)
    assert survivor.machine.table.others == [], f"seed {seed}"


@seeds(10, 200)
def test_who_sleeps_for_ten_minutes_is_unresponsive_and_nobody_is_wronged(seed: int) -> None:
    """Its kernel answers for it. With others that sleep at the same time, and one whose host is really gone."""
    cluster = Cluster(seed, 10 + seed)
    run(cluster, seed, 2)
    sleepers = cluster.random.sample(cluster.members(), 1 + seed % 3)
    for sleeper in sleepers:
        cluster.sleep(sleeper, 600)
    bound_s = cluster.options.death_bound_s(10 + seed)
    run(cluster, seed, bound_s)
    for node in cluster.awake():
        assert set(node.machine.unresponsive(cluster.now)) == {sleeper.incarnation for sleeper in sleepers}, (
            f"seed {seed}"
        )
    lost = cluster.random.choice(cluster.awake())
    cluster.end(lost, Process.SILENT)
    cluster.expect_end_known(lost, bound_s)
    run(cluster, seed, 600)
    assert not any(node.machine.unresponsive(cluster.now) for node in cluster.awake()), f"seed {seed}"
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@seeds(5, 200)
def test_a_host_that_vanishes_while_its_member_is_unresponsive_is_noticed(seed: int) -> None:
    cluster = Cluster(seed, 10 + seed)
    run(cluster, seed, 2)
    sleeper = cluster.random.choice(cluster.members())
    cluster.sleep(sleeper, 600)
    run(cluster, seed, 60)
    cluster.end(sleeper, Process.SILENT)
    cluster.expect_end_known(sleeper, 2 * cluster.options.death_bound_s(10 + seed))
    run(cluster, seed, 200)
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@seeds(10, 200)
def test_who_sleeps_for_longer_than_the_user_wants_is_dead_and_learns_it_when_it_wakes(seed: int) -> None:
    cluster = Cluster(seed, 10 + seed, MembershipOptions(unresponsive_s=10.0))
    run(cluster, seed, 2)
    sleeper = cluster.random.choice(cluster.members())
    cluster.sleep(sleeper, 60)
    bound_s = cluster.options.death_bound_s(10 + seed)
    run(cluster, seed, bound_s)
    assert not cluster.who_does_not_know_the_end_of(sleeper), f"seed {seed}"
    run(cluster, seed, 60 - bound_s + 2 * cluster.options.probe_interval_s)
    assert sleeper.expelled, f"seed {seed}: it was declared dead and does not know"
    assert not cluster.false_deaths, f"seed {seed}: {cluster.false_deaths[:5]}"
    assert [node for node in cluster.nodes.values() if node.expelled] == [sleeper], f"seed {seed}"


@seeds(10, 200)
def test_who_sleeps_is_not_dead_and_accuses_nobody(seed: int) -> None:
    """Even if half of all do, at the same time."""
    cluster = Cluster(seed, 20)
    run(cluster, seed, 2)
    for node in cluster.random.sample(cluster.members(), 10):
        cluster.sleep(node, cluster.random.uniform(5.0, 50.0))
    run(cluster, seed, 60)
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@soak_timeout
@seeds(5, 100)
def test_a_short_partition_does_no_harm(seed: int) -> None:
    size = 1000 if FULL and seed == 0 else 50
    cluster = Cluster(seed, size, loss=LOSS)
    run(cluster, seed, 2)
    cluster.split(cluster.random.sample(cluster.members(), cluster.random.randrange(1, size)))
    run(cluster, seed, 0.9 * cluster.options.suspicion_s)
    cluster.heal()
    run(cluster, seed, cluster.options.death_bound_s(size))
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@soak_timeout
@seeds(4, 100)
def test_after_a_long_partition_the_larger_side_stays(seed: int) -> None:
    """With newcomers on either side; of two equal sides the one with rank 0."""
    size = 1000 if FULL and seed == 0 else 40
    cluster = Cluster(seed, size)
    options = cluster.options
    nodes = list(cluster.nodes.values())
    smaller = cluster.random.sample(nodes[1:], size // 2 if seed % 2 else cluster.random.randrange(2, size // 2 - 2))
    cluster.split(smaller)
    run(cluster, seed, options.death_bound_s(size) * 3)
    newcomers = [cluster.join("newcomer-left", size), cluster.join("newcomer-right", size + 1, side=1)]
    run(cluster, seed, 10)
    assert all(newcomer.is_member for newcomer in newcomers), f"seed {seed}"
    smaller.append(newcomers[1])
    cluster.heal()
    run(cluster, seed, 4 * options.reconnect_interval_s)
    expelled = {node.incarnation: node.expelled for node in cluster.nodes.values() if node.expelled}
    assert set(expelled) == {node.incarnation for node in smaller}, f"seed {seed}: {len(expelled)} of {len(smaller)}"
    cluster.check_converged()


@soak_timeout
@seeds(40, 300)
def test_who_was_cut_off_finds_back_in(seed: int) -> None:
    """Networks that fall into several parts and heal, at any moment; members that die and are replaced meanwhile.

    Whoever is expelled joins again, and in the end every rank whose process lives is held by one member that all know.
    """
    size = 2 + seed % 9
    cluster = Cluster(seed, size, loss=LOSS if seed % 2 else 0.0, returns=True, is_fixed=seed % 3 > 0)
    options, chance = cluster.options, cluster.random

    deaths = 0

    def die_and_be_replaced() -> None:
        nonlocal deaths
        members = cluster.members()
        if len(members) < 2 or deaths > size // 3:
            return
        victim = chance.choice(members)
        survivors = [node for node in members if node is not victim]
        met = {one for one, other in itertools.permutations(survivors, 2) if cluster.have_met(one, other)}
        if len(survivors) > 1 and len(met) < len(survivors):
            return  # of one who survives all whom it knew, nobody may know any more
        deaths += 1
        cluster.end(victim, chance.choice([Process.CRASHED, Process.SILENT]))
        cluster.at(cluster.now + chance.uniform(0.5, 60), partial(replace, victim))

    def replace(victim: Node) -> None:
        """Until it is let in: those who would are cut off, or do not know yet that its place is free."""
        rank = victim.member.rank
        running = [node for node in cluster.nodes.values() if node.process is Process.RUNNING]
        if not any(node.member.rank == rank for node in running):
            cluster.join(victim.member.name, rank, chance.choice(cluster.members()).side)
        if not any(node.member.rank == rank for node in cluster.members()):
            cluster.at(cluster.now + 20, partial(replace, victim))

    for _ in range(1 + seed % 3):
        parts = chance.randrange(2, 4) if size > 2 else 2
        for node in cluster.members():
            node.side = chance.randrange(parts) if seed % 4 else node.member.rank  # or each alone
        if seed % 5 > 1:
            cluster.at(cluster.now + chance.uniform(0, 80), die_and_be_replaced)
        run(cluster, seed, chance.uniform(1, 3 * options.death_bound_s(size)))
        cluster.heal()
        if seed % 7 > 2:
            cluster.at(cluster.now + chance.uniform(0, 30), die_and_be_replaced)  # while others come back
        run(cluster, seed, chance.uniform(1, 6 * options.reconnect_interval_s))
    run(cluster, seed, 60 * options.reconnect_interval_s)
    ranks = sorted(node.member.rank for node in cluster.members())
    assert ranks == list(range(size)), f"seed {seed}: {ranks} of {size} are members"
    cluster.check_converged()


@seeds(5, 100)
def test_who_was_let_in_by_one_that_was_expelled_is_found_by_it(seed: int) -> None:
    """Nobody else knows of it; and of those whom it knows nobody is left: they are back, or were replaced."""
    cluster = Cluster(seed, 5, loss=LOSS if seed % 2 else 0.0, returns=True)
    first = cluster.members()
    sponsor = cluster.random.choice(first)
    cluster.split([sponsor])
    run(cluster, seed, 6 * cluster.options.death_bound_s(5))
    newcomer = cluster.join("newcomer", 5, side=1)
    run(cluster, seed, 10)
    newcomer.side = 2
    sponsor.side = 0
    run(cluster, seed, 6 * cluster.options.reconnect_interval_s)
    assert newcomer.is_member, f"seed {seed}"
    assert sponsor.expelled, f"seed {seed}"
    for node in [node for node in cluster.members() if node in first]:
        cluster.end(node, Process.CRASHED)
        run(cluster, seed, 10)
        cluster.join(node.member.name, node.member.rank)
        run(cluster, seed, 20)
    cluster.heal()
    run(cluster, seed, 10 * cluster.options.reconnect_interval_s)
    assert sorted(node.member.rank for node in cluster.members()) == list(range(6)), f"seed {seed}"
    cluster.check_converged()


@seeds(20, 500)
def test_of_two_who_want_one_name_at_once_one_gets_it(seed: int) -> None:
    """Through whomever they ask, and even while the arbiter is asleep or dies."""
    cluster = Cluster(seed, 12, loss=LOSS)
    run(cluster, seed, 1)
    match seed % 3:
        case 1:
            cluster.sleep(next(iter(cluster.nodes.values())), 6)
        case 2:
            cluster.end(next(iter(cluster.nodes.values())), Process.SILENT)
    twins = [cluster.join("twin", 50), cluster.join("twin", 51)]
    run(cluster, seed, 60)
    assert sum(node.is_member for node in twins) == 1, f"seed {seed}"
    (loser,) = [node for node in twins if not node.is_member]
    why = loser.refused or loser.expelled or ""
    assert "twin" in why, f"seed {seed}: {why!r}"
    assert not cluster.false_deaths or loser.expelled, f"seed {seed}: {cluster.false_deaths}"
    cluster.check_converged()


@seeds(20, 500)
def test_a_name_is_used_again_after_a_death_or_a_leave(seed: int) -> None:
    """At once, before anybody has noticed: then the newcomer waits until the old incarnation is known to be over."""
    cluster = Cluster(seed, 12, loss=LOSS)
    run(cluster, seed, 1)
    old = cluster.random.choice(cluster.members())
    how = (Process.CRASHED, Process.SILENT, None)[seed % 3]
    if how is None:
        cluster.leave(old)
    else:
        cluster.end(old, how)
    new = cluster.join(old.member.name, old.member.rank)
    run(cluster, seed, cluster.options.death_bound_s(12) + 10)
    assert new.is_member, f"seed {seed}: {new.refused or new.expelled}"
    check_nobody_wronged(cluster, seed)
    cluster.check_converged()


@seeds(5, 100)
def test_many_come_and_go_at_once(seed: int) -> None:
    """Half leaves, rank 0 too, while as many come, two of each rank."""
    cluster = Cluster(seed, 40, loss=LOSS)
    run(cluster, seed, 1)
    leavers = list(cluster.nodes.values())[:20]
    for node in leavers:
        cluster.at(cluster.now + cluster.random.random(), partial(cluster.leave, node))
    newcomers: list[Node] = []
    for rank in range(100, 120):
        for name in ("one", "two"):
            join = partial(lambda name, rank: newcomers.append(cluster.join(name, rank)), f"{name}-{rank}", rank)
            cluster.at(cluster.now + cluster.random.random(), join)
    run(cluster, seed, 60)
    assert all(node.machine.state is State.DEPARTED for node in leavers), f"seed {seed}"
    for rank in range(100, 120):
        pair = [node for node in newcomers if node.member.rank == rank]
        assert sum(node.is_member for node in pair) == 1, f"seed {seed}: {[node.machine.state for node in pair]}"
        assert all(node.is_member or "rank" in (node.refused or node.expelled or "") for node in pair), f"seed {seed}"
    cluster.check_converged()


@seeds(12, 300)
def test_who_leave_together_have_left_and_are_not_dead(seed: int) -> None:
    """As all nodes of one process: those whom one of them tells may leave, too, and be gone before they pass it on."""
    cluster = Cluster(seed, 12 + 20 * (seed % 4))
    run(cluster, seed, 1)
    leavers = cluster.sample(cluster.members(), 10)
    for node in leavers:
        cluster.at(cluster.now + 0.02 * cluster.random.random(), partial(cluster.leave, node))
    run(cluster, seed, 20)
    assert all(node.machine.state is State.DEPARTED for node in leavers), f"seed {seed}"
    assert max(node.ended_at for node in leavers) < 2.0, f"seed {seed}"
    assert not cluster.deaths, f"seed {seed}: {cluster.deaths[:5]}"
    cluster.check_converged()


@pytest.mark.parametrize("size", [3, 8, 40])
@seeds(5, 100)
def test_who_hears_nobody_takes_longer_but_decides(seed: int, size: int) -> None:
    cluster = Cluster(seed, size)
    run(cluster, seed, 2)
    victims = cluster.random.sample(cluster.members(), size - 1)
    bound_s = cluster.options.cut_off_bound_s(size)
    for victim in victims:
        cluster.end(victim, Process.SILENT)
        cluster.expect_end_known(victim, bound_s)
    run(cluster, seed, bound_s + 1)
    check_nobody_wronged(cluster, seed)


def test_two_members_of_whom_one_dies() -> None:
    """Nobody else can be asked: the survivor decides alone."""
    for how, options in ((Process.CRASHED, MembershipOptions()), (Process.SILENT, MembershipOptions(suspicion_s=3))):
        cluster = Cluster(0, 2, options)
        run(cluster, 0, 2)
        first, second = cluster.nodes.values()
        cluster.end(first, how)
        run(cluster, 0, options.death_bound_s(2))
        assert second.machine.table.others == []
