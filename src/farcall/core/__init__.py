"""The core: links, frames, calls and waiting. `contract.py` says what it does; nothing above uses it yet.

``compiled()`` is the one in C++, where it was built; `plain.py` has the same in Python.
"""

from __future__ import annotations

import importlib
from typing import Any

from farcall.core import contract


def compiled() -> Any:
    """The class of the compiled core, as `contract.Core` says; None: it was not built here."""
    try:
        library = importlib.import_module("farcall.core._core")
    except ImportError:
        return None
    library.set_errors(contract.CoreError, contract.Stopped)
    return library.Core
