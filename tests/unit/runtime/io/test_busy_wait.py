"""How long threads look before they sleep."""

from __future__ import annotations

from time import monotonic

import pytest

from farcall.runtime.io.busy_wait import BusyWait


def looks(spin: BusyWait) -> int:
    """How often ``spin`` looks before it lets the kernel wait."""
    asked: list[float] = []

    def attempt(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return timeout_s > 0

    assert spin.wait(attempt, monotonic(), 1.0)
    return len(asked) - 1


@pytest.mark.parametrize("longer_s", [0.0, 0.005])
def test_who_must_not_look_does_not_look_longer(longer_s: float) -> None:
    spin = BusyWait(0.0)
    spin.look_for(longer_s)
    assert looks(spin) == 0


def test_where_waits_are_longer_it_is_looked_for_longer_and_never_less() -> None:
    spin = BusyWait(1e-9)
    assert looks(spin) == 1
    spin = BusyWait(1e-9)
    spin.look_for(0.01)
    spin.look_for(1e-9)
    assert looks(spin) > 1
