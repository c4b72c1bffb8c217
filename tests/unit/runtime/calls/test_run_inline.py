"""Which functions may run on the I/O thread."""

from __future__ import annotations

import pytest

from farcall.runtime.calls import run_inline
from farcall.runtime.calls.run_inline import MOST_PARDON_RUNS, PARDON_RUNS, QUICK_S, InlineFunctions


@pytest.fixture
def functions() -> InlineFunctions:
    return InlineFunctions()


def runs_until_pardoned(functions: InlineFunctions) -> int:
    runs = 0
    while b"f" not in functions.trusted:
        functions.ran(b"f", 0.0)
        runs += 1
    return runs


def test_one_slow_run_is_forgiven_and_two_are_not(functions: InlineFunctions) -> None:
    assert functions.ran(b"f", QUICK_S / 2)
    assert b"f" in functions.trusted
    assert functions.ran(b"f", 10 * QUICK_S)
    assert b"f" not in functions.trusted
    assert functions.is_quick(b"f")
    assert functions.ran(b"f", 1.5 * QUICK_S)
    assert b"f" in functions.trusted
    functions.ran(b"f", 10 * QUICK_S)
    assert not functions.ran(b"f", 10 * QUICK_S)
    assert not functions.ran(b"f", 1.5 * QUICK_S)
    assert not functions.is_quick(b"f")


def test_a_function_that_is_slow_there_again_and_again_stays_away_for_longer(
    functions: InlineFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run_inline, "perf_counter", lambda: now)
    found = []
    for _ in range(5):
        functions.ban(b"f")
        found.append(runs_until_pardoned(functions))
    assert found == [4 * PARDON_RUNS, 16 * PARDON_RUNS, *[MOST_PARDON_RUNS] * 3]


def test_what_was_long_ago_is_forgotten(functions: InlineFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_inline, "perf_counter", lambda: now)
    for _ in range(5):
        functions.ban(b"f")
    runs_until_pardoned(functions)
    now += run_inline.FORGOTTEN_S
    functions.ban(b"f")
    assert runs_until_pardoned(functions) == 4 * PARDON_RUNS
