"""How long threads look before they sleep."""

from __future__ import annotations

from time import monotonic

import pytest

from farcall.runtime.io.busy_wait import BusyWait


def looks(spin: BusyWait, now: float) -> int:
    """How often ``spin`` looks before it lets the kernel wait, which begins ``now``."""
    looked: list[bool] = []

    def look() -> bool:
        looked.append(True)
        return False

    assert spin.wait(look, lambda timeout_s: timeout_s > 0, now, 1.0)
    return len(looked)


@pytest.mark.parametrize("longer_s", [0.0, 0.005])
def test_who_must_not_look_does_not_look_longer(longer_s: float) -> None:
    spin = BusyWait(0.0)
    spin.look_for(longer_s)
    assert looks(spin, monotonic()) == 0


class Sleeper:
    """A clock, and answers that come so long after each wait began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, may_doze: bool) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.spin = BusyWait(150e-6, may_doze)
        monkeypatch.setattr("farcall.runtime.io.busy_wait.monotonic", lambda: self.now)
        monkeypatch.setattr("farcall.runtime.io.busy_wait.sleep", self.sleep)
        monkeypatch.setattr("farcall.runtime.io.busy_wait._yield", lambda: self.pass_s(1e-6))

    def pass_s(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.pass_s(seconds + 80e-6)

    def wait(self, answer_after_s: float) -> bool:
        """Is the answer found by looking?"""
        comes_at = self.now + answer_after_s
        asleep = []

        def sleep_until(timeout_s: float) -> bool:
            asleep.append(timeout_s)
            self.now = max(self.now, comes_at)
            return True

        assert self.spin.wait(lambda: self.now >= comes_at, sleep_until, self.now, 1.0)
        return not asleep


@pytest.mark.parametrize("after_s", [300e-6, 500e-6, 1000e-6])
def test_who_may_doze_sleeps_and_looks_where_waits_are_even(monkeypatch: pytest.MonkeyPatch, after_s: float) -> None:
    sleeper = Sleeper(monkeypatch, may_doze=True)
    for _ in range(40):
        found = sleeper.wait(after_s)
    assert found
    assert 0 < after_s - sleeper.slept[-1] < 200e-6


def test_who_dozes_notices_that_waits_are_shorter_now(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(monkeypatch, may_doze=True)
    for _ in range(40):
        sleeper.wait(600e-6)
    for _ in range(100):
        before = sleeper.now
        sleeper.wait(50e-6)
    assert sleeper.now - before < 60e-6


def test_nobody_dozes_where_waits_vary_or_where_others_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    varying = Sleeper(monkeypatch, may_doze=True)
    for after_s in [100e-6, 900e-6, 300e-6, 700e-6] * 20:
        varying.wait(after_s)
    assert varying.slept == []
    io_thread = Sleeper(monkeypatch, may_doze=False)
    for _ in range(40):
        io_thread.wait(500e-6)
    assert io_thread.slept == []


def test_where_waits_are_longer_it_is_looked_for_longer_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Sleeper(monkeypatch, may_doze=False)
    spin = BusyWait(1e-9)
    assert looks(spin, clock.now) == 1
    spin = BusyWait(1e-9)
    spin.look_for(50e-6)
    spin.look_for(1e-9)
    assert looks(spin, clock.now) > 1
