"""Tables for a person and JSON for a program, from the same results. Owns wording and rounding only."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from statistics import median
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from farcall.cli.bench.cases import Case
from farcall.cli.bench.contenders import Farcall, Stock
from farcall.cli.bench.driver import CONTENDERS
from farcall.cli.bench.floor import Floor
from farcall.cli.bench.results import Results
from farcall.cli.bench.targets import Verdict

_HELD = {True: "[green]holds[/]", False: "[red]MISSED[/]", None: "[dim]not measured[/]"}


def label(results: Results, case: Case, statistic: str) -> str:
    """A case's name, with the statistic where it has more than one."""
    return f"{case.name} {statistic}" if len(results.statistics(case)) > 1 else case.name


def figure(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    text = f"{figure(median(ratios))}x"
    return text if len(ratios) == 1 else f"{text} [dim]({figure(min(ratios))}-{figure(max(ratios))})[/]"


def print_results(console: Console, results: Results, rounds: int) -> None:
    """The table of medians and ratios, and below it what failed."""
    table = Table(
        title=f"medians over {rounds} rounds",
        caption="x stock: how many times better than stock. x floor: how many times the floor's cost. "
        "Ratios are taken within a round; in brackets, the lowest and the highest round.",
        caption_justify="left",
        title_justify="left",
    )
    table.add_column("case")
    table.add_column("unit")
    for name in CONTENDERS:
        table.add_column(name, justify="right")
    table.add_column("x stock", justify="right")
    table.add_column("x floor", justify="right")
    for case in results.cases:
        for statistic in results.statistics(case):
            over_floor = [1 / r for r in results.times_better(case, Farcall.name, Floor.name, statistic)]
            table.add_row(
                label(results, case, statistic),
                case.unit,
                *(figure(results.median(case.name, name, statistic)) for name in CONTENDERS),
                _spread(results.times_better(case, Farcall.name, Stock.name, statistic)),
                _spread(over_floor),
            )
    console.print(table)
    reasons: dict[tuple[str, str], list[str]] = {}
    for (case_name, contender), reason in results.failures.items():
        reasons.setdefault((contender, reason), []).append(case_name)
    for (contender, reason), case_names in reasons.items():
        text = f"{contender} failed ({reason}) at: {'; '.join(case_names)}"
        console.print(text, style="red", markup=False, highlight=False)


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    table = Table(title="what farcall promises", title_justify="left")
    table.add_column("promise")
    table.add_column("wanted")
    table.add_column("measured", justify="right")
    table.add_column("")
    for verdict in verdicts:
        table.add_row(verdict.text, verdict.wanted, figure(verdict.value), _HELD[verdict.held])
    console.print(table)


def as_json(results: Results, verdicts: list[Verdict], rounds: int) -> bytes:
    """Everything measured, round by round."""
    cases: list[dict[str, Any]] = []
    for case in results.cases:
        values: dict[str, Any] = {}
        for statistic in results.statistics(case):
            values[statistic] = {
                "rounds": {name: results.rounds(case.name, name, statistic) for name in CONTENDERS},
                "median": {name: results.median(case.name, name, statistic) for name in CONTENDERS},
                "times_better_than": {
                    name: results.times_better(case, Farcall.name, name, statistic) for name in (Floor.name, Stock.name)
                },
            }
        cases.append(
            {
                "name": case.name,
                "unit": case.unit,
                "better": case.better,
                "nodes": case.size,
                "transport": case.transport,
                "statistics": values,
            }
        )
    document = {
        "farcall": version("farcall"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "cases": cases,
        "start_s": results.start_s,
        "failures": [
            {"case": case, "contender": contender, "reason": reason}
            for (case, contender), reason in results.failures.items()
        ],
        "targets": verdicts,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
