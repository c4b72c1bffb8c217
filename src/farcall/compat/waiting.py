"""Things to be done when a module has been imported, by whomever.

`install_when_torch_comes` is what ``farcall.pth`` runs at the start of every process in which FARCALL_INSTALL is set.
It must cost next to nothing: importing torch takes a second, and many a process never does. So the installation waits
for the program to do it, and nothing else of farcall is imported before that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["find_and_then", "install_when_torch_comes"]


def find_and_then(
    asking: importlib.abc.MetaPathFinder,
    fullname: str,
    path: Sequence[str] | None,
    then: Callable[[ModuleType], object],
) -> importlib.machinery.ModuleSpec | None:
    """The module as all finders but ``asking`` find it; ``then`` is called with it once it is loaded."""
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


class _WaitingForTorch(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Stays until torch is there: many a program only asks whether it could be found, or tries again.
        return find_and_then(self, fullname, path, self._install) if fullname == "torch" else None

    def _install(self, torch: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _install()


def _install() -> None:
    from farcall.compat.installation import install

    install()


def install_when_torch_comes() -> None:
    """Have farcall in place from the moment on at which torch is imported."""
    if "torch" in sys.modules:
        _install()
    # Once: in an environment that sees another one's packages, Python reads each .pth file twice.
    elif not any(isinstance(finder, _WaitingForTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitingForTorch())
