"""The picture: one bar for each figure, how many times better than stock (or than the floor, without stock).

Plain SVG, written here: a plotting library is a lot to install for a few rectangles. The scale is
logarithmic, so that twice as good and half as good are equally long bars.
"""

from __future__ import annotations

import math
from html import escape
from statistics import median

from farcall.cli.bench.contenders import Farcall, Stock
from farcall.cli.bench.floor import Floor
from farcall.cli.bench.report import figure, label
from farcall.cli.bench.results import Results

_LABEL_WIDTH = 230
_PLOT_WIDTH = 560
_RIGHT = 80
_ROW = 24
_TOP = 56
_BOTTOM = 30
_BETTER, _WORSE, _INK, _LINE = "#2a7f62", "#b5473c", "#222222", "#cccccc"


def as_svg(results: Results) -> str:
    """The whole document."""
    baseline, rows = _rows(results)
    low = min([-1, *(math.floor(math.log2(ratio)) for _, ratio in rows)])
    high = max([1, *(math.ceil(math.log2(ratio)) for _, ratio in rows)])
    height = _TOP + _ROW * len(rows) + _BOTTOM
    width = _LABEL_WIDTH + _PLOT_WIDTH + _RIGHT

    def at(ratio: float) -> float:
        return _LABEL_WIDTH + _PLOT_WIDTH * (math.log2(ratio) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="26" font-size="16">farcall: times better than {baseline} (logarithmic)</text>',
    ]
    # Not more marks than fit: every power of two on a short axis, every fourth on a long one.
    for exponent in range(low, high + 1, math.ceil((high - low) / 10)):
        x = at(2.0**exponent)
        name = f"{2**exponent}x" if exponent >= 0 else f"1/{2**-exponent}"
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{height - _BOTTOM + 4}" stroke="{_LINE}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle" font-size="11">{name}</text>')
    for index, (name, ratio) in enumerate(rows):
        y = _TOP + _ROW * index
        left, right = sorted((at(1), at(ratio)))
        colour = _BETTER if ratio >= 1 else _WORSE
        parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 3}" width="{max(1.0, right - left):.1f}" height="{_ROW - 8}" '
            f'fill="{colour}"/>'
        )
        parts.append(f'<text x="{right + 6:.1f}" y="{y + 15}">{figure(ratio)}x</text>')
    parts.append(
        f'<line x1="{at(1):.1f}" y1="{_TOP - 6}" x2="{at(1):.1f}" y2="{height - _BOTTOM + 4}" stroke="{_INK}"/>'
    )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _rows(results: Results) -> tuple[str, list[tuple[str, float]]]:
    for baseline in (Stock.name, Floor.name):
        rows = [
            (label(results, case, statistic), median(ratios))
            for case in results.cases
            for statistic in results.statistics(case)
            if (ratios := results.times_better(case, Farcall.name, baseline, statistic))
        ]
        if rows:
            return baseline, rows
    return Stock.name, []
