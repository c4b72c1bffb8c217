"""The protocol of a backward pass, and readiness of its graph, without tensors."""

from __future__ import annotations

import random

import pytest

from farcall.protocol.gradients import (
    ORIGIN,
    PARTICIPANT,
    AbortPass,
    BackwardPass,
    Begin,
    Completed,
    Effect,
    Failed,
    PartFailed,
    PartFinished,
    PassDone,
    PassFailed,
    PassId,
    PassState,
    Received,
    StartPass,
    Table,
    Tell,
    Wavefront,
    WorkerLost,
)

PASS = PassId(0, 3)


def member(me: int, parent: int | None = None, deadline: float | None = None) -> BackwardPass:
    return BackwardPass(9, PASS, me, parent, deadline)


def begin(*peers: int, covered: tuple[int, ...] = ()) -> Begin:
    return Begin(frozenset(peers), frozenset(covered))


def test_an_origin_alone_is_done_with_its_part() -> None:
    origin = member(0)
    assert origin.handle(begin(), 0.0) == []
    assert origin.handle(PartFinished(), 0.0) == [Completed()]


def test_only_those_not_covered_are_told() -> None:
    worker = member(1, parent=0)
    (told,) = worker.handle(begin(0, 2, 3, covered=(0, 1, 2)), 0.0)
    assert isinstance(told, Tell)
    assert told.worker == 3
    assert isinstance(told.message, StartPass)
    assert told.message.covered == (0, 1, 2, 3)


def test_done_goes_up_when_the_part_and_all_told_are_done() -> None:
    worker = member(1, parent=0)
    worker.handle(begin(0, 2, 3, covered=(0, 1)), 0.0)
    assert worker.handle(Received(2, PassDone(9, PASS)), 0.0) == []
    assert worker.handle(PartFinished(), 0.0) == []
    assert worker.handle(Received(3, PassDone(9, PASS)), 0.0) == [Tell(0, PassDone(9, PASS)), Completed()]
    assert worker.ended


def test_told_twice_answers_at_once() -> None:
    worker = member(1, parent=0)
    worker.handle(begin(0), 0.0)
    assert worker.handle(Received(2, StartPass(9, PASS, ())), 0.0) == [Tell(2, PassDone(9, PASS))]


def test_a_failed_part_is_told_to_the_origin_which_gives_up_everywhere() -> None:
    worker = member(1, parent=0)
    worker.handle(begin(0, 2, covered=(0, 1)), 0.0)
    assert worker.handle(PartFailed("no"), 0.0) == [Tell(0, PassFailed(9, PASS, 1, "no"))]
    origin = member(0)
    origin.handle(begin(1), 0.0)
    assert origin.handle(Received(1, PassFailed(9, PASS, 1, "no")), 0.0) == [
        Tell(1, AbortPass(9, PASS)),
        Failed(1, "no"),
    ]
    effects = worker.handle(Received(0, AbortPass(9, PASS)), 0.0)
    assert Tell(2, AbortPass(9, PASS)) in effects
    assert worker.state is PassState.FAILED
    assert worker.handle(PartFinished(), 0.0) == []


@pytest.mark.parametrize(("lost", "ends"), [(0, True), (2, False), (5, False)])
def test_a_lost_worker(lost: int, ends: bool) -> None:
    worker = member(1, parent=0)
    worker.handle(begin(0, 2, covered=(0, 1)), 0.0)
    effects = worker.handle(WorkerLost(lost, "gone"), 0.0)
    assert worker.ended is ends
    assert (Tell(0, PassFailed(9, PASS, 2, "gone")) in effects) is (lost == 2)
    assert bool(effects) is (lost != 5)


def test_a_deadline_names_the_late() -> None:
    origin = member(0, deadline=10.0)
    origin.handle(begin(1, 2), 0.0)
    origin.handle(PartFinished(), 0.0)
    origin.handle(Received(1, PassDone(9, PASS)), 0.0)
    assert origin.next_deadline() == 10.0
    assert origin.handle_deadline(9.0) == []
    *_, failed = origin.handle_deadline(10.0)
    assert isinstance(failed, Failed)
    assert "[2]" in failed.reason
    assert origin.next_deadline() is None


@pytest.mark.parametrize("seed", range(50))
def test_the_origin_is_done_last_whatever_the_order(seed: int) -> None:
    """Random peers (connected), random delivery: every part has finished before the origin completes."""
    rng = random.Random(seed)
    size = rng.randint(2, 7)
    peers: dict[int, set[int]] = {worker: set() for worker in range(size)}
    for worker in range(1, size):
        for other in {rng.randrange(worker), rng.randrange(worker)}:
            peers[worker].add(other)
            peers[other].add(worker)
    members: dict[int, BackwardPass] = {0: member(0)}
    finished: set[int] = set()
    possible: list[tuple[int, int, object]] = [(0, 0, PartFinished())]
    completed = False

    def carry_out(worker: int, effects: list[Effect]) -> None:
        nonlocal completed
        for effect in effects:
            if isinstance(effect, Tell):
                possible.append((worker, effect.worker, effect.message))
            elif worker == 0:
                assert isinstance(effect, Completed)
                assert finished == set(range(size))
                completed = True

    carry_out(0, members[0].handle(begin(*peers[0]), 0.0))
    while possible:
        sender, worker, message = possible.pop(rng.randrange(len(possible)))
        if isinstance(message, StartPass) and worker not in members:
            members[worker] = member(worker, parent=sender)
            carry_out(worker, members[worker].handle(begin(*peers[worker], covered=message.covered), 0.0))
            possible.append((worker, worker, PartFinished()))
            continue
        if isinstance(message, PartFinished):
            finished.add(worker)
        carry_out(worker, members[worker].handle(Received(sender, message), 0.0))  # type: ignore[arg-type]
    assert completed


@pytest.mark.parametrize("table", [ORIGIN, PARTICIPANT])
def test_a_pass_that_has_ended_stays_so(table: Table) -> None:
    for (state, event), (after, act) in table.items():
        if state in (PassState.DONE, PassState.FAILED):
            assert after is state
            # A worker that tells another one twice is answered; and the origin hears that "done" could not be sent.
            assert event is StartPass or (event is PartFailed and table is PARTICIPANT)
            assert act is not None
    reached = {PassState.NEW, PassState.DONE} | {after for after, _ in table.values()}
    assert reached == set(PassState)


def test_a_node_waits_for_every_edge_into_it() -> None:
    graph = {"a": ["c", "c"], "b": ["c"], "c": ["d"], "d": []}
    front = Wavefront(["a", "b"], graph)
    assert front.settle([("a", True)]) == (["a"], [])
    assert front.settle([("b", False)]) == (["c", "d"], ["b"])


def test_what_only_dead_sources_reach_is_dead() -> None:
    graph = {"a": ["b"], "b": [], "x": ["b"]}
    front = Wavefront(["a", "x"], graph)
    assert front.settle([("x", False), ("a", False)]) == ([], ["x", "a", "b"])


@pytest.mark.parametrize("seed", range(30))
def test_settling_is_topological_and_complete(seed: int) -> None:
    rng = random.Random(seed)
    size = 30
    graph = {
        n: [rng.randrange(n + 1, size) for _ in range(rng.randint(0, 3))] if n < size - 1 else [] for n in range(size)
    }
    sources = [rng.randrange(size) for _ in range(5)]
    reachable = set(sources)
    for node in range(size):
        if node in reachable:
            reachable.update(graph[node])
    graph = {node: after for node, after in graph.items() if node in reachable}
    living = [rng.random() < 0.5 for _ in sources]
    front = Wavefront(sources, graph)
    order: list[int] = []
    settled: list[int] = []
    alive: set[int] = set()
    edges = list(zip(sources, living, strict=True))
    rng.shuffle(edges)
    for edge in edges:
        live, dead = front.settle([edge])
        assert sorted(live + dead) == sorted(set(live + dead))
        order += live
        settled += live + dead
        alive |= set(live)
    reached = {source for source, is_live in edges if is_live}
    for node in range(size):
        if node in reached:
            reached.update(graph[node])
    assert alive == reached
    assert all(order.index(child) > order.index(node) for node in order for child in graph[node])
    assert sorted(settled) == sorted(reachable)
