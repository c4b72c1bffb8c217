"""What waits between a sender and the wire, with a clock that the test turns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from farcall.protocol.frames import CONTROL, REQUEST, Frame
from farcall.testing.faults.delay_line import NEVER, DelayLine
from farcall.testing.faults.rules import Cut, Delay, Drop, Duplicate, Fail, Reorder


@dataclass
class Note:
    text: str
    kind: int = REQUEST
    repeatable: bool = True
    names = frozenset({"request"})

    @property
    def frame(self) -> Frame:
        return Frame(self.kind)

    def remains(self) -> Note:
        return Note(f"remains of {self.text}")

    def copy(self, number: int) -> Note:
        return Note(f"{self.text}{number}")


class Tried:
    """A delay line, and what has left it."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.line = DelayLine(lambda note: self.failed.append(note.text))

    def add(self, note: str | Note, fault=None, now: float = 0.0, drawn: float = 0.0) -> None:
        self.line.add(Note(note) if isinstance(note, str) else note, fault, drawn, now)

    def at(self, now: float) -> list[str]:
        return [note.text for note in self.line.take(now)]


@pytest.fixture
def tried() -> Tried:
    return Tried()


def test_without_a_fault_all_leaves_at_once_in_order(tried):
    for text in "abc":
        tried.add(text)
    assert tried.at(0.0) == ["a", "b", "c"]
    assert tried.line.next_due == NEVER
    assert len(tried.line) == 0


def test_of_what_is_dropped_the_remains_leave(tried):
    tried.add("a", Drop())
    tried.add("b")
    assert tried.at(0.0) == ["remains of a", "b"]


def test_a_request_that_fails_is_told_and_gone(tried):
    tried.add(Note("a"), Fail(3, 1.0))
    assert tried.failed == ["a"]
    assert tried.at(100.0) == ["remains of a"]


def test_a_control_message_that_fails_goes_late_once_and_in_order(tried):
    tried.add(Note("a", CONTROL), Fail(3, 1.0))
    tried.add("b")
    assert tried.failed == []
    assert tried.line.next_due == pytest.approx(1.0 + 1.5 + 2.25)
    assert tried.at(4.7) == []
    assert tried.at(4.8) == ["a", "b"]


def test_a_delayed_message_is_overtaken(tried):
    tried.add("a", Delay(1.0, 0.0, False))
    tried.add("b")
    assert tried.at(0.5) == ["b"]
    assert tried.line.next_due == 1.0
    assert tried.at(1.0) == ["a"]


def test_jitter_adds_what_was_drawn(tried):
    tried.add("a", Delay(1.0, 2.0, False), drawn=0.25)
    assert tried.line.next_due == 1.5


def test_equal_delays_keep_their_order(tried):
    for text in "abc":
        tried.add(text, Delay(1.0, 0.0, False))
    assert tried.at(1.0) == ["a", "b", "c"]


def test_a_delay_in_order_holds_what_follows(tried):
    tried.add("a")
    tried.add("b", Delay(1.0, 0.0, True))
    tried.add("c")
    assert tried.at(0.9) == []  # added in one go: a waits, too
    assert tried.at(1.0) == ["a", "b", "c"]


def test_copies_follow_at_once_or_later(tried):
    tried.add("a", Duplicate(2, 0.0))
    assert tried.at(0.0) == ["a", "a1", "a2"]
    tried.add("b", Duplicate(2, 0.5))
    assert tried.at(0.0) == ["b"]
    assert tried.at(0.5) == ["b1"]
    assert tried.at(1.0) == ["b2"]
    assert len(tried.line) == 0


def test_what_may_not_come_twice_comes_once(tried):
    tried.add(Note("a", repeatable=False), Duplicate(2, 0.0))
    assert tried.at(0.0) == ["a"]


def test_reordered_messages_let_others_pass(tried):
    tried.add("a", Reorder(2, 10.0))
    tried.add("b")
    assert tried.at(0.0) == ["b"]
    tried.add("c")
    tried.add("d")
    assert tried.at(0.0) == ["c", "a", "d"]


def test_without_company_a_reordered_message_goes_in_time(tried):
    tried.add("a", Reorder(2, 0.1))
    assert tried.at(0.05) == []
    assert tried.line.next_due == 0.1
    assert tried.at(0.1) == ["a"]


def test_faults_of_connections_are_not_for_lanes(tried):
    with pytest.raises(AssertionError):
        tried.add("a", Cut())
