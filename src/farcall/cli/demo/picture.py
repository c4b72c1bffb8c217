"""The picture of a demo: loss and latencies over time, and the spirals as the model sees them.

Plain SVG, written here: a plotting library is a lot to install for some lines and dots. Thousands of dots are one path
of lines without length, each drawn by its round ends: a tenth of the size of as many circles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import fmean

from farcall.cli.demo.play import Figures, latency_s
from farcall.cli.demo.training import OPERATIONS, SERVERS, TRAINERS, held_out
from farcall.cli.figures import duration

_WIDTH, _HEIGHT = 1000, 560
_INK, _FAINT, _LINE = "#24292f", "#6e7781", "#d8dee4"
_ALARM, _ALARM_FILL = "#cf222e", "#ffebe9"
_TRAINER_COLOURS = ("#0969da", "#bc4c00")
_OPERATION_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Four that everybody can tell apart, people with weak colour vision included, on white and on black."""
_SPIRALS = ("#0969da", "#bc4c00")
_SHADES = ("#a8d0ff", "#c4dfff", "#e0eeff", "#f6f8fa", "#fff0e2", "#ffdcbe", "#ffc595")
_DARK = {
    "white": "#0d1117",
    _INK: "#e6edf3",
    _FAINT: "#9198a1",
    _LINE: "#30363d",
    _ALARM: "#ff7b72",
    _ALARM_FILL: "#3c1618",
    "#0969da": "#58a6ff",
    "#bc4c00": "#f0883e",
    **dict(zip(_SHADES, ("#123a63", "#12304f", "#11243a", "#161b22", "#2e2116", "#452c16", "#5c3917"), strict=True)),
}
"""Where the reader's screen is dark: the colour instead of each."""
_SHOWN_POINTS = 400
_SMOOTHED = 20
"""A point of a trainer's curve is the mean of so many steps."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """A rectangle of the picture, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_from: float
    x_to: float
    y_from: float
    y_to: float

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x_from) / (self.x_to - self.x_from)

    def y(self, value: float) -> float:
        return self.top + self.height * (self.y_to - value) / (self.y_to - self.y_from)


def as_svg(figures: Figures) -> str:
    """The whole document."""
    end_s = max(step.begun_s + sum(step.took_s) for step in figures.steps) - figures.begun_s
    death = figures.death
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="{_INK}">',
        _dark_style(),
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(24, 32, "farcall demo", size=19, bold=True),
        _text(
            184,
            32,
            f"{len(SERVERS)} parameter servers, {len(TRAINERS)} trainers, {len(figures.steps)} steps through "
            f"distributed autograd; {death.worker} is killed and comes back",
            size=13,
            colour=_FAINT,
        ),
    ]
    parts += _losses(figures, end_s)
    parts += _latencies(figures, end_s)
    parts += _learned(figures)
    parts += _legend(figures)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _dark_style() -> str:
    rules = "".join(
        f'[{what}="{light}"]{{{what}:{dark}}}' for light, dark in _DARK.items() for what in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def _losses(figures: Figures, end_s: float) -> Iterable[str]:
    highest = max(0.8, *(step.loss for step in figures.steps))
    panel = _Panel(64, 76, 560, 196, 0.0, end_s, 0.0, min(highest, 1.2))
    yield _text(panel.left, 64, "loss, step by step", bold=True)
    yield from _outage(panel, figures, labels=True)
    yield from _scale_y(panel, _round_marks(panel.y_to), "{:g}".format)
    yield from _scale_x(panel)
    curves = []  # above all dots
    for index, (name, colour) in enumerate(zip(TRAINERS, _TRAINER_COLOURS, strict=True)):
        steps = sorted((step for step in figures.steps if step.trainer == name), key=lambda step: step.begun_s)
        xs = [panel.x(step.begun_s - figures.begun_s) for step in steps]
        losses = [step.loss for step in steps]
        means = [fmean(losses[max(0, last - _SMOOTHED) : last]) for last in range(1, len(losses) + 1)]
        dots, curve = ([panel.y(min(value, panel.y_to)) for value in values] for values in (losses, means))
        yield _dots(zip(xs, dots, strict=True), colour, 2.4, 0.35)
        curves.append(_curve(zip(xs, curve, strict=True), colour))
        curves.append(_text(panel.left + panel.width - 80 * (len(TRAINERS) - 1 - index), 64, name, colour, end=True))
    yield from curves


def _latencies(figures: Figures, end_s: float) -> Iterable[str]:
    everything = [took_s for step in figures.steps for took_s in step.took_s]
    everything += [outage.ended_s - outage.begun_s for outage in figures.outages]
    low, high = math.log10(min(everything)) - 0.05, math.log10(max(everything)) + 0.1
    panel = _Panel(64, 326, 560, 196, 0.0, end_s, low, high)
    yield _text(panel.left, 314, "how long each remote part of a step took", bold=True)
    yield from _outage(panel, figures, labels=False)
    yield from _scale_y(panel, range(math.ceil(low), math.floor(high) + 1), lambda mark: duration(10.0**mark))
    yield from _scale_x(panel)
    yield _text(panel.left + panel.width, panel.top + panel.height + 34, "seconds of training", _FAINT, end=True)
    for index in range(len(OPERATIONS)):
        places = [
            (panel.x(step.begun_s - figures.begun_s), panel.y(math.log10(step.took_s[index]))) for step in figures.steps
        ]
        yield _dots(places, _OPERATION_COLOURS[index], 2.6, 0.6)
    failed = [
        (panel.x(outage.begun_s - figures.begun_s), panel.y(math.log10(outage.ended_s - outage.begun_s)))
        for outage in figures.outages
    ]
    yield _dots(failed, _ALARM, 7.0, 1.0)


def _outage(panel: _Panel, figures: Figures, labels: bool) -> Iterable[str]:
    death = figures.death
    left, right = panel.x(death.killed_s - figures.begun_s), panel.x(death.back_s - figures.begun_s)
    yield (
        f'<rect x="{left:.1f}" y="{panel.top}" width="{max(1.0, right - left):.1f}" height="{panel.height}" '
        f'fill="{_ALARM_FILL}"/>'
    )
    for x in (left, right):
        yield _line(x, panel.top, x, panel.top + panel.height, _ALARM, dashed=True)
    if labels:
        took_s = death.back_s - death.killed_s
        yield _text(right + 6, panel.top + 14, f"{death.worker} killed,", _ALARM)
        yield _text(right + 6, panel.top + 29, f"back after {took_s:.2f} s", _ALARM)


def _learned(figures: Figures) -> Iterable[str]:
    """The square as the model sees it, with points held out from training."""
    panel = _Panel(688, 76, 288, 288, -1.0, 1.0, -1.0, 1.0)
    yield _text(panel.left, 64, f"what it learned: {figures.accuracy:.1%} right on new points", bold=True)
    size = panel.width / len(figures.grid)
    runs: dict[int, list[str]] = {}
    for row, values in enumerate(figures.grid):
        column = 0
        for shade, run in groupby(values, key=lambda value: min(len(_SHADES) - 1, int(value * len(_SHADES)))):
            count = len(list(run))
            x, y = panel.left + column * size, panel.top + row * size
            runs.setdefault(shade, []).append(f"M{x:.1f} {y:.1f}h{count * size:.1f}v{size:.1f}h{-count * size:.1f}z")
            column += count
    for shade, paths in sorted(runs.items()):
        yield f'<path fill="{_SHADES[shade]}" shape-rendering="crispEdges" d="{"".join(paths)}"/>'
    points, labels = held_out()
    for label, colour in enumerate(_SPIRALS):
        chosen = points[:_SHOWN_POINTS][labels[:_SHOWN_POINTS] == label].clamp(-0.99, 0.99).tolist()
        yield _dots([(panel.x(x), panel.y(y)) for x, y in chosen], colour, 3.6, 0.85)


def _legend(figures: Figures) -> Iterable[str]:
    left, top = 688, 404
    for x, heading in ((left + 222, "p50"), (left + 288, "p99")):
        yield _text(x, top, heading, _FAINT, end=True)
    for index, name in enumerate(OPERATIONS):
        y = top + 24 + 24 * index
        half_s, most_s = latency_s(figures.steps, index)
        yield f'<circle cx="{left + 6}" cy="{y - 4}" r="5" fill="{_OPERATION_COLOURS[index]}"/>'
        yield _text(left + 18, y, name)
        yield _text(left + 222, y, duration(half_s), end=True)
        yield _text(left + 288, y, duration(most_s), end=True)

    y = top + 24 + 24 * len(OPERATIONS)
    waited_s = max((outage.ended_s - outage.begun_s for outage in figures.outages), default=0.0)
    yield f'<circle cx="{left + 6}" cy="{y - 4}" r="5" fill="{_ALARM}"/>'
    yield _text(left + 18, y, f"{len(figures.outages)} steps failed, and were repeated", _ALARM)
    yield _text(left + 288, y, duration(waited_s), _ALARM, end=True)


def _scale_y(panel: _Panel, marks: Sequence[float], name: Callable[[float], str]) -> Iterable[str]:
    for mark in marks:
        y = panel.y(mark)
        yield _line(panel.left, y, panel.left + panel.width, y, _LINE)
        yield _text(panel.left - 8, y + 4, name(mark), _FAINT, end=True)


def _scale_x(panel: _Panel) -> Iterable[str]:
    for mark in _round_marks(panel.x_to):
        x, bottom = panel.x(mark), panel.top + panel.height
        yield _line(x, bottom, x, bottom + 4, _FAINT)
        yield _text(x, bottom + 18, f"{mark:g}", _FAINT, middle=True)


def _round_marks(most: float) -> list[float]:
    """From 0 to at most ``most``, four to eight of them, at round places."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [round(step * index, 10) for index in range(int(most / step + 1e-9) + 1)]


def _dots(places: Iterable[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="{width}" stroke-linecap="round" '
        f'stroke-opacity="{opacity}" fill="none"/>'
    )


def _curve(places: Iterable[tuple[float, float]], colour: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" stroke="{colour}" stroke-width="2" stroke-linejoin="round" fill="none"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _text(
    x: float,
    y: float,
    text: str,
    colour: str = _INK,
    size: int = 12,
    bold: bool = False,
    end: bool = False,
    middle: bool = False,
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}"{anchor}{weight}>{escape(text)}</text>'
