"""Versions that are lent: when one may go, and who is sent what."""

from __future__ import annotations

from farcall.protocol.weights.lending import Freed, Lend, Lender, Stranded


def lender(*members: int, keep: int = 2) -> Lender:
    made = Lender(keep)
    for member in members:
        assert made.want(member, True, 0) == []
    return made


def test_each_version_goes_to_all_who_want_it() -> None:
    lent = lender(7, 8)
    assert lent.push(1) == [Lend(7, 1), Lend(8, 1)]


def test_who_comes_later_gets_the_newest_at_once() -> None:
    lent = lender()
    lent.push(1)
    lent.push(2)
    assert lent.want(7, True, 0) == [Lend(7, 2)]
    assert lent.want(7, True, 0) == []


def test_who_does_not_answer_gets_no_more_and_then_the_newest() -> None:
    lent = lender(7)
    lent.push(1)
    for number in (2, 3, 4):
        assert Lend(7, number) not in lent.push(number)
    assert lent.take(7, 1, "mapped") == [Lend(7, 4)]
    assert lent.versions == [1, 3, 4]


def test_who_has_not_answered_for_the_newest_version_is_awaited() -> None:
    lent = lender(7, 8)
    lent.push(1)
    assert lent.awaited == [7, 8]
    lent.take(7, 1, "mapped")
    lent.take(8, 1, "dropped")
    assert lent.awaited == []
    lent.push(2)
    lent.push(3)
    lent.end()
    lent.take(8, 2, "copied")
    assert lent.awaited == [7, 8]
    lent.take(8, 3, "copied")
    assert lent.awaited == [7]
    lent.lose(7)
    assert lent.awaited == []


def test_who_is_superseded_awaits_nobody() -> None:
    lent = lender(7)
    lent.push(1)
    lent.close()
    assert lent.awaited == []


def test_a_version_is_freed_when_it_is_not_kept_and_nobody_reads_it() -> None:
    lent = lender(7, keep=1)
    lent.push(1)
    lent.take(7, 1, "mapped")
    assert lent.push(2) == [Lend(7, 2)]
    assert lent.take(7, 2, "mapped") == []
    assert lent.take(7, 1, "dropped") == [Freed(1)]
    assert lent.take(7, 1, "dropped") == []


def test_a_copy_ends_the_loan() -> None:
    lent = lender(7, keep=1)
    lent.push(1)
    lent.take(7, 1, "copied")
    assert lent.push(2) == [Lend(7, 2), Freed(1)]
    assert lent.taken == {7: (1, "copied")}


def test_a_dead_borrower_leaves_memory_that_is_never_used_again() -> None:
    lent = lender(7, 8, keep=1)
    lent.push(1)
    lent.take(7, 1, "mapped")
    lent.take(8, 1, "copied")
    lent.push(2)
    assert lent.lose(7) == [Stranded(1), Stranded(2), Freed(1)]
    assert lent.lose(9) == []


def test_a_wish_that_was_overtaken_does_not_count() -> None:
    lent = lender()
    lent.push(1)
    assert lent.want(7, True, 5) == [Lend(7, 1)]
    assert lent.want(7, False, 4) == []
    assert lent.subscribers == [7]


def test_who_wants_twice_answers_twice() -> None:
    lent = lender(7, keep=1)
    lent.push(1)
    lent.take(7, 1, "mapped")
    lent.want(7, False, 1)
    assert lent.want(7, True, 2) == [Lend(7, 1)]
    lent.push(2)
    assert lent.take(7, 1, "dropped") == [Lend(7, 2)]
    assert lent.take(7, 1, "dropped") == [Freed(1)]


def test_a_closed_lender_keeps_what_is_read() -> None:
    lent = lender(7)
    lent.push(1)
    lent.push(2)
    assert lent.close() == [Freed(2)]
    assert lent.take(7, 1, "dropped") == [Freed(1)]


def test_who_is_late_gets_the_last_version_of_a_lender_that_ends() -> None:
    lent = lender(7, 8)
    lent.push(1)
    lent.take(8, 1, "mapped")
    lent.push(2)
    lent.push(3)  # 7 has not answered for the first one, 8 not for the second
    lent.end()
    assert lent.take(7, 1, "dropped") == [Lend(7, 3)]
    assert 3 in lent.versions
    assert Lend(8, 3) in lent.take(8, 2, "dropped")
    assert lent.subscribers == []
    lent.take(8, 1, "dropped")
    lent.take(8, 3, "dropped")
    assert Freed(3) in lent.take(7, 3, "dropped")
    assert lent.versions == []


def test_a_lender_that_ends_waits_for_nobody_who_wants_no_more() -> None:
    lent = lender(7)
    lent.push(1)
    lent.push(2)
    assert lent.end() == []
    assert lent.want(7, False, 9) == [Freed(2)]


def test_whoever_wants_versions_anew_gets_the_newest_anew() -> None:
    lent = lender(7)
    assert lent.push(1) == [Lend(7, 1)]
    assert lent.want(7, True, 5) == []  # sent before the answer for the first one
    assert lent.take(7, 1, "dropped") == [Lend(7, 1)]
