"""The compiled part of this package (``_frames.c``), where it was built: nothing needs it, calls are cheaper with it.

``FARCALL_SPEEDUPS=0`` switches it off. The Python code beside each use of it does the same, under the same tests.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

_INTERFACE = 3
"""The version of the functions in ``_frames.c``: a library with another one, of another farcall, is not used."""


def load() -> Any:
    """The compiled module; None if it is switched off, was not built, or was built from other source."""
    if os.environ.get("FARCALL_SPEEDUPS") == "0":
        return None
    try:
        found = importlib.import_module("farcall.protocol._frames")
    except ImportError:
        return None
    return found if found.INTERFACE == _INTERFACE else None


library: Any = load()
