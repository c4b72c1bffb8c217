"""The counters of calls: how many, how long, how well they ended. Cheap enough to be always on.

Counters belong to one function at one peer, in one direction: a list with one item for each bucket of a logarithmic
scale of durations, then an item for each way to end badly. The end of a call adds 1 to an item:

    counters[bisect_right(BOUNDS_S, took_s)] += 1

There is no lock. The interpreter switches threads at calls, at the beginning of functions and at jumps backwards, and
none of these lies between reading an item and writing it back: with a global lock no count is lost, without one a few
may be. Readers take a copy, which is a picture of one moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from farcall.protocol.frames import MAX_FUNCTION_BYTES

_PER_OCTAVE: Final = 4
_SHORTEST_S: Final = 1e-6
_OCTAVES: Final = 30
BOUNDS_S: Final = [_SHORTEST_S * 2 ** (index / _PER_OCTAVE) for index in range(_PER_OCTAVE * _OCTAVES + 1)]
"""The ends of buckets: 1 us, then four for each doubling, up to 18 minutes; the last bucket has no end."""

FAILED: Final = len(BOUNDS_S) + 1
"""The function raised."""
TIMED_OUT: Final = FAILED + 1
"""No answer came in time."""
LOST: Final = FAILED + 2
"""The peer, or this node, ended first."""
_SIZE: Final = LOST + 1

MOST_FUNCTIONS: Final = 1000
OTHERS: Final = b"?"
"""The name under which functions beyond MOST_FUNCTIONS are counted."""

Counters: TypeAlias = list[int]
FunctionCounters: TypeAlias = dict[bytes, Counters]
"""By the function's name as it travels; where only a pickle does, by UNNAMED and the name that users read."""
UNNAMED: Final = b"n"


def name_of(what: Callable[..., Any]) -> str:
    """The name of a function in messages to users; of a partial, that of the function inside."""
    while isinstance(what, partial):
        what = what.func
    found = getattr(what, "__qualname__", None)
    name = found if isinstance(found, str) and found else type(what).__name__
    return name.replace("_VariableFunctionsClass.", "torch.")  # torch's private home of ``torch.add`` and others


def counters_of(by_function: FunctionCounters, function: bytes, name: str = "") -> Counters:
    """The counters of ``function``; made at its first call. ``name``: what users call it, if that is known."""
    if name and function[:1] in (b"", b"k"):
        function = (UNNAMED + name.encode(errors="replace"))[:MAX_FUNCTION_BYTES]
    found = by_function.get(function)
    if found is None:
        if len(by_function) >= MOST_FUNCTIONS:
            function = OTHERS
        found = by_function.setdefault(function, [0] * _SIZE)
    return found
