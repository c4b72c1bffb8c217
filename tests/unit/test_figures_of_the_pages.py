"""The tables of README.md and benchmarks/results/README.md are those of the kept runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools import figures

from farcall.cli.bench.cases import CASES
from farcall.cli.bench.report import as_json
from farcall.cli.bench.results import Results, judge


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.parent.name)
def test_pages_have_the_figures_of_the_kept_runs(page: Any) -> None:
    assert page.read_text() == figures.fill(page.read_text()), "run: python -m tools.figures"


def test_every_table_stands_on_a_page_once() -> None:
    names = [name for page in figures.PAGES for _, name, _ in figures.BLOCK.findall(page.read_text())]
    assert sorted(names) == sorted(figures.FIGURES)
    begun = sum(page.read_text().count("<!-- figures: ") for page in figures.PAGES)
    assert begun == len(names), "each has its end"


def test_every_row_is_of_a_case_of_the_bench() -> None:
    assert {case for case, _ in figures.AGAINST_STOCK.values()} <= set(CASES)


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run of four cases wrote, in the place of both kept ones."""
    callers, by_value, sent, echoed = (
        CASES[name] for name in ("8 callers, layer 64x64", "function of the script", "send 256 MiB", "echo 1 MiB")
    )
    results = Results([callers, by_value, sent, echoed])
    for ours, theirs in ((2000.0, 1000.0), (1800.0, 1000.0), (2000.0, 2000.0)):
        results.record(callers, "farcall", {"rate": ours, "p99": 2500.0})
        results.record(callers, "stock", {"rate": theirs, "p99": 30.0})
        results.record(by_value, "farcall", {"p50": 20.4})
        results.record(sent, "farcall", {"p50": 9.0})
    results.fail(sent, "stock", "it broke")
    made: dict[str, Any] = json.loads(as_json(results, judge(results), rounds=3))
    monkeypatch.setattr(figures, "kept", lambda name: made)
    return made


def test_rows_say_what_was_measured_what_failed_and_what_was_not_measured(document: dict[str, Any]) -> None:
    rows = figures.against_stock().splitlines()
    assert "| a layer of 64x64, likewise" + " | 2,000 calls/s | 1,000 calls/s | **1.8**" * 2 + " |" in rows
    assert "| a call of a function of the script" + " | 20.4 us | - | -" * 2 + " |" in rows
    assert "| later sends of 256 MiB" + " | 27.8 ms | failed | -" * 2 + " |" in rows
    assert "| echoes of 1 MiB" + " | not measured |  | " * 2 + " |" in rows


def test_a_whole_run_has_its_spread_the_promises_it_broke_and_what_it_lacks(document: dict[str, Any]) -> None:
    text = figures.whole_run("two-cores.json")()
    assert "| 8 callers, layer 64x64 | 2,000 calls/s | 1,000 calls/s | - | 1.8 (1.0 to 2.0) |" in text
    assert "| 8 callers, layer 64x64, p99 | 2.5 ms | 30 us | - | 0.01 (0.01 to 0.01) |" in text
    assert "- 8 callers, layer 64x64, calls/s: 1.8 (at least 3x stock)" in text
    assert "Not measured in this run: no-op; " in text


def test_a_stamp_has_what_its_file_says(document: dict[str, Any]) -> None:
    document.update(cpus=2, processor="A processor", torch="2.13", python="3.11", date="2026-11-19", commit="12345678")
    assert "2 cores, A processor, torch 2.13, Python 3.11, 2026-11-19, commit `12345678`; medians" in figures.stamps()
    del document["processor"], document["date"]
    document["commit"] = ""
    assert "2 cores, torch 2.13, Python 3.11, no date kept, no commit kept; medians of 3 rounds" in figures.stamps()
