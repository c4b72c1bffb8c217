"""Functions to be called once a module has been imported; and imports of many modules at once.

Must cost next to nothing and import nothing of farcall's: `farcall.pth` uses it at the start of processes that may
never need any of the rest.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType


@contextmanager
def importing_much() -> Iterator[None]:
    """Let the garbage collector rest: what modules make stays, and looking through torch's takes longer than all else.

    Threads may do this at the same time: each that found it at work sets it to work again. So does a child that
    another thread forks meanwhile, where this one does not exist.
    """
    was_at_work = gc.isenabled()
    if was_at_work:
        _RESTING.append(None)
    gc.disable()
    try:
        yield
    finally:
        if was_at_work:
            gc.enable()
            if _RESTING:  # it is empty in a child that was forked from in here
                _RESTING.pop()


_RESTING: list[None] = []
"""One for each thread for which the garbage collector rests."""


def _work_in_child() -> None:
    if _RESTING:
        _RESTING.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_work_in_child)


def find_and_then(
    asking: importlib.abc.MetaPathFinder,
    fullname: str,
    path: Sequence[str] | None,
    then: Callable[[ModuleType], object],
) -> importlib.machinery.ModuleSpec | None:
    """The module as all finders but ``asking`` find it; its load calls ``then`` with it."""

    def load_and_then(load: Callable[[ModuleType], object], module: ModuleType) -> None:
        load(module)
        then(module)

    return _find_and_wrap(asking, fullname, path, load_and_then)


def _find_and_wrap(
    asking: importlib.abc.MetaPathFinder,
    fullname: str,
    path: Sequence[str] | None,
    around: Callable[[Callable[[ModuleType], object], ModuleType], None],
) -> importlib.machinery.ModuleSpec | None:
    """The module as all finders but ``asking`` find it; it is loaded by ``around``, which gets the plain loader."""
    found = (finder.find_spec(fullname, path) for finder in sys.meta_path if finder is not asking)
    spec = next((spec for spec in found if spec is not None), None)
    if spec is None or spec.loader is None:
        return None
    spec.loader.exec_module = partial(around, spec.loader.exec_module)  # type: ignore[method-assign]
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


class Loading(importlib.abc.MetaPathFinder):
    """The modules of one package that this thread is loading: something can be done once it loads none.

    Inside an import, a module that is being loaded further out is incomplete, and must not be used.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._of_thread = threading.local()
        sys.meta_path.insert(0, self)

    def then(self, do: Callable[[], object]) -> None:
        """Call ``do`` once, when this thread loads no module of the package: now, or at the end of the outermost."""
        if getattr(self._of_thread, "depth", 0):
            self._of_thread.do = do
        else:
            self._end(do)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return _find_and_wrap(self, fullname, path, self._load) if fullname.startswith(self._prefix) else None

    def _load(self, load: Callable[[ModuleType], object], module: ModuleType) -> None:
        depth = self._of_thread.depth = getattr(self._of_thread, "depth", 0) + 1
        try:
            load(module)
        finally:
            self._of_thread.depth = depth - 1
        do: Callable[[], object] | None = getattr(self._of_thread, "do", None)
        if do is not None and depth == 1:
            self._of_thread.do = None
            self._end(do)

    def _end(self, do: Callable[[], object]) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        do()
