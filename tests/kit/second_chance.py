"""``--second-chance``, for `.ci/run` alone: what failed runs once more, each test by itself, in a process of its own.

A test that passes then is a flake: it is printed with its traceback, and counts as passed. Whoever sees one enters it
in ``tests/flakes.toml``, by hand; a test that is listed there has no second chance. Many failures are no flakes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

MOST = 20
"""If more tests failed, something is broken."""
LONGEST_S = 900.0
"""More than any test has for itself (``timeout`` in pyproject.toml), and the start of its process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-chance", action="store_true", help="run what failed once more, each test by itself")


@pytest.hookimpl(trylast=True)  # xdist's workers have ended by then
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.TESTS_FAILED and config.option.second_chance and terminal is not None:
        give_second_chances(session, terminal.stats, terminal.write_line)


def give_second_chances(session: pytest.Session, stats: dict[str, list[Any]], say: Any) -> None:
    """Take the flakes out of ``stats``; the session is a success if nothing else failed."""
    failed = [report for kind in ("failed", "error") for report in stats.get(kind, ())]
    tests = dict.fromkeys(report.nodeid for report in failed)
    if len(tests) > MOST or not all(isinstance(report, pytest.TestReport) for report in failed):
        say(f"\nno second chance: {len(tests)} failures, or modules that cannot be loaded, are no flakes")
        return
    known = listed(session.config.rootpath)
    for test in tests:
        name = test.partition("[")[0]
        if test in known or name in known:
            say(f"\nno second chance for {test}: tests/flakes.toml lists it since {known.get(test) or known.get(name)}")
            continue
        passed, output = run_alone(test, session.config.rootpath)
        if not passed:
            say(f"\n{test} failed again, by itself:\n{output}")
            continue
        reports = [report for report in failed if report.nodeid == test]
        say(f"\nFLAKE {test}: it passes by itself. Enter it in tests/flakes.toml.")
        for report in reports:
            say(f"{report.when}: {report.longreprtext}")
            for title, text in report.sections:
                say(f"--- {title}\n{text}")
        for kind in ("failed", "error"):
            stats[kind] = [report for report in stats.get(kind, ()) if report.nodeid != test]
        if any(report.when != "teardown" for report in reports):  # else its call has passed, and was counted
            stats.setdefault("passed", []).append(reports[0])
    if not stats.get("failed") and not stats.get("error"):
        session.exitstatus = pytest.ExitCode.OK


def listed(root: Path) -> dict[str, str]:
    """The known flakes, and since when."""
    path = root / "tests" / "flakes.toml"
    found = tomllib.loads(path.read_text()) if path.exists() else {}
    return {flake["test"]: str(flake["seen"]) for flake in found.get("flake", ())}


def run_alone(test: str, root: Path) -> tuple[bool, str]:
    """Run one test; did it pass, and what was said?"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", test]
    try:
        done = subprocess.run(
            command, cwd=root, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired as late:
        return False, f"{late.stdout or ''}\nnot done within {LONGEST_S:g} s"
    return done.returncode == 0, done.stdout
