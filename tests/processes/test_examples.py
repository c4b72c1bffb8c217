"""The examples run as they are, and each checks its own results: most against a twin in one process."""

from __future__ import annotations

import pytest
from tests.kit.wheel import ROOT, Installed

EXAMPLES = ROOT / "examples"

SAYS = {
    "actor_learner": "times as long as at first",
    "asyncio_program": "100 requests, every answer right",
    "batch_updates": "trainer1: the same, bit for bit, as in one process",
    "data_parallel": "trainer1: the same, to within rounding, as in one process",
    "deadlock": "CYCLE: left and right wait for each other",
    "http_service": "nobody waits",
    "hyperparameter_search": "trials left on the workers: 1",
    "parameter_server": "trainer1: the same, bit for bit, as in one process",
    "pipeline": "the same, to within rounding, as in one process",
    "restart": "the same, bit for bit, as in one process that nobody disturbed",
    "rollout": "learned, although a rollout worker and the trainer were killed",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_every_example_is_listed(name: str) -> None:
    assert f"| [{name}.py]({name}.py) |" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", SAYS)
def test_an_example(installed: Installed, name: str) -> None:
    done = installed.run(installed.python, EXAMPLES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout


def test_an_example_under_a_launcher(installed: Installed) -> None:
    # Each worker is told its rank, as by torchrun; the process group of torch meets at the same port.
    done = installed.run(installed.command, "run", "--workers", "3", EXAMPLES / "data_parallel.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 | {SAYS['data_parallel']}" in done.stdout
