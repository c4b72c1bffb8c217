"""The tree of folders on the page about the architecture is that of the code; rules that the whole code keeps."""

from __future__ import annotations

import ast
import gc
import re
import sys
from pathlib import Path

import pytest
from tests.kit.distribution import TOGETHER

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "farcall"


def tree() -> dict[str, str]:
    """What the page says of each part of the package, by the part's name."""
    page = (ROOT / "docs" / "design" / "ARCHITECTURE.md").read_text()
    [house] = re.findall(r"^src/farcall/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    said = re.split(r"^  (?=\S)", house, flags=re.MULTILINE)[1:]
    return {text.split()[0].rstrip("/"): text for text in said}


def parts() -> set[str]:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    return folders | {path.name for path in SOURCE.glob("*.py")} - {"__main__.py"}


def test_every_part_is_in_the_tree() -> None:
    assert parts() == {part for part, text in tree().items() if "(not there yet)" not in text}


def test_what_is_not_there_yet_is_not() -> None:
    assert not {part for part, text in tree().items() if "(not there yet)" in text} & parts()


def modules_named(part: str) -> list[Path]:
    """What the page names in a part: its files and folders, and those of a folder that a line begins with."""
    named = []
    home = folder = SOURCE / part
    _, text = tree()[part].split(maxsplit=1)
    for line in text.splitlines():
        if line[:6].strip():
            folder = home / first if (first := line.split()[0]).endswith("/") else home
        for name in re.findall(r"(?<![\w/])\w+(?:\.py|/)(?!\w)", line):
            named.append(folder / name if (folder / name).exists() else home / name)
    return named


def test_every_module_in_the_tree_exists() -> None:
    for part in parts():
        if (SOURCE / part).is_dir():
            assert [path for path in modules_named(part) if not path.exists()] == [], part


def test_every_folder_of_the_runtime_is_in_the_tree() -> None:
    folders = {path.parent for path in (SOURCE / "runtime").glob("*/__init__.py")}
    assert folders == {path for path in modules_named("runtime") if path.is_dir()}


def test_files_whose_tests_stay_with_one_worker_exist() -> None:
    assert [path for path in TOGETHER if not (ROOT / path).exists()] == []


def test_unit_tests_lie_where_the_code_lies() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests" / "unit") for path in (ROOT / "tests" / "unit").rglob("test_*.py")
    }
    assert [str(folder) for folder in folders if not (SOURCE / folder).is_dir()] == []


MADE_EMPTY = {"Counter", "Event", "Lock", "RLock", "WeakKeyDictionary", "WeakSet", "defaultdict", "local", "set"}


def is_state(statement: ast.stmt, own_classes: set[str]) -> bool:
    """Does a module-level statement make something that changes later: a lock, an empty container, one of its own?"""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    match statement.value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[]):
            return name in MADE_EMPTY or name in own_classes
        case ast.Call(func=ast.Name(id="ContextVar")):
            return True
    return False


def has_state(module: Path) -> bool:
    tree = ast.parse(module.read_text())
    classes = {statement.name for statement in tree.body if isinstance(statement, ast.ClassDef)}
    assigned_by_functions = any(isinstance(node, ast.Global) for node in ast.walk(tree))
    return assigned_by_functions or any(is_state(statement, classes) for statement in tree.body)


def test_every_module_with_state_is_in_the_table() -> None:
    page = (ROOT / "docs" / "design" / "ARCHITECTURE.md").read_text()
    [table] = re.findall(r"^## State of the process\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", table))
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if has_state(path)}
    folders = {name for name in named if name.endswith("/")}
    assert {name for name in found if not name.startswith(tuple(folders))} == named - folders


def test_decoders_are_made_when_modules_are_loaded() -> None:
    """msgspec looks into a type at its first use. Two threads that do so at once crash: seen with 200 members."""
    by_use = re.compile(r"msgspec\.\w+\.decode\([^)]*\btype=(?!int\b|str\b|bytes\b)")
    assert [str(path) for path in sorted(SOURCE.rglob("*.py")) if by_use.search(path.read_text())] == []


def test_dictionaries_that_threads_share_are_copied_whole() -> None:
    """``list(table.items())`` makes tuples, and so may begin a garbage collection, whose destructors let others change
    the table: "dictionary changed size during iteration". ``table.copy()`` makes nothing once it has begun.
    """
    table: dict[object, int] = dict.fromkeys(range(1000), 0)

    def grow(phase: str, info: object) -> None:
        table[object()] = 0

    thresholds = gc.get_threshold()
    gc.callbacks.append(grow)
    gc.set_threshold(1)
    try:
        for _ in range(100):
            table.copy().items()
        if sys.version_info < (3, 12):  # later ones collect only between two steps of Python code
            with pytest.raises(RuntimeError, match="changed size"):
                list(table.items())
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(grow)

    shared = ("channel", "compat", "observe", "rpc", "runtime", "transport")
    copied_in_pieces = [
        f"{path.relative_to(SOURCE)}: {found}"
        for folder in shared
        for path in (SOURCE / folder).rglob("*.py")
        for found in re.findall(r"in list\([\w.]+\.items\(\)\)", path.read_text())
    ]
    assert copied_in_pieces == []
