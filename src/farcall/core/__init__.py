"""The core: links, frames, calls and waiting. `contract.py` says what it does.

``compiled()`` is the one in C++, where it was built; `plain.py` has the same in Python.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

from farcall.core import contract, waiting
from farcall.core.waiting import in_wait as in_wait


@cache
def compiled() -> Any:
    """The class of the compiled core, as `contract.Core` says; None: it was not built here."""
    if os.environ.get("FARCALL_SPEEDUPS") == "0":
        return None
    try:
        library = importlib.import_module("farcall.core._core")
    except ImportError:
        return None
    library.set_errors(contract.CoreError, contract.Stopped)
    waiting.look_at(library.in_wait)
    return library.Core


def make_core(memory_limit: int, backlog_limit: int, busy_wait_s: float) -> contract.Core:
    """A core for one node."""
    made: Any = compiled()
    if made is None:
        from farcall.core.plain import Core

        made = Core
    core: contract.Core = made(memory_limit, backlog_limit, busy_wait_s)
    return core
