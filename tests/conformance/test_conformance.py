"""PyTorch's own RPC suite, from the installed torch wheel, with farcall in the place of torch.distributed.rpc.

One item for each of its tests. What is not passed is named in ``not_passed.toml``, with the reason, and nowhere
else. ``python -m tests.conformance --help`` runs parts of it, also over stock torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.conformance.client import SuiteRun
from tests.conformance.listing import complaint, not_passed, sorted_tests
from tests.kit.distribution import only_one_worker

from farcall.torchscript.extension import why_not

LISTED = not_passed(torch.cuda.device_count())
# A part of the suite at a time: each has a server of its own, and only one is to be busy.
SORTED = sorted_tests()
TESTS = sorted(SORTED)
NEEDS_EXTENSION = "b"  # suite.json


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuiteRun]:
    """Everything that this session will ask for, on its way already when the first item waits for its result."""
    only_one_worker("PyTorch's suite", tmp_path_factory)
    wanted = {
        item.callspec.params["test"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_of_the_suite.__name__
    }
    with SuiteRun([test for test in TESTS if test in wanted]) as suite_run:
        yield suite_run


@pytest.mark.parametrize("test", TESTS)
def test_of_the_suite(run: SuiteRun, test: str) -> None:
    result = run.result(test)
    expected = LISTED.get(test)
    if SORTED[test] == NEEDS_EXTENSION and result.outcome == "failed" and (missing := why_not()) is not None:
        pytest.skip(missing)
    wrong = complaint(result.outcome, result.detail, expected)
    if wrong is not None:
        pytest.fail(wrong, pytrace=False)
    if expected is not None:
        report = pytest.xfail if result.outcome == "failed" else pytest.skip
        report(" ".join(expected.reason.split()))


def test_every_test_of_the_installed_suite_is_known(run: SuiteRun) -> None:
    assert set(run.installed()) == set(TESTS)
