"""The benchmark's arithmetic: medians, ratios within a round, verdicts, and what is written."""

from __future__ import annotations

import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

import pytest
from rich.console import Console

from farcall.cli.bench import measure
from farcall.cli.bench.cases import CASES
from farcall.cli.bench.contenders import CONTENDERS
from farcall.cli.bench.driver import Driver
from farcall.cli.bench.report import as_json, as_svg, figure, print_results, print_verdicts
from farcall.cli.bench.results import TARGETS, Results, Verdict, judge


def results_of(case_name: str, statistic: str, **values: Iterable[float]) -> Results:
    results = Results([CASES[case_name]])
    for contender, rounds in values.items():
        for value in rounds:
            results.record(CASES[case_name], contender, {statistic: value})
    return results


def verdict_of(results: Results, text: str) -> Verdict:
    return next(verdict for verdict in judge(results) if verdict.text == text)


def test_ratio_is_taken_within_a_round() -> None:
    results = results_of("no-op", "p50", stock=[100, 400], farcall=[10, 80])
    assert results.times_better(CASES["no-op"], "farcall", "stock", "p50") == [10, 5]


def test_higher_may_be_better() -> None:
    results = results_of("send 1 MiB", "p50", stock=[2.0], farcall=[6.0])
    assert results.times_better(CASES["send 1 MiB"], "farcall", "stock", "p50") == [3]


def test_failed_contender_keeps_no_rounds() -> None:
    results = results_of("no-op", "p50", stock=[100], farcall=[10])
    results.fail(CASES["no-op"], "farcall", "it broke")
    assert results.median("no-op", "farcall", "p50") is None
    assert results.median("no-op", "stock", "p50") == 100


@pytest.mark.parametrize(("farcall_us", "held"), [(20, True), (21, False)])
def test_promise_against_stock(farcall_us: float, held: bool) -> None:
    verdict = verdict_of(results_of("no-op", "p50", stock=[100], farcall=[farcall_us]), "no-op p50")
    assert verdict.held is held


@pytest.mark.parametrize(("farcall_us", "held"), [(80, True), (81, False)])
def test_promise_against_the_floor(farcall_us: float, held: bool) -> None:
    results = results_of("no-op", "p50", floor=[40], farcall=[farcall_us])
    verdict = verdict_of(results, "no-op p50 against a raw ping-pong")
    assert verdict.held is held
    assert verdict.value == pytest.approx(farcall_us / 40)


@pytest.mark.parametrize(("many", "held"), [(34, True), (35, False)])
def test_promise_about_descriptors(many: float, held: bool) -> None:
    results = Results(CASES.values())
    results.record(CASES["descriptors, 4 nodes"], "farcall", {"count": 10})
    results.record(CASES["descriptors, 16 nodes"], "farcall", {"count": many})
    assert verdict_of(results, "descriptors of a node").held is held


@pytest.mark.parametrize(("meanwhile_us", "held"), [([150, 30], True), ([151, 31], False)])
def test_promise_about_calls_while_others_die_and_join(meanwhile_us: list[float], held: bool) -> None:
    results = Results(CASES.values())
    for quiet_us, disturbed_us in zip([100, 20], meanwhile_us, strict=True):
        results.record(CASES["no-op, nobody dies or joins"], "farcall", {"p50": 1, "p99": quiet_us})
        results.record(CASES["no-op, others die and join"], "farcall", {"p50": 1, "p99": disturbed_us})
    assert verdict_of(results, "no-op p99 while others die and join").held is held
    assert verdict_of(results, "no-op p50 while others die and join").held is True


@pytest.mark.parametrize(("by_value_us", "held"), [([115, 20], True), ([116, 24], False)])
def test_promise_about_a_function_of_the_script(by_value_us: list[float], held: bool) -> None:
    results = Results(CASES.values())
    for plain_us, script_us in zip([100, 20], by_value_us, strict=True):
        results.record(CASES["no-op"], "farcall", {"p50": plain_us})
        results.record(CASES["function of the script"], "farcall", {"p50": script_us})
    assert verdict_of(results, "a function of the script against one of a module").held is held


def test_promise_of_a_failed_case_is_broken_without_stock_unknown_and_of_other_cases_not_there() -> None:
    results = results_of("no-op", "p50", stock=[100])
    assert verdict_of(results, "no-op p50").held is None
    results.fail(CASES["no-op"], "farcall", "it broke")
    assert verdict_of(results, "no-op p50").held is False
    assert {case for target in TARGETS if target.text in {v.text for v in judge(results)} for case in target.cases} == {
        "no-op"
    }


def test_every_promise_is_about_cases_that_exist() -> None:
    assert {case for target in TARGETS for case in target.cases} <= set(CASES)


def test_what_is_written_can_be_read() -> None:
    results = results_of("no-op", "p50", floor=[40, 42], stock=[400, 410], farcall=[60, 410])
    results.fail(CASES["send 1 MiB"], "stock", "a <reason>")
    verdicts = judge(results)
    document = json.loads(as_json(results, verdicts, rounds=2))
    (case,) = document["cases"]
    assert case["statistics"]["p50"]["rounds"]["farcall"] == [60, 410]
    assert document["failures"] == [{"case": "send 1 MiB", "contender": "stock", "reason": "a <reason>"}]
    assert len(document["targets"]) == len(verdicts)
    assert document["processor"]
    assert document["date"].startswith("20")
    texts = [text.text for text in ElementTree.fromstring(as_svg(results)).iter("{http://www.w3.org/2000/svg}text")]
    assert "farcall: better by this factor than stock torch.distributed.rpc" in texts
    assert "time, median" in texts
    far_better = results_of("no-op", "p50", stock=[100_000], farcall=[40])
    assert "2,500x &gt;" in as_svg(far_better)  # its bar ends where the picture does
    ElementTree.fromstring(as_svg(Results([])))


def test_tables_name_every_contender_and_failure() -> None:
    results = results_of("no-op", "p50", floor=[40], stock=[400], farcall=[60])
    results.fail(CASES["send 1 MiB"], "farcall", "[it] broke")
    output = io.StringIO()
    console = Console(width=120, file=output)
    print_results(console, results, rounds=1)
    print_verdicts(console, judge(results))
    text = output.getvalue()
    assert all(name in text for name in CONTENDERS)
    assert "[it] broke" in text
    assert "6.67x" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.01234, "0.0123"), (7.777, "7.78"), (99.4, "99.4"), (38123.0, "38,123")],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_percentiles() -> None:
    ordered = list(range(100))
    assert measure.percentile(ordered, 0.5) == 50
    assert measure.percentile(ordered, 0.99) == 99
    assert measure.percentile([7], 0.99) == 7


def test_cases_that_want_fresh_processes_have_teams_of_their_own_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        start_s = 0.0

        def __init__(self, body: object, size: int, *arguments: object) -> None:
            self.asked: list[str] = []
            teams.append(self.asked)

        def ask(self, rank: int, request: tuple[str, float], timeout_s: float) -> dict[str, float]:
            self.asked.append(request[0])
            return {"p50": float(len(teams))}

        def freeze(self) -> None: ...

        thaw = stop = freeze

    teams: list[list[str]] = []
    monkeypatch.setattr("farcall.cli.bench.driver.Team", Fake)
    driver = Driver(contenders=["farcall"], rounds=2, budget_s=0.0, on_progress=lambda text: None)
    results = driver.run([CASES[name] for name in ("send 256 MiB from cold", "no-op", "send 1 MiB")])
    assert teams == [["no-op", "send 1 MiB"] * 2, ["send 256 MiB from cold"], ["send 256 MiB from cold"]]
    assert results.rounds("send 256 MiB from cold", "farcall", "p50") == [2, 3]


@pytest.mark.parametrize(
    ("first_us", "second_us", "held"),
    [(125, 15, (True, True, True)), (126, 16, (True, False, False)), (201, 15, (False, False, True))],
)
def test_promises_about_large_messages_from_cold(first_us: float, second_us: float, held: tuple[bool, ...]) -> None:
    results = Results([case := CASES["send 1 GiB from cold"]])
    results.record(case, "floor", {"first": 100, "second": 10, "p50": 10})
    results.record(case, "stock", {"first": 200, "second": 50, "p50": 50})
    results.record(case, "farcall", {"first": first_us, "second": second_us, "p50": 10})
    texts = "the first 1 GiB sent", "the first 1 GiB sent, against a copy into fresh memory", "the second 1 GiB sent"
    assert tuple(verdict_of(results, text).held for text in texts) == held


def test_what_begins_cold_is_measured_from_its_first_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    durations_us = [40, 30, 5, 1, 4, 2, 3]
    times_ns = itertools.accumulate(time_ns for us in durations_us for time_ns in (0, us * 1000))
    monkeypatch.setattr(measure, "perf_counter_ns", lambda: next(times_ns))
    assert measure.from_cold(lambda: None, 0.0) == {"first": 40, "second": 30, "p50": 3}


def test_slow_operations_are_sampled_all_the_same() -> None:
    assert len(measure.sample_ns(lambda: None, budget_s=0.0)) >= measure.MIN_SAMPLES


def test_rate_keeps_the_window_full_and_waits_for_everything() -> None:
    class Future:
        def __init__(self) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)

        def wait(self) -> None:
            nonlocal under_way
            under_way -= 1

    under_way = most = 0
    statistics = measure.rate(8)(Future, 0.01)
    assert (most, under_way) == (8, 0)
    assert statistics["rate"] > 0
