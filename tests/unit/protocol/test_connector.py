"""The dial machine and the bond, one rule at a time: clocks are numbers, nothing is connected."""

from __future__ import annotations

from itertools import product

import pytest

from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import (
    ANSWERS,
    KNOCK_PAUSES_S,
    LONGEST_ATTEMPT_S,
    REFUSED_PAUSE_S,
    STEPS,
    Answer,
    Attempt,
    Bond,
    Dial,
    Due,
    Ended,
    Goal,
    Outcome,
    Parting,
    Step,
    Tried,
)
from farcall.protocol.hello import Remind, Resume


class Plain:
    def uniform(self, a: float, b: float, /) -> float:
        return b


def dial(goal: Goal, until: float = 100.0, pauses_first: bool = False) -> Dial:
    return Dial(goal, until=until, now=0.0, backoff=Backoff(1.0, 4.0), pauses_first=pauses_first)


def attempt(machine: Dial, outcome: Outcome, now: float = 0.0, why: str = "") -> list[object]:
    """One attempt from the end of its pause to its outcome."""
    (begun,) = machine.handle(Due(), now)
    assert isinstance(begun, Attempt)
    assert machine.next_deadline() is None
    return list(machine.handle(Tried(outcome, why), now))


def test_the_table_is_complete() -> None:
    assert set(STEPS) == set(Outcome)
    for row in STEPS.values():
        assert set(row) == set(Goal)
        assert Step.OUT_OF_TIME not in row.values()


@pytest.mark.parametrize("goal", list(Goal))
@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_cell_is_carried_out(goal: Goal, outcome: Outcome) -> None:
    machine = dial(goal)
    effects = attempt(machine, outcome, why="so it is")
    step = STEPS[outcome][goal]
    if step is Step.AGAIN:
        assert (effects, machine.next_deadline()) == ([], 1.0)
    else:
        assert effects == [Ended(step, "so it is")]
        assert machine.next_deadline() is None


@pytest.mark.parametrize("goal", [Goal.CONNECT, Goal.RESUME, Goal.REMIND])
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.ELSEWHERE, Outcome.FOREIGN])
def test_what_the_network_may_say_is_no_verdict(goal: Goal, outcome: Outcome) -> None:
    """A proxy that restarts refuses, answers itself, or leads elsewhere, and the member behind it lives."""
    (ended,) = attempt(dial(goal), outcome, why="so it is")
    assert ended == Ended(Step.REFUSED, "so it is")


def test_who_was_refused_is_dialled_again_soon_until_the_time_is_up() -> None:
    found = Bond("s", dialled=True, now=0.0, jitter=Plain())
    found.lose(1, 100.0, reconnect_s=10.0)
    for _ in range(20):
        assert found.redial(105.0, 10.0, refused=True).next_deadline() == 105.0 + REFUSED_PAUSE_S
    pauses = [(found.redial(111.0, 10.0, refused=True).next_deadline() or 0.0) - 111.0 for _ in range(20)]
    assert pauses[-1] == 1.0


def test_who_starts_goes_on_where_a_host_refuses() -> None:
    machine = dial(Goal.START)
    for _ in range(3):
        assert attempt(machine, Outcome.REFUSED) == []


def test_pauses_grow_and_end_with_the_time() -> None:
    machine = dial(Goal.RESUME, until=6.0)
    times = []
    now = 0.0
    for _ in range(3):
        attempt(machine, Outcome.SILENT, now, "no answer")
        now = machine.next_deadline() or 0.0
        times.append(now)
    assert times == [1.0, 3.0, 6.0]


def test_time_that_is_up_is_an_end_that_names_the_last_failure() -> None:
    machine = dial(Goal.RESUME, until=1.0)
    attempt(machine, Outcome.SILENT, 0.5, "no answer")
    assert machine.next_deadline() == 1.0
    assert machine.handle(Due(), 1.0) == [Ended(Step.OUT_OF_TIME, "no answer")]


def test_a_member_that_others_hear_is_tried_beyond_its_time() -> None:
    machine = dial(Goal.RESUME, until=1.0)
    attempt(machine, Outcome.SILENT, 0.5)
    (begun,) = machine.handle(Due(is_member=True), 2.0)
    assert isinstance(begun, Attempt)
    assert begun.bound_s == LONGEST_ATTEMPT_S  # it may be stopped: what is given up stays in its kernel's queue
    assert machine.handle(Tried(Outcome.SILENT, "no answer"), 2.5) == []
    assert machine.handle(Due(), machine.next_deadline() or 0.0) == [Ended(Step.OUT_OF_TIME, "no answer")]


def test_time_that_was_up_before_is_an_end_but_for_who_starts() -> None:
    (ended,) = dial(Goal.RESUME, until=-1.0).handle(Due(), 0.0)
    assert ended == Ended(Step.OUT_OF_TIME, "it breaks again and again")
    machine = dial(Goal.START, until=-1.0)
    assert attempt(machine, Outcome.SILENT, why="no answer") == []
    assert machine.handle(Due(), 1.0) == [Ended(Step.OUT_OF_TIME, "no answer")]


def test_an_attempt_has_the_time_that_is_left() -> None:
    (begun,) = dial(Goal.RESUME, until=3.0).handle(Due(), 1.0)
    assert begun == Attempt(2.0)


# --- bonds ---------------------------------------------------------------------------------------------


def bond(dialled: bool) -> Bond:
    return Bond("s1", dialled=dialled, now=0.0, jitter=Plain())


def test_the_end_that_dialled_dials_again_at_once_and_the_other_reminds_it_later() -> None:
    for dialled, goal, first in ((True, Goal.RESUME, 10.0), (False, Goal.REMIND, 10.05)):
        mine = bond(dialled)
        mine.lose(1, 10.0, 60.0)
        machine = mine.redial(10.0, 60.0)
        assert (machine.goal, machine.next_deadline()) == (goal, pytest.approx(first))


def test_the_end_that_was_dialled_within_the_host_knocks_before_it_waits() -> None:
    """Nobody there: it is known without a pause. Somebody there: it has its moment to dial again."""
    mine = bond(dialled=False)
    mine.lose(1, 10.0, 60.0)
    machine = mine.redial(10.0, 60.0, within_host=True)
    assert machine.next_deadline() == 10.0
    for pause_s in (*KNOCK_PAUSES_S, 0.05):
        (begun,) = machine.handle(Due(), 10.0)
        assert isinstance(begun, Attempt)
        assert begun.knocks
        assert machine.handle(Tried(Outcome.LISTENS), 10.0) == []
        assert machine.next_deadline() == pytest.approx(10.0 + pause_s)
    assert machine.handle(Due(), 10.05) == [Attempt(pytest.approx(59.95), knocks=False)]
    gone = mine.redial(10.0, 60.0, within_host=True)
    gone.handle(Due(), 10.0)
    assert gone.handle(Tried(Outcome.NOBODY, "gone"), 10.0) == [Ended(Step.VANISHED, "gone")]


def test_the_end_that_dials_within_the_host_knocks_where_it_got_no_answer() -> None:
    """A process that ends may accept a connection, and be gone a moment later."""
    mine = bond(dialled=True)
    mine.lose(1, 10.0, 60.0)
    machine = mine.redial(10.0, 60.0, within_host=True)
    assert machine.handle(Due(), 10.0) == [Attempt(60.0, knocks=False)]
    assert machine.handle(Tried(Outcome.SILENT), 10.0) == []
    assert machine.next_deadline() == pytest.approx(10.0 + KNOCK_PAUSES_S[0])
    (knock,) = machine.handle(Due(), 10.001)
    assert isinstance(knock, Attempt)
    assert knock.knocks
    assert machine.handle(Tried(Outcome.NOBODY, "gone"), 10.001) == [Ended(Step.VANISHED, "gone")]
    living = mine.redial(10.0, 60.0, within_host=True)
    living.handle(Due(), 10.0)
    for _ in KNOCK_PAUSES_S:
        living.handle(Tried(Outcome.SILENT), 10.0)
        living.handle(Due(), 10.0)
    living.handle(Tried(Outcome.LISTENS), 10.0)
    assert living.handle(Due(), 10.05) == [Attempt(pytest.approx(59.95), knocks=False)]


def test_a_connection_over_which_nothing_came_is_the_same_trouble() -> None:
    mine = bond(dialled=True)
    mine.lose(5, 10.0, 60.0)
    assert attempt(mine.redial(10.0, 60.0), Outcome.PROVEN, 10.0) == [Ended(Step.DONE, Outcome.PROVEN.value)]
    mine.restore(5, 11.0)
    mine.lose(5, 12.0, 60.0)
    assert mine.lost_at == 10.0
    assert mine.redial(12.0, 60.0).next_deadline() == pytest.approx(12.05)  # the pauses grow on
    mine.restore(5, 13.0)
    mine.lose(6, 14.0, 60.0)
    assert mine.lost_at == 14.0
    assert mine.redial(14.0, 60.0).next_deadline() == 14.0


def test_a_connection_that_lasted_is_another_trouble() -> None:
    mine = bond(dialled=True)
    mine.lose(5, 10.0, 60.0)
    mine.restore(5, 11.0)
    mine.lose(5, 72.0, 60.0)
    assert mine.lost_at == 72.0


def test_only_the_end_that_dialled_comes_back_and_only_the_other_asks_for_it() -> None:
    assert {
        (Resume, False): Answer.RESUME,
        (Resume, True): Answer.NOT_ITS,
        (Remind, True): Answer.DIAL,
        (Remind, False): Answer.NOT_OURS,
    } == ANSWERS


def test_after_parting_either_end_may_come_back_and_dials_from_then_on() -> None:
    bond = Bond("s", dialled=True, now=0.0, jitter=Plain())
    assert bond.answer(Resume, is_lower=True) is Answer.NOT_ITS
    bond.part(Parting.AGREED)
    for is_lower, bond.dialled in product((False, True), repeat=2):
        assert bond.answer(Resume, is_lower=is_lower) is Answer.RESUME
        assert bond.answer(Remind, is_lower=is_lower) is Answer.DIAL
    bond.dialled = False
    dial = bond.rejoin(10.0, 60.0)
    assert bond.dialled
    assert dial.goal is Goal.RESUME
    assert dial.next_deadline() == 10.0
    bond.restore(3, 11.0)
    assert bond.parting is Parting.NO


@pytest.mark.parametrize(
    ("purpose", "dialled", "of_lower", "of_higher"),
    [
        (Resume, False, Answer.RESUME, Answer.RESUME),
        (Resume, True, Answer.RESUME, Answer.CROSSED),  # both dial: one of them is let in
        (Remind, True, Answer.DIAL, Answer.DIAL),
        (Remind, False, Answer.CROSSED, Answer.DIAL),  # both wait: one of them dials
    ],
)
def test_once_two_have_parted_they_never_both_refuse_nor_both_wait(
    purpose: type[Resume] | type[Remind], dialled: bool, of_lower: Answer, of_higher: Answer
) -> None:
    """Who dials changes with each parting. Where a dial failed on the way, the ends may differ about it."""
    bond = Bond("s", dialled=dialled, now=0.0, jitter=Plain())
    bond.part(Parting.AGREED)
    bond.restore(3, 11.0)
    assert bond.answer(purpose, is_lower=True) is of_lower
    assert bond.answer(purpose, is_lower=False) is of_higher
