"""One story per test: what is said on each way a reference can go, twice, out of order, or never sent."""

from __future__ import annotations

import pytest
from tests.kit.reference_machines import ANNA, BEN, EVERYONE, OWNER, Member, Trio, only, sent

from farcall.protocol.references.messages import (
    Accept,
    Confirm,
    Confirmed,
    FreeValue,
    NeverCreated,
    Register,
    Release,
    Withdraw,
)


@pytest.fixture
def trio() -> Trio:
    return Trio()


# --- what each way costs -----------------------------------------------------------------------------------


def test_references_and_forks_are_numbered_together() -> None:
    machine = Member(ANNA, EVERYONE)
    owned, created, more = machine.own_local(), machine.create(OWNER), machine.own_local()
    assert (owned.ref.local_id, created.ref.local_id, created.fork_id.local_id, more.ref.local_id) == (0, 1, 2, 3)
    forks = [owned, created, more, machine.fork(owned, BEN)]
    assert len({fork.fork_id for fork in forks}) == 4


def test_creation_and_drop_cost_one_release(trio: Trio) -> None:
    fork = trio.anna.create(OWNER)
    assert not trio.anna.confirmed_by_owner(fork)
    assert trio.owner.own(fork)
    trio.anna.confirm_created(fork)
    assert trio.anna.confirmed_by_owner(fork)
    assert trio.anna.flush() == []
    assert trio.owner.flush() == []
    trio.anna.drop(fork)
    release = only(trio.anna.flush(), OWNER)
    assert release == Release([(fork.ref, fork.fork_id)])
    assert trio.owner.hear(ANNA, release, 0.0) == [FreeValue(fork.ref)]


def test_drop_before_the_response_waits_for_it(trio: Trio) -> None:
    fork = trio.anna.create(OWNER)
    trio.anna.drop(fork)
    assert trio.anna.flush() == []
    assert trio.anna.counts().pending_users == 1
    trio.anna.confirm_created(fork)
    assert only(trio.anna.flush(), OWNER) == Release([(fork.ref, fork.fork_id)])
    assert trio.anna.counts().users == 0


def test_remote_to_oneself_says_nothing(trio: Trio) -> None:
    fork = trio.owner.create(OWNER)
    assert trio.owner.confirmed_by_owner(fork)
    trio.owner.drop(fork)
    assert trio.owner.flush() == [FreeValue(fork.ref)]


def test_owner_to_user_is_listed_when_sent(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.owner.drop(mine)
    assert trio.owner.flush() == []
    assert trio.anna.receive(hers, OWNER)
    assert trio.anna.confirmed_by_owner(hers)
    assert trio.anna.flush() == []
    trio.anna.drop(hers)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == [FreeValue(mine.ref)]


def test_user_to_owner_keeps_the_sender_until_accepted(trio: Trio) -> None:
    hers = trio.created_by_anna()
    back = trio.anna.fork(hers, OWNER)
    trio.anna.drop(hers)
    assert trio.anna.flush() == []  # a Release now could overtake the fork
    assert trio.owner.receive(back, ANNA)
    accept = only(trio.owner.flush(), ANNA)
    assert accept == Accept([back.fork_id])
    trio.anna.hear(OWNER, accept, 0.0)
    trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert trio.owner.holds(back)
    trio.owner.drop(back)
    assert trio.owner.flush() == [FreeValue(hers.ref)]


def test_user_to_user(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.anna.drop(hers)
    assert trio.anna.flush() == []
    assert trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    assert register == Register([his])
    confirm = only(trio.owner.hear(BEN, register, 0.0), BEN)
    assert confirm == Confirm([(his.ref, his.fork_id)])
    assert trio.ben.hear(OWNER, confirm, 0.0) == [Confirmed(his)]
    accept = only(trio.ben.flush(), ANNA)
    trio.anna.hear(BEN, accept, 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])


def test_user_to_itself(trio: Trio) -> None:
    hers = trio.created_by_anna()
    again = trio.anna.fork(hers, ANNA)
    trio.anna.drop(hers)
    assert trio.anna.receive(again, ANNA)
    confirm = only(trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0), ANNA)
    trio.anna.hear(OWNER, confirm, 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])
    assert trio.anna.holds(again)


# --- twice, and out of order -------------------------------------------------------------------------------


def test_a_late_duplicate_of_register_heals(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    confirm = only(trio.owner.hear(BEN, register, 0.0), BEN)
    trio.ben.hear(OWNER, confirm, 0.0)
    trio.ben.drop(his)
    releases = [message for to, message in sent(trio.ben.flush()) if to == OWNER]
    trio.owner.hear(BEN, releases[0], 0.0)
    again = only(trio.owner.hear(BEN, register, 0.0), BEN)
    assert trio.owner.counts().forks == 2
    trio.ben.hear(OWNER, again, 0.0)
    trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    assert trio.owner.counts().forks == 1


def test_a_payload_counts_once_even_after_its_fork_is_gone(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    assert trio.anna.receive(hers, OWNER)
    trio.anna.drop(hers)
    trio.anna.flush()
    assert not trio.anna.receive(hers, OWNER)


def test_a_creation_runs_once_even_after_its_value_is_gone(trio: Trio) -> None:
    hers = trio.created_by_anna()
    trio.anna.drop(hers)
    trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert not trio.owner.own(hers)
    assert trio.owner.counts().owned == 0


def test_numbers_ahead_are_forgotten_when_the_gap_closes(trio: Trio) -> None:
    mine = trio.owner.own_local()
    forks = [trio.owner.fork(mine, ANNA) for _ in range(100)]
    for fork in reversed(forks[1:]):
        assert trio.anna.receive(fork, OWNER)
    arrivals = trio.anna._arrivals[OWNER]
    assert (arrivals.last, len(arrivals.ahead)) == (0, 99)
    assert trio.anna.receive(forks[0], OWNER)
    assert (arrivals.last, arrivals.ahead) == (100, set())


def test_register_before_the_creation_arrives(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    [awaited] = trio.owner.snapshot().owned
    assert not awaited.created
    assert trio.owner.own(hers)
    [owned] = trio.owner.snapshot().owned
    assert owned.created
    assert owned.forks_by_holder == {ANNA: 1, BEN: 1}


# --- what is never sent ------------------------------------------------------------------------------------


def test_a_fork_that_never_arrives_is_withdrawn(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.anna.drop(hers)
    trio.anna.withdraw(his)
    withdraw = only(trio.anna.flush(), BEN)
    assert withdraw == Withdraw([his])
    trio.ben.hear(ANNA, withdraw, 0.0)
    assert not trio.ben.receive(his, ANNA)
    trio.anna.hear(BEN, only(trio.ben.flush(), ANNA), 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])


def test_an_owners_fork_that_never_arrives_is_withdrawn(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.owner.drop(mine)
    trio.owner.withdraw(hers)
    trio.anna.hear(OWNER, only(trio.owner.flush(), ANNA), 0.0)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == [FreeValue(mine.ref)]


def test_a_withdrawal_of_what_did_arrive_changes_nothing(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.anna.receive(hers, OWNER)
    trio.owner.withdraw(hers)
    trio.anna.hear(OWNER, only(trio.owner.flush(), ANNA), 0.0)
    assert trio.anna.holds(hers)
    assert trio.anna.flush() == []


def test_a_creation_that_never_arrives_becomes_an_error(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    trio.anna.withdraw_creation(hers)
    effects = trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert effects[0] == NeverCreated(hers.ref)
    assert not trio.owner.own(hers)
    trio.anna.hear(OWNER, only(effects, ANNA), 0.0)
    assert trio.anna.confirmed_by_owner(hers)
