"""Every promise on the page about security is kept by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def promises() -> list[str]:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## Promises")[2].partition("**Not promised.**")[0]
    return [line for line in table.splitlines() if line.startswith("| ") and "`test_" in line]


def test_each_promise_names_tests_that_exist() -> None:
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE))
    named = {name for line in promises() for name in re.findall(r"`(test_\w+)`", line)}
    assert len(promises()) >= 10
    assert named <= there, named - there
