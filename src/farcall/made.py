"""Functions that farcall made of the program's: where code travels by value, they travel as those, and are made again.

Their own code and globals are farcall's, and cannot be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MADE = "__farcall_made__"
"""The attribute of a function that farcall made of one of the program's."""


class Made(NamedTuple):
    """How farcall made a function: ``maker(*arguments)``.

    ``arguments[0]`` is the program's function; ``keeper.func`` is, too, and may be replaced.
    """

    function: Any
    maker: Callable[..., Any]
    arguments: tuple[Any, ...]
    keeper: Any


def made(function: Any) -> Made | None:
    """How farcall made ``function``, if it did. (Decorators copy attributes to functions of their own.)"""
    found = function.__dict__.get(MADE)
    return found if found is not None and found.function is function else None
