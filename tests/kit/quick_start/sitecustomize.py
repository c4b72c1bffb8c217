"""torch is loaded without garbage collections: a third of the processor time of a process that uses it.

Python imports this at its start, in every process of the tests (`tests.kit.wheel`, `tests/conftest.py`). It knows
nothing of farcall, and changes no result of a program: torch makes a quarter of a million objects that stay, and
Python would traverse them again and again while it loads them, and at its end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# The second is what an optimizer asks for.
LARGE = ("torch", "torch._dynamo")


class WithoutCollections:
    """The finder of the large modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name in LARGE else None
        if found is None or found.loader is None:
            return None
        load = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            was_on = gc.isenabled()
            gc.disable()
            try:
                load(module)
            finally:
                # Only with torch, which a program imports before it makes anything: a frozen object is never collected.
                if name == "torch":
                    gc.freeze()
                if was_on:
                    gc.enable()

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


# Behind the finders of others, which ask this one: in front it would keep `FARCALL_INSTALL` from torch.
sys.meta_path.insert(sys.meta_path.index(PathFinder), WithoutCollections)  # type: ignore[arg-type]
