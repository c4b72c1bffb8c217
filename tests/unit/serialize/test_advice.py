"""A function by value whose changes are lost, or whose globals are large, is told of once, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farcall.serialize import advice, units

LARGE = torch.ones(1 << 18)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told", set())


def told(caplog: pytest.LogCaptureFixture, source: str, **values: Any) -> list[str]:
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "large": LARGE, "small": LARGE[:10], **values}
    exec(source, names)
    caplog.clear()
    for _ in range(2):
        advice.advise(names["f"])
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("n += 1", "n"),
        ("del n", "n"),
        ("seen.append(x)", "seen"),
        ("seen[x] = table", "seen"),
        ("seen[len(str(x)) + 1] += x", "seen"),
        ("seen[0][x] = 1", "seen"),
        ("seen[1:2] = [x]", "seen"),
        ("del seen[x]", "seen"),
        ("(lambda: seen.clear())()", "seen"),
        ("return table.setdefault(x, 1)", "table"),
    ],
)
def test_a_change_that_the_next_call_will_not_see(caplog: pytest.LogCaptureFixture, line: str, name: str) -> None:
    [text] = told(caplog, f"n = 0\nseen = [[1], 2, 3]\ntable = {{}}\ndef f(x):\n    global n\n    {line}")
    assert text.startswith(f"f(), which travels by value, changes the global {name}, and each call has globals of its")
    assert "create()" in text


@pytest.mark.parametrize(
    "body",
    [
        "return n + x + len(seen) + seen[x]",
        "own = []\n    own.append(seen)\n    own[0] = seen[1]\n    return own",
        "own = {}\n    own[seen[0]] = table.get(x, n)",
        "return torch.add(small, n)",
        "return sorted(seen).pop()",
    ],
)
def test_what_changes_nothing_is_not_told(caplog: pytest.LogCaptureFixture, body: str) -> None:
    assert told(caplog, f"n = 0\nseen = [1, 2]\ntable = {{}}\ndef f(x):\n    {body}") == []


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (LARGE, "1.0"),
        ([LARGE, {"a": LARGE}], "2.0"),
        (b"x" * (3 << 20), "3.0"),
        (list(range(1 << 20)), "4.0"),
        (torch.nn.Linear(1024, 1024), "4.0"),
    ],
)
def test_a_large_global_is_told_with_its_size(caplog: pytest.LogCaptureFixture, value: Any, size: str) -> None:
    [text] = told(caplog, "def g(): return weights\ndef f(x): return g()", weights=value)
    assert text.startswith(
        f"g(), which travels by value, uses the global weights, and its {size} MiB travel with each call"
    )


def test_one_that_grows_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cloudpickle")
    names: dict[str, Any] = {"__name__": "__main__", "seen": []}
    exec("def f(): return seen", names)
    units.split(names["f"])
    assert not caplog.records
    names["seen"].append(LARGE)
    for _ in range(3):
        units.split(names["f"])
    [record] = caplog.records
    assert record.getMessage().startswith("f(), which travels by value, uses the global seen, and its 1.0 MiB travel")


def test_small_ones_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, "def f(x): return small, LARGER", LARGER=LARGE[:-1]) == []


def test_methods_of_a_class_of_the_script_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    [text] = told(caplog, "seen = []\nclass A:\n    def m(self): seen.append(1)\ndef f(x): return A().m()")
    assert text.startswith("A.m(), which travels by value, changes the global seen")
