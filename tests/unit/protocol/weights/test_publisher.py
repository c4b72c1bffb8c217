"""The tenure of a publisher: its claim, its rivals, its end."""

from __future__ import annotations

from farcall.protocol.weights.directory import Directory
from farcall.protocol.weights.lending import Freed, Lend
from farcall.protocol.weights.messages import Claim, NameClaimed, NameClosed
from farcall.protocol.weights.publisher import (
    CLAIM_S,
    Answered,
    Claimed,
    Closed,
    Gone,
    Joined,
    PublisherMachine,
    PublisherState,
    Pushed,
    Taken,
    Tell,
    Wanted,
)

ME = 100


def machine(*members: int, known: Claim | None = None, number: int = 0) -> PublisherMachine:
    made = PublisherMachine("policy", ME, known=known, number=number, keep=2, members=members)
    assert made.start(10.0) == [Tell(None, NameClaimed("policy", made.claim, number))]
    return made


def answer(made: PublisherMachine, member: int, known: Claim | None = None, alive: bool = True) -> list[object]:
    return list(made.handle(Answered(member, made.claim, known or made.claim, 0, alive), 11.0))


def test_alone_it_publishes_at_once() -> None:
    made = machine()
    assert (made.state, made.claim) == (PublisherState.PUBLISHED, Claim(1, ME))


def test_it_waits_for_every_member_that_lives() -> None:
    made = machine(1, 2, 3)
    answer(made, 1)
    made.handle(Gone(2), 11.0)
    assert made.state is PublisherState.CLAIMING
    assert made._waits_for == {3}
    answer(made, 3)
    assert made.state is PublisherState.PUBLISHED
    assert made.next_deadline() == float("inf")


def test_it_does_not_wait_for_good() -> None:
    made = machine(1)
    assert made.next_deadline() == 10.0 + CLAIM_S
    made.handle_deadline(10.0)
    assert made.state is PublisherState.CLAIMING
    made.handle_deadline(10.0 + CLAIM_S)
    assert made.state is PublisherState.PUBLISHED


def test_it_goes_above_every_claim_that_it_hears_of() -> None:
    made = machine(1, 2, known=Claim(4, 9), number=17)
    assert made.claim == Claim(5, ME)
    effects = answer(made, 1, Claim(7, 3))
    assert effects == [Tell(None, NameClaimed("policy", Claim(8, ME), 17))]
    made.handle(Answered(1, Claim(5, ME), Claim(5, ME), 0), 11.0)  # to the claim before
    assert made._waits_for == {1, 2}


def test_two_never_have_one_epoch() -> None:
    made = machine(1)
    answer(made, 1, Claim(1, 5))  # lower by its incarnation, and yet the same epoch
    assert made.claim == Claim(2, ME)


def test_numbers_go_on_where_the_one_before_ended() -> None:
    made = machine(1, 2, number=3)
    made.handle(Answered(1, made.claim, made.claim, 8), 11.0)
    made.handle(Answered(2, made.claim, made.claim, 5), 11.0)
    assert made.number == 8


def test_a_higher_claim_ends_it() -> None:
    made = machine()
    made.handle(Pushed(1), 11.0)
    assert made.handle(Claimed(Claim(1, ME - 1)), 12.0) == []
    assert made.handle(Claimed(Claim(2, 1)), 12.0) == [Freed(1)]
    assert (made.state, made.superseded_by) == (PublisherState.SUPERSEDED, Claim(2, 1))
    assert made.handle(Joined(5), 12.0) == []


def test_a_claim_of_a_dead_one_is_outbid() -> None:
    made = machine()
    effects = answer(made, 1, Claim(6, 3), alive=False)
    assert effects == [Tell(None, NameClaimed("policy", Claim(7, ME), 0))]
    assert made.state is PublisherState.CLAIMING
    made.handle_deadline(11.0 + CLAIM_S)
    assert made.state is PublisherState.PUBLISHED
    assert answer(made, 1, Claim(9, 3), alive=True) == []
    assert made.state is PublisherState.SUPERSEDED


def test_who_joins_is_told() -> None:
    made = machine()
    assert made.handle(Joined(5), 12.0) == [Tell(5, NameClaimed("policy", Claim(1, ME), 0))]


def test_versions_are_lent_and_come_back_after_the_end() -> None:
    made = machine()
    made.handle(Wanted(5, True, 0), 11.0)
    assert made.handle(Pushed(1), 11.0) == [Lend(5, 1)]
    made.handle(Closed(), 11.0)
    assert made.handle(Pushed(2), 11.0) == []
    assert made.handle(Taken(5, 1, "dropped"), 11.0) == [Freed(1)]


def test_all_are_told_that_it_ends_and_get_the_last_version() -> None:
    made = machine()
    made.handle(Wanted(1, True, 0), 11.0)
    assert made.handle(Pushed(1), 11.0) == [Lend(1, 1)]
    assert made.handle(Pushed(2), 11.0) == []
    assert made.handle(Closed(), 11.0) == [Tell(None, NameClosed("policy", made.claim, 2))]
    assert made.handle(Closed(), 11.0) == []
    assert made.handle(Wanted(2, True, 0), 11.0) == [Tell(2, NameClosed("policy", made.claim, 0))]
    assert made.handle(Taken(1, 1, "dropped"), 11.0) == [Lend(1, 2), Freed(1)]
    assert made.handle(Taken(1, 2, "dropped"), 11.0) == [Freed(2)]


def test_an_end_that_is_heard_of_first() -> None:
    known = Directory()
    claim = Claim(4, 7)
    known.close(NameClosed("policy", claim, 9))
    known.claim(NameClaimed("policy", claim, 8))
    assert known.find_publisher("policy") is None
    assert known.find("policy") == (claim, 9)
    known.claim(NameClaimed("policy", Claim(5, 7), 9))
    assert known.find_publisher("policy") == Claim(5, 7)


def test_an_older_claim_that_is_heard_of_later() -> None:
    known = Directory()
    known.claim(NameClaimed("policy", Claim(5, 7), 9))
    known.claim(NameClaimed("policy", Claim(4, 7), 8))
    assert known.find_publisher("policy") == Claim(5, 7)
