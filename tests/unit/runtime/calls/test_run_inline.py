"""Which functions may run on the I/O thread."""

from __future__ import annotations

import pytest

from farcall.runtime.calls import run_inline
from farcall.runtime.calls.executor import BRIEF_S
from farcall.runtime.calls.run_inline import MOST_PARDON_RUNS, PARDON_RUNS, QUICK_S, InlineFunctions


@pytest.fixture
def functions() -> InlineFunctions:
    return InlineFunctions()


def runs_until_pardoned(functions: InlineFunctions) -> int:
    runs = 0
    while b"f" not in functions.quick:
        functions.ran(b"f", 0.0)
        runs += 1
    return runs


def place(functions: InlineFunctions) -> str:
    if b"f" in functions.quick:
        return "quick"
    return "brief" if b"f" in functions.brief else "long"


def test_a_function_that_never_ran_goes_to_a_worker(functions: InlineFunctions) -> None:
    assert place(functions) == "long"
    assert functions.expected_s == {}


@pytest.mark.parametrize(
    ("took_s", "expected"), [(QUICK_S / 2, "quick"), (2 * QUICK_S, "brief"), (BRIEF_S / 2, "brief"), (1.0, "long")]
)
def test_the_first_run_decides(functions: InlineFunctions, took_s: float, expected: str) -> None:
    functions.ran(b"f", took_s)
    assert place(functions) == expected


def test_one_long_run_is_soon_forgotten_however_long_it_was(functions: InlineFunctions) -> None:
    for _ in range(10):
        functions.ran(b"f", QUICK_S / 10)
    found = []
    functions.ran(b"f", 100.0)
    while place(functions) != "quick":
        found.append(place(functions))
        functions.ran(b"f", QUICK_S / 10)
    assert found.count("long") == 1
    assert len(found) <= 6


def test_a_function_at_the_border_does_not_change_its_place_at_each_run(functions: InlineFunctions) -> None:
    functions.ran(b"f", 0.9 * QUICK_S)
    for _ in range(10):
        functions.ran(b"f", 1.2 * QUICK_S)
        assert place(functions) == "quick"
    for _ in range(10):
        functions.ran(b"f", 3 * QUICK_S)
    for _ in range(10):
        functions.ran(b"f", 1.2 * QUICK_S)
        assert place(functions) == "brief"


def test_a_function_that_is_late_there_again_and_again_stays_away_for_longer(
    functions: InlineFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run_inline, "perf_counter", lambda: now)
    found = []
    for _ in range(6):
        functions.ban(b"f")
        found.append(runs_until_pardoned(functions))
    assert found == [4 * PARDON_RUNS, 16 * PARDON_RUNS, 64 * PARDON_RUNS, 256 * PARDON_RUNS, *[MOST_PARDON_RUNS] * 2]


@pytest.mark.parametrize(("all_s", "counts_s"), [(0.0011, 0.0001), (0.0006, 0.0005), (0.0001, 0.001)])
def test_who_waited_for_the_interpreter_was_not_long_and_who_slept_was(
    functions: InlineFunctions, all_s: float, counts_s: float
) -> None:
    assert functions.ran(b"f", 0.001, own_s=0.0001, all_s=all_s) == pytest.approx(counts_s)
    assert b"f" not in functions.sleepers  # nobody knows what it waited for


def test_who_sleeps_when_it_is_alone_is_known_for_it(functions: InlineFunctions) -> None:
    functions.ran(b"f", 0.001, own_s=0.0001)
    assert b"f" in functions.sleepers
    functions.ran(b"f", 0.001, own_s=0.001)
    assert b"f" not in functions.sleepers


def test_what_was_long_ago_is_forgotten(functions: InlineFunctions, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_inline, "perf_counter", lambda: now)
    for _ in range(5):
        functions.ban(b"f")
    runs_until_pardoned(functions)
    now += run_inline.FORGOTTEN_S
    functions.ban(b"f")
    assert runs_until_pardoned(functions) == 4 * PARDON_RUNS


def test_names_without_end_are_not_remembered_without_end(functions: InlineFunctions) -> None:
    """Callers choose the names, of functions that are not there, too: 9,000 long ones took half a gigabyte."""
    for number in range(3 * run_inline.MOST_FUNCTIONS):
        functions.ran(b"%d" % number, 0.0)
        functions.ban(b"%d" % number)
    tables = (functions.quick, functions.brief, functions.expected_s, functions._banned, functions._bans)
    assert all(len(table) <= run_inline.MOST_FUNCTIONS for table in tables)
