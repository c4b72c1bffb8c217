"""Fills in the figures of README.md and benchmarks/results/README.md, from the runs kept in benchmarks/results.

    python -m tools.figures

What stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` is made anew from the files; nobody
writes a figure of theirs by hand. ``tests/unit/test_figures_of_the_pages.py`` fails where a page is out of date. A case
that a run does not have is shown as not measured, and a stamp has as much as its file says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.others import TITLES, as_table

from farcall.cli.bench.cases import CASES, SIZES
from farcall.cli.bench.measure import GIBIBYTE
from farcall.cli.bench.report import figure
from farcall.cli.bench.results import LOWER_IS_BETTER

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", RESULTS / "README.md")
BLOCK = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

AGAINST_STOCK = {
    "a call of an empty function": ("no-op", "p50"),
    "a call of a function of the script": ("function of the script", "p50"),
    "empty functions, 64 calls in flight": ("no-op, 64 in flight", "rate"),
    "`torch.add` of two 16 KiB tensors, 64 in flight": ("torch.add of 16 KiB, 64 in flight", "rate"),
    "`torch.add` of two 64x64 tensors, by 8 callers of one callee": ("8 callers, torch.add 64x64", "rate"),
    "a layer of 64x64, likewise": ("8 callers, layer 64x64", "rate"),
    "a layer of 512x512, likewise": ("8 callers, layer 512x512", "rate"),
    "the first send of 256 MiB, memory cold": ("send 256 MiB from cold", "first"),
    "later sends of 256 MiB": ("send 256 MiB", "p50"),
    "echoes of 1 MiB": ("echo 1 MiB", "p50"),
    "20 calls in a chain and their backward pass": ("backward through 20 calls", "p50"),
    "a training step over one remote worker": ("train step", "p50"),
}
"""The rows of README's table: the case of ``farcall bench``, and which of its statistics."""
NOT_MEASURED = "not measured"
_NAMES = {"p99": ", p99", "cpu": ", processor time", "first": ", the first", "second": ", the second"}


class Run:
    """What ``farcall bench --json`` wrote, today or in another year."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.cases: dict[str, dict[str, Any]] = {case["name"]: case for case in document["cases"]}
        self._failed = {(failure["case"], failure["contender"]) for failure in document["failures"]}

    def cell(self, case: str, statistic: str, contender: str) -> str:
        if (case, contender) in self._failed:
            return "failed"
        values = self.cases.get(case, {}).get("statistics", {}).get(statistic)
        if values is None:
            return NOT_MEASURED
        value, unit = values["median"][contender], self.cases[case]["unit"]
        if value is None:
            return "-"
        if unit == "GiB/s":  # as a time, which can be compared with that of a first send
            size_bytes = next(size for label, size in SIZES.items() if label in case)
            return quantity(size_bytes / GIBIBYTE / value * 1e6, "us")
        return quantity(value, "us" if statistic in LOWER_IS_BETTER else unit)

    def times_stock(self, case: str, statistic: str) -> list[float]:
        """How many times better than stock, by round."""
        values = self.cases.get(case, {}).get("statistics", {}).get(statistic)
        return values["times_better_than"]["stock"] if values else []

    @property
    def stamp(self) -> str:
        rounds = self.document["rounds"]
        return f"{stamp(self.document)}; {'one round' if rounds == 1 else f'medians of {rounds} rounds'}"


def kept(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return document


def quantity(value: float, unit: str) -> str:
    """A value for readers: with its unit, and in milliseconds where those are many."""
    if unit.startswith("us"):
        return f"{figure(value)} us" if value < 1000 else f"{figure(value / 1000)} ms"
    return f"{figure(value)} {unit}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def stamp(document: dict[str, Any]) -> str:
    """On what machine, with what, and when."""
    date, commit = document.get("date") or "no date kept", document.get("commit")
    parts = [f"{document['cpus']} cores", document.get("processor") or "", f"torch {document['torch']}"]
    parts += [f"Python {document['python']}", date, f"commit `{commit}`" if commit else "no commit kept"]
    return ", ".join(part for part in parts if part)


def against_stock() -> str:
    """Some cases of both machines; every gain as the run has it."""
    machines = {"two cores": Run(kept("two-cores.json")), "sixteen cores": Run(kept("sixteen-cores.json"))}
    head = [f"{where}: farcall | stock | times as good" for where in machines]
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---|" * 3 * len(machines)]
    for title, (case, statistic) in AGAINST_STOCK.items():
        cells = []
        for run in machines.values():
            ours, theirs = (run.cell(case, statistic, contender) for contender in ("farcall", "stock"))
            ratios = run.times_stock(case, statistic)
            same = ours == theirs == NOT_MEASURED
            cells += [ours, "" if same else theirs, f"**{times(median(ratios))}**" if ratios else "" if same else "-"]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stamps() -> str:
    runs = {name: Run(kept(f"{name}.json")) for name in ("two-cores", "sixteen-cores")}
    return "\n".join(f"- `{name}.json`: {run.stamp}" for name, run in runs.items())


def whole_run(name: str) -> Callable[[], str]:
    """Everything that one file has, what it lacks, and the promises that it does not keep."""

    def text() -> str:
        run = Run(kept(name))
        lines = [f"{run.stamp[0].upper()}{run.stamp[1:]}.", ""]
        lines += [
            "| case | farcall | stock | floor | times as good as stock (lowest to highest round) |",
            "|---|---|---|---|---|",
        ]
        for case, values in run.cases.items():
            for statistic in values["statistics"]:
                cells = [run.cell(case, statistic, contender) for contender in ("farcall", "stock", "floor")]
                ratios = run.times_stock(case, statistic)
                spread = f" ({times(min(ratios))} to {times(max(ratios))})" if len(ratios) > 1 else ""
                gain = f"{times(median(ratios))}{spread}" if ratios else "-"
                lines.append(f"| {case}{_NAMES.get(statistic, '')} | {' | '.join(cells)} | {gain} |")
        missed = [
            f"- {target['text']}: {figure(target['value'])} ({target['wanted']})"
            for target in run.document["targets"]
            if target["held"] is False
        ]
        if missed:
            lines += ["", "Promises that this run did not keep:", "", *missed]
        if lacking := [case for case in CASES if case not in run.cases]:
            lines += ["", f"Not measured in this run: {'; '.join(lacking)}."]
        return "\n".join(lines)

    return text


def other_systems() -> str:
    return as_table(kept("others.json")["systems"])


def stamp_of_other_systems() -> str:
    document = kept("others.json")
    versions = [
        f"{TITLES.get(name, name.capitalize())} {number}"
        for name, system in document["systems"].items()
        for package, number in system["versions"].items()
        if package not in ("python", "torch", "farcall")
    ]
    return f"`others.json`: {stamp(document)}; {', '.join(versions)}; medians of {document['rounds']} rounds."


FIGURES: dict[str, Callable[[], str]] = {
    "against stock": against_stock,
    "other systems": other_systems,
    "stamps": stamps,
    "stamp of other systems": stamp_of_other_systems,
    "two cores": whole_run("two-cores.json"),
    "sixteen cores": whole_run("sixteen-cores.json"),
}


def fill(page: str) -> str:
    """The text of a page, with the figures of the kept runs."""
    return BLOCK.sub(lambda block: f"{block[1]}{FIGURES[block[2]]()}\n{block[3]}", page)


def main() -> None:
    for page in PAGES:
        page.write_text(fill(page.read_text()))
        print(f"filled {page.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
