"""The results: values by case, contender, statistic and round; and farcall's promises, judged from them.

A ratio compares two values of one round, taken within a second or so of each other, so that a machine which is busier
in one round than in the next changes both. Only then is the median taken. All promises are ratios within a run: a
figure from another machine, or from another hour, proves nothing here. Where another project is named, its figure was
taken beside stock on one machine, and stock is the common yardstick. Knows nothing of how results are shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from farcall.cli.bench.cases import CALLERS, CASES, CHAIN_LENGTHS, CHURN, COLD_SIZES, COUNTED_TEAM_SIZES, Case
from farcall.cli.bench.contenders import Farcall, Floor, Stock
from farcall.cli.bench.measure import Statistics

LOWER_IS_BETTER = ("p99", "cpu", "first", "second")
"""Statistics of times, in us, whatever else the case measures."""


class Results:
    """The values of a run as they come in, their medians and ratios."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.cases: list[Case] = list(cases)
        self.failures: dict[tuple[str, str], str] = {}
        self.start_s: dict[str, float] = {}
        self._rounds: dict[tuple[str, str], list[Statistics]] = {}

    def record(self, case: Case, contender: str, statistics: Statistics) -> None:
        """Add one round's values."""
        self._rounds.setdefault((case.name, contender), []).append(statistics)

    def fail(self, case: Case, contender: str, reason: str) -> None:
        """Note a failure, and drop the contender's rounds of ``case``: they would not be comparable."""
        self.failures[case.name, contender] = reason
        self._rounds.pop((case.name, contender), None)

    def statistics(self, case: Case) -> list[str]:
        """The names of a case's statistics, of any contender."""
        found = (name for (of, _), rounds in self._rounds.items() if of == case.name for name in rounds[0])
        return list(dict.fromkeys(found))

    def rounds(self, case: str, contender: str, statistic: str) -> list[float]:
        return [values[statistic] for values in self._rounds.get((case, contender), []) if statistic in values]

    def median(self, case: str, contender: str, statistic: str) -> float | None:
        values = self.rounds(case, contender, statistic)
        return median(values) if values else None

    def times_better(self, case: Case, contender: str, baseline: str, statistic: str) -> list[float]:
        """By round, how many times better ``contender`` was than ``baseline``; empty if one is missing."""
        ours = self.rounds(case.name, contender, statistic)
        theirs = self.rounds(case.name, baseline, statistic)
        if case.better == "lower" or statistic in LOWER_IS_BETTER:
            return [b / a for a, b in zip(ours, theirs, strict=False) if a > 0]
        return [a / b for a, b in zip(ours, theirs, strict=False) if b > 0]


@dataclass(frozen=True, slots=True)
class Target:
    """A promise: ``value`` finds the figure, None if the run has none, and ``holds`` judges it."""

    text: str
    wanted: str
    cases: tuple[str, ...]
    value: Callable[[Results], float | None]
    holds: Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise and what became of it; ``held`` is None where the run was not asked to measure it."""

    text: str
    wanted: str
    value: float | None
    held: bool | None


def _times_better(results: Results, case: str, baseline: str, statistic: str) -> float | None:
    ratios = results.times_better(CASES[case], Farcall.name, baseline, statistic)
    return median(ratios) if ratios else None


def better_than_stock(text: str, case: str, statistic: str, at_least: float) -> Target:
    """At least ``at_least`` times better than stock."""
    return Target(
        text,
        f"at least {at_least:.3g}x stock",
        (case,),
        lambda results: _times_better(results, case, Stock.name, statistic),
        lambda value: value >= at_least,
    )


def near_the_floor(text: str, case: str, statistic: str, at_most: float) -> Target:
    """At most ``at_most`` times the cost of the floor."""

    def value(results: Results) -> float | None:
        ratio = _times_better(results, case, Floor.name, statistic)
        return None if ratio is None else 1 / ratio

    return Target(text, f"at most {at_most:.3g}x the floor", (case,), value, lambda value: value <= at_most)


def within(text: str, case: str, at_most_ms: float) -> Target:
    """At most so long, on any machine: the case is made of waiting."""

    def value(results: Results) -> float | None:
        found = results.median(case, Farcall.name, "p50")
        return None if found is None else found / 1000

    return Target(text, f"at most {at_most_ms:.3g} ms", (case,), value, lambda value: value <= at_most_ms)


def descriptors_per_peer(text: str, at_most: float) -> Target:
    """The descriptors for each further peer, between the smallest and the largest team."""
    small, large = min(COUNTED_TEAM_SIZES), max(COUNTED_TEAM_SIZES)
    cases = f"descriptors, {small} nodes", f"descriptors, {large} nodes"

    def value(results: Results) -> float | None:
        few, many = (results.median(case, Farcall.name, "count") for case in cases)
        return None if few is None or many is None else (many - few) / (large - small)

    return Target(text, f"at most {at_most:.3g} a peer", cases, value, lambda value: value <= at_most)


def linear_growth(text: str, at_most: float) -> Target:
    """The cost of a further call in the longest chain against the shortest: the slopes at both ends."""
    shortest, second, third, longest = CHAIN_LENGTHS
    cases = tuple(f"backward through {length} calls" for length in CHAIN_LENGTHS)

    def value(results: Results) -> float | None:
        first, next_one, last_but_one, last = (results.median(case, Farcall.name, "p50") for case in cases)
        if first is None or next_one is None or last_but_one is None or last is None:
            return None
        return ((last - last_but_one) / (longest - third)) / ((next_one - first) / (second - shortest))

    return Target(text, f"at most {at_most:.3g}x", cases, value, lambda value: value <= at_most)


def hardly_slower(text: str, plain: str, case: str, statistic: str, at_most: float) -> Target:
    """The time of ``case``, against that of ``plain``, both of farcall's."""

    def value(results: Results) -> float | None:
        before, then = (results.rounds(one, Farcall.name, statistic) for one in (plain, case))
        return median(b / a for a, b in zip(before, then, strict=True)) if before and then else None

    return Target(text, f"at most {at_most:.3g}x as long", (plain, case), value, lambda value: value <= at_most)


def undisturbed(text: str, statistic: str, at_most: float) -> Target:
    """The time of calls while others die and join, against quiet."""
    quiet, _, disturbed = CHURN
    return hardly_slower(text, quiet, disturbed, statistic, at_most)


def soon_warm(text: str, case: str, at_most: float) -> Target:
    """The second time of ``case`` in fresh processes, against the later ones."""

    def value(results: Results) -> float | None:
        second, warm = (results.rounds(case, Farcall.name, statistic) for statistic in ("second", "p50"))
        return median(b / a for a, b in zip(warm, second, strict=True)) if warm else None

    return Target(text, f"at most {at_most:.3g}x a later one", (case,), value, lambda value: value <= at_most)


def from_cold() -> list[Target]:
    """The promises about large messages before memory is warm."""
    targets = []
    for label in COLD_SIZES:
        case, text = f"send {label} from cold", f"the first {label} sent"
        targets.append(better_than_stock(text, case, "first", 1))
        targets.append(near_the_floor(f"{text}, against a copy into fresh memory", case, "first", 1.25))
        targets.append(soon_warm(f"the second {label} sent", case, 1.5))
    return targets


def of_work() -> list[Target]:
    """The promises about calls that do work: at a function's every length, and with many at a time."""
    targets = []
    for case in (name for name in CASES if name.startswith("work of")):
        targets.append(better_than_stock(f"beyond {case}", case, "p50", 4))
        targets.append(near_the_floor(f"beyond {case}, against a raw socket", case, "p50", 2))
    for case in (name for name in CASES if name.endswith("4 to 256 KiB")):
        targets.append(better_than_stock(f"processor time of {case}", case, "cpu", 4))
    for case in (name for name in CASES if name.startswith(f"{CALLERS} callers")):
        at_least = 1.5 if "512" in case else 3  # where the callee computes much, computing is what takes long
        targets.append(better_than_stock(f"{case}, calls/s", case, "rate", at_least))
        targets.append(better_than_stock(f"{case}, p99", case, "p99", 1))
    for label in ("1 MiB", "16 MiB"):
        for verb, text in (("send", "sent"), ("echo", "echoed")):
            case = f"{verb} {label}"
            targets.append(better_than_stock(f"{label} {text}", case, "p50", 4 if os.cpu_count() == 2 else 3))
            targets.append(near_the_floor(f"{label} {text}, against bare copies", case, "p50", 1.25))
    for case, text in (("train step", "a training step"), ("backward through 20 calls", "20 calls, then backward")):
        targets.append(better_than_stock(f"processor time of {text}", case, "cpu", 3))
    return targets


TARGETS: tuple[Target, ...] = (
    better_than_stock("no-op p50", "no-op", "p50", 5),
    near_the_floor("no-op p50 against a raw ping-pong", "no-op", "p50", 2),
    better_than_stock("calls/s, 64 in flight", "no-op, 64 in flight", "rate", 6),
    better_than_stock("operators/s, 64 in flight", "torch.add, 64 in flight", "rate", 6),
    better_than_stock("operators of 16 KiB/s, 64 in flight", "torch.add of 16 KiB, 64 in flight", "rate", 6),
    better_than_stock("script functions/s, 64 in flight", "script function, 64 in flight", "rate", 6),
    within("8 concurrent script functions of 50 ms", "8 script functions of 50 ms", 120),
    better_than_stock("256 MiB sent", "send 256 MiB", "p50", 2.5),
    better_than_stock("256 MiB that live in a segment", "send 256 MiB in a segment", "p50", 20),
    better_than_stock("no-op p50 over TCP", "no-op over TCP", "p50", 4),
    better_than_stock("256 MiB sent over TCP", "send 256 MiB over TCP", "p50", 1.5),
    better_than_stock("remote, to_here p50", "remote, to_here", "p50", 5),
    better_than_stock("method of a reference p50", "method of a reference", "p50", 5),
    better_than_stock("references made and dropped", "create and drop", "rate", 5),
    better_than_stock("ahead of Pyro5 (145 us where stock took 440)", "no-op", "p50", 440 / 145),
    better_than_stock(
        "ahead of moolib (10,500 calls/s where stock made 3,800)", "no-op, 64 in flight", "rate", 10.5 / 3.8
    ),
    better_than_stock("ahead of NIXL (2.4 GiB/s where stock moved 1.3)", "send 256 MiB", "p50", 2.4 / 1.3),
    better_than_stock("a training step over one remote worker", "train step", "p50", 3),
    better_than_stock("20 calls in a chain, then backward", "backward through 20 calls", "p50", 3),
    *of_work(),
    *from_cold(),
    linear_growth("a further call in a long chain against one in a short chain", 1.5),
    descriptors_per_peer("descriptors of a node", 2),
    hardly_slower("a function of the script against one of a module", "no-op", "function of the script", "p50", 1.15),
    undisturbed("no-op p50 while others die and join", "p50", 1.5),
    undisturbed("no-op p99 while others die and join", "p99", 1.5),
)


def judge(results: Results) -> list[Verdict]:
    """Every promise about the cases of this run; one whose case farcall failed is broken, not unknown."""
    verdicts = []
    measured = {case.name for case in results.cases}
    for target in TARGETS:
        if not measured.issuperset(target.cases):
            continue
        value = target.value(results)
        held = None if value is None else target.holds(value)
        if any((case, Farcall.name) in results.failures for case in target.cases):
            held = False
        verdicts.append(Verdict(target.text, target.wanted, value, held))
    return verdicts
