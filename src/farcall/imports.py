"""Functions to be called once a module has been imported; pauses of the garbage collector; and children that import.

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
from types import FrameType, ModuleType
from typing import Any


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector where many objects are made that stay: searching torch's takes most of the time.

    Several threads may do this at once: the last one to end enables the collector again, if the first one found it
    enabled. So does a child forked by another thread meanwhile, in which this thread does not exist.
    """
    with _LOCK:
        _PAUSES.append(_PAUSES[0] if _PAUSES else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            if _PAUSES and _PAUSES.pop() and not _PAUSES:  # it was empty in a child that was forked from in here
                gc.enable()


UNGUARDED: str = (
    "this is a child process of multiprocessing, whose import of your script calls farcall at its top level: put "
    'that part of the script below `if __name__ == "__main__":`'
)


def child_imports_program() -> bool:
    """Whether this process is a child that still imports its parent's script, and must start nothing by itself."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")  # each such child has loaded it
    return multiprocessing is not None and getattr(multiprocessing.current_process(), "_inheriting", False)


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, without a garbage collection amid.

    ``sys._current_frames`` holds the interpreter's lock of threads while it makes frame objects, which may start a
    collection, whose callbacks may let another thread run. If that one starts or ends a thread, it waits for the lock,
    and the interpreter stands still for ever (Python 3.11; python/cpython#106883).
    """
    with gc_paused():
        return sys._current_frames()


_LOCK = threading.RLock()  # a signal handler or a destructor may come in between
_PAUSES: list[bool] = []
"""One for each thread that has paused the garbage collector: was it enabled before?"""


def _enable_in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # the other one may be held by a thread that the child does not have
    if _PAUSES and _PAUSES[0]:
        gc.enable()
    _PAUSES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_enable_in_child)


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


def when_imported(name: str, then: Callable[[ModuleType], object]) -> Callable[[], object]:
    """Call ``then`` with the module once it is there: at once, if it is. What is returned ends the waiting for it."""
    waiting = _Waiting(name, then)
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, waiting)
    return waiting.end


class _Waiting(importlib.abc.MetaPathFinder):
    """A finder that stays until the module is there: many programs only ask whether it exists, or try again."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return find_and_then(self, fullname, path, self._arrived) if fullname == self._name else None

    def _arrived(self, module: ModuleType) -> None:
        self.end()
        self._then(module)


class Loading(importlib.abc.MetaPathFinder):
    """The imports of one package, watched: work that needs complete modules waits for the end of the outermost.

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
