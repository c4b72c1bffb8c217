"""Functions to be called once a module has been imported.

Must cost next to nothing and import nothing of farcall's: `farcall.pth` uses it at the start of processes that may
never need any of the rest.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["find_and_then", "when_imported"]


def find_and_then(
    asking: importlib.abc.MetaPathFinder,
    fullname: str,
    path: Sequence[str] | None,
    then: Callable[[ModuleType], object],
) -> importlib.machinery.ModuleSpec | None:
    """The module as all finders but ``asking`` find it; its load calls ``then`` with it."""
    found = (finder.find_spec(fullname, path) for finder in sys.meta_path if finder is not asking)
    spec = next((spec for spec in found if spec is not None), None)
    if spec is None or spec.loader is None:
        return None
    load = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        then(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with the module once it is there: at once, if it is."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(importlib.abc.MetaPathFinder):
    """A finder that stays until the module is there: many programs only ask whether it exists, or try again."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return find_and_then(self, fullname, path, self._arrived) if fullname == self._name else None

    def _arrived(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._then(module)
