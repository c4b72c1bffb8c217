"""What was measured: values by case, contender, statistic and round; medians and ratios.

A ratio compares two values of the same round, taken within a second or so of each other, so that a machine
which is busier in one round than in the next changes both. Only then is the median taken. Knows nothing of
how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from farcall.cli.bench.cases import Case
from farcall.cli.bench.measure import Statistics


class Results:
    """Values as they come in, and what follows from them."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.cases: list[Case] = list(cases)
        self.failures: dict[tuple[str, str], str] = {}
        self.start_s: dict[str, float] = {}
        self._rounds: dict[tuple[str, str], list[Statistics]] = {}

    def record(self, case: Case, contender: str, statistics: Statistics) -> None:
        """Add one round's values. Rounds of a contender that failed are not comparable, and are dropped."""
        self._rounds.setdefault((case.name, contender), []).append(statistics)

    def fail(self, case: Case, contender: str, reason: str) -> None:
        self.failures[case.name, contender] = reason
        self._rounds.pop((case.name, contender), None)

    def statistics(self, case: Case) -> list[str]:
        """The names of what was measured for a case, by anyone."""
        names: dict[str, None] = {}
        for (name, _), rounds in self._rounds.items():
            if name == case.name:
                names.update(dict.fromkeys(rounds[0]))
        return list(names)

    def rounds(self, case: str, contender: str, statistic: str) -> list[float]:
        return [values[statistic] for values in self._rounds.get((case, contender), [])]

    def median(self, case: str, contender: str, statistic: str) -> float | None:
        values = self.rounds(case, contender, statistic)
        return median(values) if values else None

    def times_better(self, case: Case, contender: str, baseline: str, statistic: str) -> list[float]:
        """By round, how many times better ``contender`` was than ``baseline``; empty if one is missing."""
        ours = self.rounds(case.name, contender, statistic)
        theirs = self.rounds(case.name, baseline, statistic)
        if case.better == "lower":
            return [b / a for a, b in zip(ours, theirs, strict=False) if a > 0]
        return [a / b for a, b in zip(ours, theirs, strict=False) if b > 0]
