"""The table of a worker's life, row by row."""

from __future__ import annotations

import re
from itertools import product

import pytest

from farcall.launcher import lives
from farcall.launcher.lives import NEXT, Event, Life, Restarts, State

TWICE = Restarts(most=2, first_pause_s=1.0, longest_pause_s=1.5)


def life_that(*events: Event, restarts: Restarts = TWICE) -> Life:
    made = Life(restarts)
    for event in events:
        assert made.handle(event, now=0.0, why="it broke")
    return made


RUNS = (Event.JOINED, Event.PREPARED)


def test_the_page_is_the_table() -> None:
    rows = re.findall(r"^    (\w+(?: off)?) +(\w+)  +(\w+(?: off)?)", lives.__doc__ or "", re.M)
    told = {(state, event): following for state, event, following in rows if state not in ("state", "any", "ended")}
    told.update({(state, "removed"): "ended" for state in State if state is not State.ENDED})
    assert told == {(str(state), str(event)): str(following) for (state, event), following in NEXT.items()}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_what_is_not_in_the_table_changes_nothing(state: State, event: Event) -> None:
    life = Life(TWICE)
    life.state = state
    assert life.handle(event, 0.0) is ((state, event) in NEXT)
    assert (life.state is state) is ((state, event) not in NEXT)


def test_it_comes_back_with_growing_pauses_as_often_as_allowed() -> None:
    life = life_that(*RUNS)
    assert life.handle(Event.FAILED, now=10.0, why="was ended by SIGKILL")
    assert (life.state, life.due_at, life.why) == (State.BACKING_OFF, 11.0, "was ended by SIGKILL")
    assert life.handle(Event.DUE, now=11.0)
    assert (life.state, life.number, life.due_at) == (State.STARTING, 1, None)
    assert life.handle(Event.FAILED, now=20.0)  # a start that fails counts like any other failure
    assert (life.state, life.due_at) == (State.BACKING_OFF, 21.5)
    assert life.handle(Event.DUE, now=21.5)
    assert life.handle(Event.FAILED, now=30.0)
    assert life.state is State.DEAD


def test_a_worker_that_never_ran_is_not_tried_again() -> None:
    assert life_that(Event.FAILED).state is State.DEAD
    assert life_that(Event.JOINED, Event.FAILED).state is State.DEAD


def test_without_restarts_a_failure_is_the_end() -> None:
    life = life_that(*RUNS, Event.FAILED, restarts=Restarts())
    assert life.state is State.DEAD
    assert life.is_over


def test_an_end_in_good_order_is_no_failure() -> None:
    assert life_that(*RUNS, Event.FINISHED).state is State.ENDED


def test_who_is_removed_while_it_backs_off_stays_away() -> None:
    life = life_that(*RUNS, Event.FAILED, Event.REMOVED)
    assert (life.state, life.due_at) == (State.ENDED, None)
    assert not life.handle(Event.DUE, 0.0)


def test_a_dead_worker_can_be_removed() -> None:
    assert life_that(Event.FAILED, Event.REMOVED).state is State.ENDED


def test_pauses_are_bounded() -> None:
    assert Restarts(most=5000, first_pause_s=1.0, longest_pause_s=30.0).pause_s(4000) == 30.0
