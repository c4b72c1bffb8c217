"""The driver notices every way in which a rank can end, on any rank, and leaves nothing running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from tests.conformance.client import Result, SuiteRun
from tests.conformance.listing import NotPassed, complaint, not_passed
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

ENDING = (
    "passes",
    "fails_on_the_last_rank",
    "last_rank_exits",
    "last_rank_is_killed",
    "skips",
    "only_one_rank_skips",
    "fails_while_others_wait",
    "leaves_a_process",
)
BOUND_S = 2 * LONG_S
"""Of those that end by themselves: on a busy machine, too."""
HANGING = ("one_hangs", "thread_keeps_the_program_open")
Sample = Callable[[str], Result]


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver") / "pid"


@pytest.fixture(scope="module")
def sample(left_behind: Path) -> Iterator[Sample]:
    with (
        pytest.MonkeyPatch.context() as patch,
        SuiteRun(full_names(ENDING), stock=True, bound_s=BOUND_S) as ending,
        SuiteRun(full_names(HANGING), stock=True, bound_s=8.0) as hanging,
    ):
        patch.setenv("SAMPLE_LEFT_BEHIND", str(left_behind))
        yield lambda name: (hanging if name in HANGING else ending).result(*full_names([name]))


def full_names(names: Iterable[str]) -> list[str]:
    return [f"SampleTest.test_{name}" for name in names]


def test_a_pass_needs_every_rank(sample: Sample) -> None:
    assert (sample("passes").outcome, sample("passes").codes) == ("passed", [0, 0, 0])


def test_an_error_on_any_rank_is_a_failure_that_shows_it(sample: Sample) -> None:
    result = sample("fails_on_the_last_rank")
    assert (result.outcome, result.codes) == ("failed", [0, 0, 10])
    assert "ValueError: only rank 2" in result.detail


def test_an_exit_code_on_any_rank_is_a_failure(sample: Sample) -> None:
    assert (sample("last_rank_exits").outcome, sample("last_rank_exits").codes) == ("failed", [0, 0, 3])


def test_a_crash_on_any_rank_is_a_failure(sample: Sample) -> None:
    result = sample("last_rank_is_killed")
    assert (result.outcome, result.codes) == ("failed", [0, 0, -11])


def test_a_hang_ends_at_the_bound_and_shows_where(sample: Sample) -> None:
    result = sample("one_hangs")
    assert result.outcome == "failed"
    assert "rank 1 was still running" in result.detail
    assert "wait_for_nobody" in result.detail


def test_a_thread_that_keeps_the_program_open_is_a_hang(sample: Sample) -> None:
    result = sample("thread_keeps_the_program_open")
    assert result.outcome == "failed"
    assert "wait_for_nobody" in result.detail


def test_a_skip_is_no_pass(sample: Sample) -> None:
    assert sample("skips").outcome == "skipped"


def test_a_skip_on_one_rank_is_a_failure(sample: Sample) -> None:
    assert sample("only_one_rank_skips").outcome == "failed"


def test_ranks_that_wait_for_a_failed_one_do_not_wait_for_the_bound(sample: Sample) -> None:
    result = sample("fails_while_others_wait")
    assert result.outcome == "failed"
    assert result.seconds < BOUND_S / 2
    assert "ValueError: rank 0 first" in result.detail


def test_processes_that_a_rank_leaves_behind_are_killed(sample: Sample, left_behind: Path) -> None:
    assert sample("leaves_a_process").outcome == "passed"
    pid = int(left_behind.read_text())
    wait_until(lambda: state_of(pid) == "Z", f"the end of process {pid}")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(
    ("outcome", "listed", "right"),
    [
        ("passed", None, True),
        ("failed", None, False),
        ("skipped", None, False),
        ("missing", None, False),
        ("failed", NotPassed("failed", "known"), True),
        ("passed", NotPassed("failed", "known"), False),
        ("skipped", NotPassed("failed", "known"), False),
        ("skipped", NotPassed("skipped", "known"), True),
        ("passed", NotPassed("skipped", "known"), False),
    ],
)
def test_only_what_is_listed_is_excused(outcome: str, listed: NotPassed | None, right: bool) -> None:
    assert (complaint(outcome, "", listed) is None) is right


def test_what_needs_devices_is_listed_only_where_there_are_fewer() -> None:
    listed = [set(not_passed(count)) for count in (0, 1, 2, 3, 4)]
    assert listed[0] > listed[1] > listed[2] == listed[3] > listed[4]
    assert all("CUDA device" not in one.reason for one in not_passed(4).values())
