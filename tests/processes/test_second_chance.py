"""What failed in continuous integration is run once more; what passes then is named, and nothing is hidden."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from tests.kit.times import LONG_S

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.kit.second_chance import pytest_addoption as pytest_addoption
from tests.kit.second_chance import pytest_sessionfinish as pytest_sessionfinish
"""
TESTS = """
import os, pathlib, pytest

def at_second_attempt(name):
    try:
        pathlib.Path(name).touch(exist_ok=False)
    except FileExistsError:
        return
    raise RuntimeError(f"the first attempt of {name}")

def test_passes():
    pass

@pytest.mark.parametrize("way", ["[a]", "b"])
def test_flakes(way):
    print("said before")
    at_second_attempt("in call " + way)

@pytest.fixture
def flaking():
    yield
    at_second_attempt("in teardown")

def test_flakes_at_its_end(flaking):
    pass

def test_listed():
    at_second_attempt("listed")

def test_fails():
    assert os.environ.get("PYTEST_XDIST_WORKER") == "never"
"""
FLAKES = """
[[flake]]
test = "test_of_them.py::test_listed"
seen = 2026-11-19
cause = "unknown"
"""


def run(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run the tests there; the exit code, the lines, and the last one."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_of_them.py").write_text(TESTS)
    (folder / "tests").mkdir()
    (folder / "tests" / "flakes.toml").write_text(FLAKES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "test_of_them.py", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=8 * LONG_S,
    )
    assert not done.stderr
    lines = done.stdout.splitlines()
    return done.returncode, lines, lines[-1]


@pytest.mark.parametrize("jobs", [(), ("-n", "2")], ids=["one", "two"])
def test_what_passes_by_itself_is_named_with_its_traceback_and_the_rest_fails(
    tmp_path: Path, jobs: tuple[str, ...]
) -> None:
    code, lines, last = run(tmp_path, "--second-chance", *jobs)
    assert code == 1
    assert "2 failed, 4 passed" in last
    flakes = [line.split()[1].rstrip(":") for line in lines if line.startswith("FLAKE")]
    names = ["test_flakes[[a]]", "test_flakes[b]", "test_flakes_at_its_end"]
    assert sorted(flakes) == [f"test_of_them.py::{name}" for name in names]
    for name in ("in call [a]", "in call b", "in teardown"):
        assert any(f"RuntimeError: the first attempt of {name}" in line for line in lines)
    assert "said before" in lines
    assert any("test_listed: tests/flakes.toml lists it since 2026-11-19" in line for line in lines)
    assert any("test_of_them.py::test_fails failed again, by itself" in line for line in lines)


def test_a_run_of_flakes_alone_is_a_success(tmp_path: Path) -> None:
    code, lines, last = run(tmp_path, "--second-chance", "-k", "flakes")
    assert code == 0
    assert "3 passed" in last
    assert "failed" not in last
    assert "error" not in last
    assert sum(line.startswith("FLAKE") for line in lines) == 3


def test_nothing_is_run_again_unless_asked(tmp_path: Path) -> None:
    code, lines, last = run(tmp_path)
    assert code == 1
    assert "4 failed, 2 passed, 1 error" in last
    assert not any("FLAKE" in line for line in lines)


def test_what_cannot_be_loaded_is_no_flake(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    code, lines, last = run(
        tmp_path, "--second-chance", "test_broken.py", "-k", "passes", "--continue-on-collection-errors"
    )
    assert code == 1
    assert "1 error" in last
    assert any("no second chance" in line for line in lines)


def test_each_listed_flake_is_a_test_with_a_date_and_a_cause() -> None:
    for flake in tomllib.loads((ROOT / "tests" / "flakes.toml").read_text()).get("flake", ()):
        path, _, name = flake["test"].partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / path).read_text()
        assert isinstance(flake["seen"], date)
        assert flake["cause"]
