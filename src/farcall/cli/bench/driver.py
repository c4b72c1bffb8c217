"""Rounds, turns and teams: who measures what, when, while everybody else is quiet.

For each shape (team size, transport) every contender gets a team of processes, which stays up over all
rounds. In a round each case is run by the contenders one right after the other. A team whose turn it is not
waits blocked on its pipes, or is frozen where its system would spin. A contender that fails a case is left
out of that case; the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from farcall.cli.bench.cases import CASES, Case
from farcall.cli.bench.contenders import Contender, Farcall, Stock, Transport
from farcall.cli.bench.floor import Floor
from farcall.cli.bench.measure import Statistics
from farcall.cli.bench.results import Results
from farcall.cli.team import Answer, MemberLost, Team, TeamError

CONTENDERS: dict[str, type[Contender]] = {kind.name: kind for kind in (Floor, Stock, Farcall)}
CASE_TIMEOUT_S = 120.0

Progress = Callable[[str], None]


def run(
    cases: Sequence[Case], contenders: Sequence[str], rounds: int, budget_s: float, on_progress: Progress
) -> Results:
    """Measure every case with every contender, ``rounds`` times."""
    results = Results(cases)
    ordered = sorted(cases, key=_shape)
    for (size, transport), group in groupby(ordered, key=_shape):
        _run_shape(results, list(group), contenders, size, transport, rounds, budget_s, on_progress)
    return results


def _shape(case: Case) -> tuple[int, Transport]:
    return case.size, case.transport


def _run_shape(
    results: Results,
    cases: list[Case],
    contenders: Sequence[str],
    size: int,
    transport: Transport,
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
                teams[name] = Team(_member, size, name, transport)
            except TeamError as error:
                for case in cases:
                    results.fail(case, name, f"did not start: {error}")
                continue
            results.start_s[f"{name}, {size} nodes, {transport}"] = teams[name].start_s
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
        # Ctrl-C, most likely: there is nobody left to be polite to.
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
def _member(rank: int, size: int, directory: str, name: str, transport: Transport) -> Iterator[Answer]:
    contender = CONTENDERS[name]()
    contender.start(rank, size, directory, transport)

    def answer(request: tuple[str, float]) -> Statistics:
        case_name, budget_s = request
        case = CASES[case_name]
        operation = case.operation(contender)
        assert operation is not None, "the driver asks only those who take part"
        return case.run(operation, budget_s)

    yield answer
    contender.stop()
