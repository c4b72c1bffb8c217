"""What waits for a module to be imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from farcall.imports import when_imported

NAME = "farcall_test_of_imports"


@pytest.fixture(autouse=True)
def module_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_it_is_told_once_the_module_is_complete() -> None:
    told: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported(NAME, told.append)
    assert importlib.util.find_spec(NAME) is not None  # asking is not importing
    assert told == []
    module = importlib.import_module(NAME)
    assert told == [module]
    assert module.loaded
    assert sys.meta_path == before
    sys.modules.pop(NAME)
    importlib.import_module(NAME)
    assert len(told) == 1


def test_it_is_told_at_once_where_the_module_is_there() -> None:
    module = importlib.import_module(NAME)
    told: list[ModuleType] = []
    when_imported(NAME, told.append)
    assert told == [module]
