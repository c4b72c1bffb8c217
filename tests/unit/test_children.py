"""What the pickler of `multiprocessing` writes by value."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import pytest

from farcall import children

pytest.importorskip("cloudpickle", reason="the notebook extra is not installed")

# A script of another process: no module has its names.
SCRIPT = """
import farcall

class First:
    count = 0
    def second(self):
        return Second()

class Second:
    def first(self):
        return First()

state = None

def store(value):
    global state
    state = value

def read():
    return state

@farcall.batched()
def double(numbers):
    return [2 * number for number in numbers]

def call(number):
    return double(number)
"""


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    assert "reducer_override" not in ForkingPickler.__dict__
    children.begin()
    yield
    children.end()
    assert "reducer_override" not in ForkingPickler.__dict__


@pytest.fixture
def script() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    return names


def passed(value: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(value))


def test_a_class_stays_itself_with_its_attributes(script: dict[str, Any]) -> None:
    first = script["First"]
    written = ForkingPickler.dumps([first(), first.second])
    first.count = 5
    [back, function] = pickle.loads(written)
    assert type(back) is first
    assert first.count == 5
    assert type(function(back)) is script["Second"]
    assert type(back.second().first()) is first


def test_functions_share_their_globals_and_find_what_another_has_stored(script: dict[str, Any]) -> None:
    written = [ForkingPickler.dumps(script[name]) for name in ("store", "read")]
    script.clear()  # as in a child: nothing of it is there
    store = pickle.loads(written[0])
    store(3)
    assert pickle.loads(written[1])() == 3


def test_batched_functions_are_batched_there(script: dict[str, Any]) -> None:
    assert passed(script["double"])(1) == passed(script["call"])(1) == 2


def test_what_has_a_name_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_module_of_the_program")
    exec(SCRIPT, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for one in (module.First, module.store, pickle.dumps, dict, passed):
        assert bytes(ForkingPickler.dumps(one)) == pickle.dumps(one, pickle.DEFAULT_PROTOCOL)
    local: Any = lambda: module  # noqa: E731
    assert passed(local)() is module
    assert "__farcall_globals__" not in globals()


def test_what_only_a_starting_child_may_have_is_refused_as_in_the_rest(script: dict[str, Any]) -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    with pytest.raises(RuntimeError, match="should only be shared between processes through inheritance"):
        ForkingPickler.dumps(lambda: lock)


def test_a_hook_of_somebody_else_stays(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    children.end()
    monkeypatch.setattr(ForkingPickler, "reducer_override", lambda pickler, value: NotImplemented, raising=False)
    children.begin()
    with pytest.raises(pickle.PicklingError):
        ForkingPickler.dumps(script["First"])
    children.end()
    monkeypatch.undo()
