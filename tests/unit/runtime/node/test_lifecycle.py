"""The states of a node: who ends it, and what calls are told meanwhile."""

from __future__ import annotations

import pytest

from farcall.errors import Expelled, NotInitialized, RpcError
from farcall.runtime.node.lifecycle import TRANSITIONS, Event, Lifecycle


@pytest.fixture
def life() -> Lifecycle:
    return Lifecycle("w0")


def started(life: Lifecycle) -> Lifecycle:
    assert life.move("start")
    assert life.move("connected")
    return life


@pytest.mark.parametrize(
    ("moves", "is_running", "is_over"),
    [
        ((), False, False),
        (("start",), False, False),
        (("start", "connected"), True, False),
        (("start", "connected", "leave"), True, False),
        (("start", "connected", "leave", "end"), False, True),
        (("start", "end"), False, True),
    ],
)
def test_calls_can_be_made_while_it_runs_or_leaves(
    life: Lifecycle, moves: tuple[Event, ...], is_running: bool, is_over: bool
) -> None:
    for event in moves:
        after = TRANSITIONS[life.state][event]
        if event == "end":
            life.end()
        else:
            assert life.move(event)
        assert life.state == after
    assert (life.is_running, life.is_over()) == (is_running, is_over)
    assert (life.why_ended is None) == is_running
    if not is_running:
        assert isinstance(life.why_ended, NotInitialized)
        assert life.state in str(life.why_ended)


def test_a_node_is_started_once(life: Lifecycle) -> None:
    started(life)
    assert not life.move("start")
    assert life.state == "running"


def test_who_is_expelled_while_it_runs_is_ended_by_a_thread_of_its_own(life: Lifecycle) -> None:
    started(life)
    life.verdict = verdict = Expelled("declared dead")
    ended: list[RpcError] = []
    assert life.expel(ended.append)
    assert (life.state, life.is_running, life.why_ended) == ("expelled", False, verdict)
    life.wait_ended(10.0)
    assert ended == [verdict]
    assert not life.move("leave"), "a shutdown now has nothing left to end"
    life.end()
    assert life.state == "expelled"


@pytest.mark.parametrize("before", ["starting", "leaving"])
def test_who_is_expelled_while_somebody_starts_or_ends_it_is_ended_by_that_one(life: Lifecycle, before: str) -> None:
    life.move("start")
    if before == "leaving":
        life.move("connected")
        life.move("leave")
    life.verdict = Expelled("declared dead")
    ended: list[RpcError] = []
    assert not life.expel(ended.append)
    assert life.state == before
    life.wait_ended(0.0)
    assert ended == []
    life.end()
    assert life.state == "expelled"


def test_every_state_of_the_table_can_be_reached() -> None:
    reached, states = {"new"}, ["new"]
    for state in states:
        for after in TRANSITIONS[state].values():  # type: ignore[index]
            if after not in reached:
                reached.add(after)
                states.append(after)
    assert reached == set(TRANSITIONS)


def test_a_forked_child_has_no_node(life: Lifecycle) -> None:
    started(life).fork()
    assert (life.state, life.is_running, life.is_over()) == ("forked", False, True)
