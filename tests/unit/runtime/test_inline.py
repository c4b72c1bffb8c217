"""The watch over the I/O thread: who owns the role, and that every function that runs inline is watched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from farcall.runtime import inline
from farcall.runtime.inline import Standby, claim

PATIENCE_S = 10.0


class Role:
    def __init__(self) -> None:
        self.passed_on = threading.Event()

    def pass_on(self) -> None:
        self.passed_on.set()


@pytest.fixture
def standby() -> Iterator[Standby]:
    found = Standby("test")
    yield found
    found.stop()


class Clock:
    """Stands still until it is set: however long a busy machine lets a test wait, nothing is slow before."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(inline, "monotonic", found)
    return found


@pytest.mark.usefixtures("clock")
def test_quick_function_keeps_the_role(standby: Standby) -> None:
    role = Role()
    ticket = standby.begin(role)
    assert standby.end(ticket)
    assert not role.passed_on.is_set()


def test_slow_function_loses_it(standby: Standby) -> None:
    role = Role()
    ticket = standby.begin(role)
    assert role.passed_on.wait(PATIENCE_S)
    assert not standby.end(ticket)


def test_end_of_a_slow_function_does_not_blind_the_watch_to_the_next(standby: Standby) -> None:
    # The thread that lost the role comes back while its successor runs a function, which may be slow as well.
    first, second = Role(), Role()
    slow = standby.begin(first)
    assert first.passed_on.wait(PATIENCE_S)
    standby.begin(second)
    assert not standby.end(slow)
    assert second.passed_on.wait(PATIENCE_S)


def test_role_given_away_by_the_function_itself_is_not_taken_again(standby: Standby, clock: Clock) -> None:
    role = Role()
    ticket = standby.begin(role)
    assert claim(ticket)
    assert not standby.end(ticket)
    after = Role()
    standby.begin(after)
    clock.now = 1.0
    assert after.passed_on.wait(PATIENCE_S)
    assert not role.passed_on.is_set()
