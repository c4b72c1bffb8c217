"""The report: tables and a picture for people, JSON for programs. Owns wording, rounding and drawing only.

The picture has one bar for each figure: how many times better than stock (or than the floor, without stock). Plain SVG,
written here: a plotting library is a lot to install for a few rectangles. The scale is logarithmic, so that twice as
good and half as good are equally long bars.
"""

from __future__ import annotations

import math
from html import escape
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from farcall.cli.bench.cases import Case
from farcall.cli.bench.contenders import CONTENDERS, Farcall, Floor, Stock
from farcall.cli.bench.results import LOWER_IS_BETTER, Results, Verdict
from farcall.cli.bench.stamp import stamp

_LABEL_WIDTH = 230
_PLOT_WIDTH = 560
_RIGHT = 80
_ROW = 24
_TOP = 56
_BOTTOM = 30
_BETTER, _WORSE, _INK, _LINE = "#2a7f62", "#b5473c", "#222222", "#cccccc"
_MOST_EXPONENT = 5
"""Bars end at 32x: one case that is better by thousands would make all others look alike."""
_BASELINES = {Stock.name: "stock torch.distributed.rpc", Floor.name: "the floor (bare sockets and copies)"}
_HEADINGS = {
    "us": "time, median",
    "p99": "time, 99th percentile",
    "cpu": "processor time of both ends",
    "first": "time, the first of fresh processes",
    "second": "time, the second of fresh processes",
    "calls/s": "calls per second",
    "refs/s": "references per second",
    "GiB/s": "bytes per second",
    "open": "open descriptors",
}
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
                "us" if statistic in LOWER_IS_BETTER else case.unit,
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
                "transport": case.route,
                "statistics": values,
            }
        )
    document = {
        **stamp(),
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


def as_svg(results: Results) -> str:
    """The whole document."""
    baseline, groups = _groups(results)
    ratios = [ratio for rows in groups.values() for _, ratio in rows]
    low = min([0, *(math.floor(math.log2(1.1 * ratio)) for ratio in ratios)])  # a bar just below 1 needs no room
    high = min(_MOST_EXPONENT, max([1, *(math.ceil(math.log2(ratio)) for ratio in ratios)]))
    height = _TOP + _ROW * (len(ratios) + len(groups)) + _BOTTOM
    width = _LABEL_WIDTH + _PLOT_WIDTH + _RIGHT

    def at(ratio: float) -> float:
        return _LABEL_WIDTH + _PLOT_WIDTH * (math.log2(max(2.0**low, min(ratio, 2.0**high))) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="26" font-size="16">farcall: better by this factor than {_BASELINES[baseline]}</text>',
    ]
    for exponent in range(low, high + 1):
        x = at(2.0**exponent)
        name = f"{2**exponent}x" if exponent >= 0 else f"1/{2**-exponent}"
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{height - _BOTTOM + 4}" stroke="{_LINE}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" font-size="11">{name}</text>')
    y = _TOP
    for heading, rows in groups.items():
        parts.append(f'<text x="12" y="{y + 15}" font-weight="bold">{escape(heading)}</text>')
        for name, ratio in rows:
            y += _ROW
            left, right = sorted((at(1), at(ratio)))
            colour = _BETTER if ratio >= 1 else _WORSE
            # A bar that leaves the picture says so: its figure counts, not its length.
            beyond = " >" if ratio > 2.0**high else ""
            parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
            parts.append(
                f'<rect x="{left:.1f}" y="{y + 3}" width="{max(1.0, right - left):.1f}" height="{_ROW - 8}" '
                f'fill="{colour}"/>'
            )
            parts.append(f'<text x="{right + 6:.1f}" y="{y + 15}">{figure(ratio)}x{escape(beyond)}</text>')
        y += _ROW
    parts.append(
        f'<line x1="{at(1):.1f}" y1="{_TOP - 6}" x2="{at(1):.1f}" y2="{height - _BOTTOM + 4}" stroke="{_INK}"/>'
    )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _groups(results: Results) -> tuple[str, dict[str, list[tuple[str, float]]]]:
    """What farcall is compared with, and the bars by what they measure."""
    for baseline in (Stock.name, Floor.name):
        groups: dict[str, list[tuple[str, float]]] = {}
        for case in results.cases:
            for statistic in results.statistics(case):
                ratios = results.times_better(case, Farcall.name, baseline, statistic)
                if ratios:
                    measured = statistic if statistic in LOWER_IS_BETTER else case.unit
                    heading = _HEADINGS.get(measured, measured)
                    groups.setdefault(heading, []).append((case.name, median(ratios)))
        if groups:
            return baseline, groups
    return Stock.name, {}
