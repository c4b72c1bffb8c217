"""Rounds, turns and teams: one contender measures while all others are quiet.

For each shape (team size, route) every contender gets a team of processes, which stays up over all rounds. In a round
the contenders run each case one right after the other. Out of its turn a team waits blocked on its pipes, or is frozen
where its system would spin. A contender that fails a case is left out of that case; the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from farcall.cli.bench.cases import CASES, Case
from farcall.cli.bench.contenders import CONTENDERS, Floor, Route
from farcall.cli.bench.measure import Statistics
from farcall.cli.bench.results import Results
from farcall.cli.team import Answer, MemberLost, Team, TeamError

CASE_TIMEOUT_S = 120.0

Progress = Callable[[str], None]


def run(
    cases: Sequence[Case], contenders: Sequence[str], rounds: int, budget_s: float, on_progress: Progress
) -> Results:
    """Measure every case with every contender, ``rounds`` times."""
    results = Results(cases)
    for (size, route), group in groupby(sorted(cases, key=_shape), key=_shape):
        _run_shape(results, list(group), contenders, size, route, rounds, budget_s, on_progress)
    return results


def _shape(case: Case) -> tuple[int, Route]:
    return case.size, case.route


def _run_shape(
    results: Results,
    cases: list[Case],
    contenders: Sequence[str],
    size: int,
    route: Route,
    rounds: int,
    budget_s: float,
    on_progress: Progress,
) -> None:
    def takes_part(name: str, case: Case) -> bool:
        return case.only in (None, name) and (name != Floor.name or case.floor is not None)

    teams: dict[str, Team] = {}
    try:
        for name in contenders:
            if not any(takes_part(name, case) for case in cases):
                continue
            on_progress(f"starting {size} processes of {name}")
            try:
                teams[name] = Team(_member, size, name, route)
            except TeamError as error:
                for case in cases:
                    results.fail(case, name, f"did not start: {error}")
                continue
            results.start_s[f"{name}, {size} nodes, {route}"] = teams[name].start_s
            _end_turn(name, teams[name])
        for number in range(1, rounds + 1):
            for case in cases:
                for name, team in list(teams.items()):
                    if (case.name, name) in results.failures or not takes_part(name, case):
                        continue
                    on_progress(f"round {number} of {rounds}: {case.name}: {name}")
                    team.thaw()
                    try:
                        results.record(case, name, team.ask(0, (case.name, budget_s), CASE_TIMEOUT_S))
                    except MemberLost as error:
                        results.fail(case, name, str(error))
                        team.kill()
                        del teams[name]
                        continue
                    except TeamError as error:
                        results.fail(case, name, str(error))
                    _end_turn(name, team)
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


def _end_turn(name: str, team: Team) -> None:
    if CONTENDERS[name].spins_when_idle:
        team.freeze()


@contextmanager
def _member(rank: int, size: int, directory: str, name: str, route: Route) -> Iterator[Answer]:
    contender = CONTENDERS[name]()
    contender.start(rank, size, directory, route)

    def answer(request: tuple[str, float]) -> Statistics:
        case_name, budget_s = request
        case = CASES[case_name]
        operation = case.operation(contender)
        assert operation is not None, "the driver asks only contenders that take part"
        return case.run(operation, budget_s)

    yield answer
    contender.stop()
