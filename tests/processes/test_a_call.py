"""docs/a_call.md walks one call, one reference and one backward pass through the files that these really pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.kit.travel import SOURCE, Travel, measure

from farcall.serialize.code import is_available
from farcall.serialize.flat import speedups

PAGE = Path(__file__).parents[2] / "docs" / "a_call.md"
MARGIN = 1.1
"""Wakes of two processes coincide now and then, and not always in the same way."""


@pytest.fixture(scope="module")
def travels() -> dict[str, Travel]:
    return measure()


def section(name: str) -> str:
    """The text under the heading that begins with ``name``."""
    [text] = re.findall(rf"^## {name}[^\n]*\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return text


def files_named(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_/]+\.py)`", text))


@pytest.mark.parametrize(
    ("operation", "sections"),
    [
        ("call", ["One call"]),
        ("reference", ["One call", "One reference"]),
        ("backward", ["One call", "One backward pass"]),
    ],
)
def test_the_page_names_the_files_that_an_operation_passes(
    travels: dict[str, Travel], operation: str, sections: list[str]
) -> None:
    named = set().union(*(files_named(section(name)) for name in sections))
    assert travels[operation].files - named == set()


def test_every_file_on_the_page_exists() -> None:
    assert [name for name in files_named(PAGE.read_text()) if not Path(SOURCE, name).exists()] == []


@pytest.mark.parametrize(
    ("operation", "functions", "without_codec", "files"),
    [
        ("no-op", 70, 75, 20),
        ("call", 72, 94, 24),
        ("operator", 72, 118, 25),
        ("operator in shared memory", 102, 142, 29),
        ("reference", 146, 169, 32),
        ("backward", 241, 321, 34),
    ],
)
def test_an_operation_does_not_travel_further_than_it_did(
    travels: dict[str, Travel], operation: str, functions: int, without_codec: int, files: int
) -> None:
    """``without_codec``: where there is no compiled codec, and arguments are pickled."""
    assert travels[operation].functions <= MARGIN * (without_codec if speedups else functions)
    assert len(travels[operation].files) <= MARGIN * files


def test_a_call_through_a_handle_costs_the_same(travels: dict[str, Travel]) -> None:
    # Not against the files of the other: on a busy machine one of them may pass a timer.
    assert travels["handle"].files - files_named(section("One call")) == {"rpc/handles.py"}
    assert travels["handle"].functions <= MARGIN * travels["call"].functions


@pytest.mark.skipif(not is_available(), reason="needs cloudpickle: pip install 'farcall[notebook]'")
@pytest.mark.parametrize(("operation", "more"), [("function by value", 3), ("function by value with a value", 5)])
def test_a_function_by_value_costs_little_more_than_a_module_s(
    travels: dict[str, Travel], operation: str, more: int
) -> None:
    assert travels[operation].functions <= travels["call"].functions + more + 0.5  # of ten calls, one may wake twice
