"""What is known of the suite's tests: all of them by name (suite.json), and those that are not passed, each
with its reason (not_passed.toml, the only place where such a thing is said).

A test that is listed as not passed and passes is as wrong as one that fails without being listed.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
OUTCOMES = ("failed", "skipped")


@dataclasses.dataclass(frozen=True, slots=True)
class NotPassed:
    outcome: str
    reason: str


def sorted_tests() -> dict[str, str]:
    """Every test of the suite, Class.method, with the letter of what it needs."""
    content = json.loads((HERE / "suite.json").read_text())
    return {
        f"{kind}.{method}": letter
        for letter, kinds in content["tests"].items()
        for kind, methods in kinds.items()
        for method in methods
    }


def not_passed(device_count: int) -> dict[str, NotPassed]:
    """The tests that are known not to pass where there are so many CUDA devices.

    Raises ValueError for a name that is no test, or is listed twice.
    """
    listed: dict[str, NotPassed] = {}
    seen: set[str] = set()
    known = sorted_tests()
    for group in tomllib.loads((HERE / "not_passed.toml").read_text())["group"]:
        if group["outcome"] not in OUTCOMES:
            raise ValueError(f"not_passed.toml: outcome {group['outcome']!r} is none of {OUTCOMES}")
        for test in group["tests"]:
            if test not in known:
                raise ValueError(f"not_passed.toml: {test} is not in suite.json")
            if test in seen:
                raise ValueError(f"not_passed.toml: {test} is listed twice")
            seen.add(test)
            if device_count < group.get("devices", device_count + 1):
                listed[test] = NotPassed(group["outcome"], group["reason"])
    return listed


def complaint(outcome: str, detail: str, expected: NotPassed | None) -> str | None:
    """What is wrong with an outcome, or None where it is the one that is expected."""
    if expected is None:
        return None if outcome == "passed" else f"{outcome}\n{detail}"
    if outcome == expected.outcome:
        return None
    return f"{outcome}, but not_passed.toml lists it as {expected.outcome} ({expected.reason})\n{detail}"
