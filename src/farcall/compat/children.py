"""Processes that a program starts by ``multiprocessing`` have farcall in place, too.

A forked process is a copy and needs nothing. A spawned one, or one of a fork server, first reads how it shall prepare
itself; we put something among that whose reading is the installation. It runs before the program's main module
is imported again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

__all__ = ["take_along"]

_KEY = "farcall"
_INSTALL = """
import sys
if {root!r} not in sys.path:
    sys.path.append({root!r})
from farcall.compat import install
install()
"""


class _Installation:
    """Reading it from a pickle installs farcall."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return exec, (_INSTALL.format(root=root),)


def take_along() -> Callable[[], None]:
    """From now on children have farcall in place; what is returned ends that."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {_KEY: _Installation(), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data

    def undo() -> None:
        if spawn.get_preparation_data is get_preparation_data:
            spawn.get_preparation_data = prepare

    return undo


def mark_environment() -> None:
    """Programs that this one starts in other ways have it as well, where ``farcall.pth`` is installed."""
    os.environ["FARCALL_INSTALL"] = "1"
