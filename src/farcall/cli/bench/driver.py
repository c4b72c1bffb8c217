"""Rounds, turns and teams: one contender measures while all others are quiet.

For each shape (team size, route) every contender gets a team of processes, which stays up over all rounds; a case that
wants fresh processes gets teams of its own for each round. In a round the contenders run each case one right after the
other. Out of its turn a team waits blocked on its pipes, or is frozen where its system would spin. A contender that
fails a case is left out of that case; the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from farcall.cli.bench.cases import CASES, Case
from farcall.cli.bench.contenders import CONTENDERS, Floor, Route
from farcall.cli.bench.measure import Statistics
from farcall.cli.bench.results import Results
from farcall.cli.team import Answer, MemberLost, Team, TeamError

CASE_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Driver:
    """One run of the benchmark: its contenders and its rounds."""

    contenders: Sequence[str]
    rounds: int
    budget_s: float
    on_progress: Callable[[str], None]

    def run(self, cases: Sequence[Case]) -> Results:
        """Measure every case with every contender, in every round."""
        results = Results(cases)
        numbers = range(1, self.rounds + 1)
        for (size, route, alone), group in groupby(sorted(cases, key=_shape), key=_shape):
            together = list(group)
            for rounds in [[number] for number in numbers] if alone else [numbers]:
                self._run_shape(results, together, size, route, rounds)
        return results

    def _run_shape(self, results: Results, cases: list[Case], size: int, route: Route, rounds: Sequence[int]) -> None:
        teams: dict[str, Team] = {}
        try:
            for name in self.contenders:
                if any(_takes_part(name, case) for case in cases):
                    self.on_progress(f"starting {size} processes of {name}")
                    try:
                        teams[name] = team = Team(_member, size, name, route)
                    except TeamError as error:
                        for case in cases:
                            results.fail(case, name, f"did not start: {error}")
                    else:
                        results.start_s[f"{name}, {size} nodes, {route}"] = team.start_s
                        _end_turn(name, team)
            for number in rounds:
                for case in cases:
                    for name in list(teams):
                        if (case.name, name) not in results.failures and _takes_part(name, case):
                            self.on_progress(f"round {number} of {self.rounds}: {case.name}: {name}")
                            self._take_turn(results, teams, name, case)
        except BaseException:
            # Ctrl-C, most likely: nobody waits for a graceful end.
            for team in teams.values():
                team.kill()
            raise
        for name, team in teams.items():
            try:
                team.stop()
            except TeamError as error:
                results.failures["shutdown", name] = str(error)

    def _take_turn(self, results: Results, teams: dict[str, Team], name: str, case: Case) -> None:
        team = teams[name]
        team.thaw()
        try:
            results.record(case, name, team.ask(0, (case.name, self.budget_s), CASE_TIMEOUT_S))
        except TeamError as error:
            results.fail(case, name, str(error))
            if isinstance(error, MemberLost):
                team.kill()
                del teams[name]
                return
        _end_turn(name, team)


def _shape(case: Case) -> tuple[int, Route, str]:
    return case.size, case.route, case.name if case.fresh else ""


def _takes_part(name: str, case: Case) -> bool:
    return case.only in (None, name) and (name != Floor.name or case.floor is not None)


def _end_turn(name: str, team: Team) -> None:
    if CONTENDERS[name].spins_when_idle:
        team.freeze()


@contextmanager
def _member(rank: int, size: int, directory: str, name: str, route: Route) -> Iterator[Answer]:
    contender = CONTENDERS[name]()
    contender.start(rank, size, directory, route)

    def answer(request: tuple[str, float]) -> Statistics:
        case_name, budget_s = request
        return CASES[case_name].measure(contender, budget_s)

    yield answer
    contender.stop()
