"""The table: which claim stays, who holds what, and how two tables are compared."""

from __future__ import annotations

import pytest

from farcall.protocol.member import HOST_SILENT, Member
from farcall.protocol.membership.messages import Status, Update
from farcall.protocol.membership.table import Change, Table

ME = Member("me", 0, 1)
OTHER = Member("other", 1, 2, ("tcp:host:1",), admission=4)


def alive(version: int = 0, record: Member = OTHER) -> Update:
    return Update(record.incarnation, Status.ALIVE, version, record)


def unresponsive(version: int = 0) -> Update:
    return Update(OTHER.incarnation, Status.UNRESPONSIVE, version, OTHER)


def ended(status: Status) -> Update:
    return Update(OTHER.incarnation, status, 0, None, "why")


def test_why_a_member_is_dead_is_told_to_programs_by_a_code() -> None:
    """A text is for people, and whoever tells of the death chooses it."""
    for host_is_silent in (False, True):
        table = Table(ME, 0.0)
        table.apply(alive(), 1.0)
        death = Update(OTHER.incarnation, Status.DEAD, 0, None, HOST_SILENT, host_is_silent)
        table.apply(death, 2.0)
        entry = table.entries[OTHER.incarnation]
        assert (entry.host_is_silent, entry.as_update()) == (host_is_silent, death)


@pytest.fixture
def table() -> Table:
    return Table(ME, 0.0)


def test_claims_about_one_life_in_order(table: Table) -> None:
    assert table.apply(alive(), 1.0) is Change.JOINED
    assert table.apply(alive(), 1.0) is Change.NOTHING
    assert table.apply(unresponsive(), 2.0) is Change.UNRESPONSIVE
    assert table.apply(alive(), 2.0) is Change.NOTHING, "only a higher version refutes"
    assert table.apply(alive(1), 3.0) is Change.RECOVERED
    assert table.apply(unresponsive(), 3.0) is Change.NOTHING
    assert table.apply(alive(2), 3.0) is Change.RENEWED
    assert table.apply(ended(Status.DEAD), 4.0) is Change.DIED
    assert table.apply(alive(99), 5.0) is Change.NOTHING
    assert table.apply(ended(Status.LEFT), 5.0) is Change.NOTED
    assert table.apply(ended(Status.DEAD), 6.0) is Change.NOTHING
    assert table.others == []


def test_the_end_of_a_stranger_is_remembered(table: Table) -> None:
    assert table.apply(ended(Status.DEAD), 1.0) is Change.NOTED
    assert table.apply(alive(7), 2.0) is Change.NOTHING
    assert table.member(OTHER.incarnation) is None


def test_a_claim_without_a_record_makes_no_member(table: Table) -> None:
    assert table.apply(Update(5, Status.ALIVE, 0), 1.0) is Change.NOTHING
    assert table.apply(Update(5, Status.UNRESPONSIVE, 3), 1.0) is Change.NOTHING
    assert table.size == 1


def test_the_forgotten_stay_dead(table: Table) -> None:
    table.apply(alive(), 0.0)
    table.apply(ended(Status.DEAD), 10.0)
    table.forget(ended_before=10.0)
    assert OTHER.incarnation in table.entries
    table.forget(ended_before=10.1)
    assert OTHER.incarnation not in table.entries
    assert table.apply(alive(9), 11.0) is Change.NOTHING
    (correction,) = table.better_than([OTHER.incarnation % 64], [alive(9)])
    assert (correction.incarnation, correction.status) == (OTHER.incarnation, Status.DEAD)


def test_rivals_are_members_with_the_name_or_the_rank(table: Table) -> None:
    table.apply(alive(), 0.0)
    assert table.rivals(Member("other", 7, 3)) == [OTHER]
    assert table.rivals(Member("third", 1, 3)) == [OTHER]
    assert table.rivals(Member("me", 1, 3)) in ([ME, OTHER], [OTHER, ME])
    assert table.rivals(Member("third", 3, 3)) == []
    assert table.rivals(OTHER) == []
    table.apply(ended(Status.LEFT), 1.0)
    assert table.rivals(Member("other", 1, 3)) == []


def test_a_successor_keeps_the_name_when_its_predecessor_ends(table: Table) -> None:
    successor = Member("other", 1, 3, admission=5)
    table.apply(alive(), 0.0)
    table.apply(alive(record=successor), 0.0)
    table.apply(ended(Status.DEAD), 1.0)
    assert table.rivals(Member("other", 1, 9)) == [successor]
    assert table.highest_admission == 5


def test_members_are_taken_out_from_anywhere(table: Table) -> None:
    incarnations = list(range(2, 12))
    for incarnation in incarnations:
        table.apply(alive(record=Member(f"w{incarnation}", incarnation, incarnation)), 0.0)
    for incarnation in (2, 11, 6, 3, 7):
        table.apply(Update(incarnation, Status.DEAD, 0), 1.0)
        incarnations.remove(incarnation)
        assert sorted(table.others) == incarnations
        assert [table.others[table.entries[one].place] for one in incarnations] == incarnations


def test_who_has_the_lowest_rank(table: Table) -> None:
    table = Table(Member("me", 5, 1), 0.0)
    table.apply(unresponsive(), 0.0)
    assert table.lowest_rank() == OTHER
    assert table.lowest_rank(trusted_only=True).name == "me"


def test_equal_tables_have_equal_digests_whatever_the_dead(table: Table) -> None:
    other = Table(ME, 0.0)
    table.apply(alive(), 0.0)
    assert table.differing(other.digest()) == (OTHER.incarnation % 64,)
    table.apply(ended(Status.DEAD), 0.0)
    assert table.differing(other.digest()) == ()
