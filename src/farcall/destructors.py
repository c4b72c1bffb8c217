"""Which functions are destructors: a ``__del__``, or the callback of a weak reference, that gives something back.
And others, short ones, that must run as a whole (``whole``).

Python looks for signals before the first line of such a function, too, and drops what their handlers raise: then
nothing would be given back, and the program would miss its Ctrl-C. `runtime/io/sigint.py` knows them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])

DESTRUCTORS: set[CodeType] = set()


def destructor(function: Function) -> Function:
    """Have Ctrl-C wait until ``function`` is over, on the main thread."""
    DESTRUCTORS.add(function.__code__)
    return function


whole = destructor
"""For a function that is no destructor, and costs nothing where a section of `sigint.py` would cost too much."""
