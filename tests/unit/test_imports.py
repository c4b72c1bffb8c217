"""What waits for a module to be imported."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType

import pytest

import farcall
from farcall.imports import Loading, current_frames, gc_paused, when_imported

NAME = "farcall_test_of_imports"
SOURCE = Path(farcall.__file__).parent


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


def test_something_waits_for_the_outermost_module_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "outer_of_test.py").write_text("import inner_of_test\ncomplete = True")
    (tmp_path / "inner_of_test.py").write_text("import sys\nsys.when_inner()")
    told: list[bool] = []
    before = list(sys.meta_path)
    loading = Loading("outer_of")

    def ask() -> None:
        loading.then(lambda: told.append(sys.modules["outer_of_test"].complete))
        assert told == []

    sys.when_inner = ask  # type: ignore[attr-defined]
    try:
        importlib.import_module("outer_of_test")
    finally:
        del sys.when_inner  # type: ignore[attr-defined]
        for name in ("outer_of_test", "inner_of_test"):
            sys.modules.pop(name, None)
    assert told == [True]
    assert sys.meta_path == before


def test_the_garbage_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():  # another thread, or a module that imports another one
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_thread_to_end_its_pause_enables_the_garbage_collector() -> None:
    first, second = gc_paused(), gc_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_no_garbage_collection_runs_while_frames_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback of one may let another thread run, which waits for a lock that is held meanwhile: seen in a soak."""
    was_enabled: list[bool] = []
    list_frames = sys._current_frames

    def listed() -> dict[int, FrameType]:
        was_enabled.append(gc.isenabled())
        return list_frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    assert threading.get_ident() in current_frames()
    assert was_enabled == [False]
    users = [path for path in SOURCE.rglob("*.py") if "sys._current_frames()" in path.read_text()]
    assert [path.name for path in users] == ["imports.py"]


def test_a_child_that_is_forked_meanwhile_collects_garbage() -> None:
    found, told = os.pipe()
    with gc_paused():
        child = os.fork()
        if child == 0:
            os.write(told, b"1" if gc.isenabled() else b"0")
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(found, 1) == b"1"
    assert gc.isenabled()
    os.close(found)
    os.close(told)
