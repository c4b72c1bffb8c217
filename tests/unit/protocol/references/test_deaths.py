"""One story per test: what each death does to the references of others."""

from __future__ import annotations

import pytest
from tests.kit.reference_machines import ANNA, BEN, CARL, OWNER, Member, Trio, only, sent

from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import (
    Answer,
    Confirm,
    Confirmed,
    Counts,
    Effect,
    FreeValue,
    Inquire,
    Lost,
    NeverCreated,
    Register,
    Release,
)


@pytest.fixture
def trio() -> Trio:
    return Trio()


def answers(trio: Trio, effects: list[Effect], *others: References) -> list[Effect]:
    """Everyone in ``others`` answers the owner's question; what the owner does then."""
    questions = {to: message for to, message in sent(effects) if isinstance(message, Inquire)}
    done: list[Effect] = []
    for machine in others:
        reply = machine.hear(OWNER, questions[machine.me], 0.0)
        [answer] = [message for to, message in sent(reply) if isinstance(message, Answer)]
        done += trio.owner.hear(machine.me, answer, 0.0)
    return done


def test_a_dead_users_forks_are_dropped_when_all_have_answered(trio: Trio) -> None:
    hers = trio.created_by_anna()
    effects = trio.owner.member_died(ANNA, 0.0)
    assert FreeValue(hers.ref) not in effects
    assert FreeValue(hers.ref) in answers(trio, effects, trio.ben, trio.carl)


def test_a_fork_outlives_the_dead_user_that_sent_it(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    trio.ben.flush()  # his Register is slow
    answers(trio, trio.owner.member_died(ANNA, 0.0), trio.ben, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {BEN: 1}


def test_a_fork_outlives_two_dead_users_in_a_row(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    third = trio.ben.fork(his, CARL)
    questions = trio.owner.member_died(ANNA, 0.0)
    trio.owner.hear(CARL, only(trio.carl.hear(OWNER, dict(sent(questions))[CARL], 0.0), OWNER), 0.0)
    trio.carl.receive(third, BEN)  # after his answer
    again = trio.owner.member_died(BEN, 0.0)  # without an answer
    assert trio.owner.counts().owned == 1
    answers(trio, again, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {CARL: 1}


def test_a_parent_lists_its_child_in_the_name_of_the_dead(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    third = trio.ben.fork(his, CARL)
    trio.anna.drop(hers)
    register = only(trio.anna.member_died(BEN, 0.0), OWNER)
    assert register == Register([his])
    trio.owner.member_died(BEN, 0.0)
    effects = trio.owner.hear(ANNA, register, 0.0)
    confirm = next(message for _, message in sent(effects) if isinstance(message, Confirm))
    trio.anna.hear(OWNER, confirm, 0.0)
    release = only(trio.anna.flush(), OWNER)
    assert trio.owner.hear(ANNA, release, 0.0) == []
    # A duplicate of the Confirm must not make her release what is not hers.
    trio.anna.hear(OWNER, confirm, 0.0)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == []
    trio.carl.receive(third, BEN)
    answers(trio, effects, trio.anna, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {CARL: 1}


def test_nothing_is_taken_from_the_dead(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.member_died(ANNA, 0.0)
    assert not trio.ben.receive(his, ANNA)
    trio.owner.member_died(ANNA, 0.0)
    assert trio.owner.hear(ANNA, Release([(hers.ref, hers.fork_id)]), 0.0) == []
    assert not trio.owner.own(trio.anna.create(OWNER))


def test_a_dead_owner_loses_all_its_references_at_once(trio: Trio) -> None:
    confirmed, pending = trio.created_by_anna(), trio.anna.create(OWNER)
    dropped = trio.anna.create(OWNER)
    trio.anna.drop(dropped)
    trio.anna.fork(confirmed, BEN)
    effects = trio.anna.member_died(OWNER, 0.0)
    assert effects == [Lost(confirmed), Lost(pending)]
    assert trio.anna.counts() == Counts(0, 0, 0, 0, 0, 0)
    with pytest.raises(LookupError, match="owner died"):
        trio.anna.fork(confirmed, BEN)
    assert trio.anna.create(OWNER) in [e.fork for e in trio.anna.flush() if isinstance(e, Lost)]


def test_a_question_buries_the_dead_it_names(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    answers(trio, trio.owner.member_died(ANNA, 0.0), trio.ben, trio.carl)
    assert not trio.ben.receive(his, ANNA)  # though nobody else told him


def test_an_answer_does_not_name_creations(trio: Trio) -> None:
    trio.ben.create(OWNER)  # listed now and released early, it would be listed for good when the request comes
    assert only(trio.ben.hear(OWNER, Inquire(1, [ANNA]), 0.0), OWNER) == Answer(1, [])


def test_an_answer_to_an_earlier_round_ends_nothing(trio: Trio) -> None:
    hers = trio.created_by_anna()
    early = dict(sent(trio.owner.member_died(ANNA, 0.0)))
    trio.owner.member_died(BEN, 0.0)
    [(_, answer)] = sent(trio.carl.hear(OWNER, early[CARL], 0.0))
    assert FreeValue(hers.ref) not in trio.owner.hear(CARL, answer, 0.0)
    assert trio.owner.counts().owned == 1


def test_a_child_of_a_settled_member_is_confirmed_and_not_listed(trio: Trio) -> None:
    hers, other = trio.created_by_anna(), trio.ben.create(OWNER)
    trio.owner.own(other)
    his = trio.anna.fork(hers, BEN)
    answers(trio, trio.owner.member_died(BEN, 0.0), trio.anna, trio.carl)
    effects = trio.owner.hear(ANNA, Register([his]), 0.0)
    assert only(effects, ANNA) == Confirm([(his.ref, his.fork_id)])
    assert trio.owner.counts().forks == 1


def test_what_is_sent_to_the_dead_keeps_nothing(trio: Trio) -> None:
    hers = trio.created_by_anna()
    mine = trio.owner.own_local()
    trio.anna.member_died(BEN, 0.0)
    trio.owner.member_died(BEN, 0.0)
    trio.anna.fork(hers, BEN)
    trio.owner.fork(mine, BEN)
    assert trio.anna.counts().pending_children == 0
    trio.owner.drop(mine)
    assert trio.owner.flush() == [FreeValue(mine.ref)]


def test_nothing_is_accepted_from_a_dead_parent(trio: Trio) -> None:
    his = trio.anna.fork(trio.created_by_anna(), BEN)
    trio.ben.receive(his, ANNA)
    trio.ben.flush()
    trio.ben.member_died(ANNA, 0.0)
    assert trio.ben.hear(OWNER, Confirm([(his.ref, his.fork_id)]), 0.0) == [Confirmed(his)]
    assert trio.ben.flush() == []


def test_a_fork_whose_owner_is_unknown_to_its_receiver_keeps_nothing(trio: Trio) -> None:
    """News of the owner, a newcomer, did not reach the receiver in time."""
    hers = trio.created_by_anna()
    dora = Member(5, [ANNA, BEN, CARL])
    trio.anna.member_joined(dora.me)
    sent_on = trio.anna.fork(hers, dora.me)
    assert not dora.receive(sent_on, ANNA)
    accept = only(dora.flush(), ANNA)
    trio.anna.drop(hers)
    trio.anna.hear(dora.me, accept, 0.0)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == [FreeValue(hers.ref)]


def test_a_reference_first_heard_of_after_its_creator_died(trio: Trio) -> None:
    his = trio.anna.fork(trio.anna.create(OWNER), BEN)
    trio.ben.receive(his, ANNA)
    trio.owner.member_died(ANNA, 0.0)
    effects = trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    assert effects[0] == NeverCreated(his.ref)


def test_a_creator_that_dies_before_its_request_arrives(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    trio.owner.hear(BEN, register, 0.0)
    assert NeverCreated(hers.ref) in trio.owner.member_died(ANNA, 0.0)
    assert not trio.owner.own(hers)


def test_a_newcomer_answers_a_round_under_way(trio: Trio) -> None:
    hers = trio.created_by_anna()
    effects = trio.owner.member_died(ANNA, 0.0)
    trio.owner.member_joined(9)
    question = only(trio.owner.flush(), 9)
    assert FreeValue(hers.ref) not in answers(trio, effects, trio.ben, trio.carl)
    newcomer = Member(9, [OWNER, BEN, CARL])
    assert FreeValue(hers.ref) in trio.owner.hear(9, only(newcomer.hear(OWNER, question, 0.0), OWNER), 0.0)
