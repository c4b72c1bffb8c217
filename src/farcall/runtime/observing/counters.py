"""How often, how long and how well: the counters that every call passes, cheap enough to be always on.

Counters belong to one function at one peer, in one direction: a list with one item for each bucket of a logarithmic
scale of durations, and then the few below that count what did not end well. Whoever ends a call adds 1 to an item:

    counters[bisect_right(BOUNDS_S, took_s)] += 1

There is no lock. Between reading an item and writing it back the interpreter looks at nothing (it switches threads at
calls, at the beginning of functions and at jumps backwards), so no count is lost while there is a global lock; an
interpreter without one may lose a few. Whoever reads takes a copy, which is a picture of one moment.
"""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["BOUNDS_S", "FAILED", "LOST", "OTHERS", "TIMED_OUT", "Counters", "FunctionCounters", "counters_of"]

_PER_OCTAVE: Final = 4
_SHORTEST_S: Final = 1e-6
_OCTAVES: Final = 30
BOUNDS_S: Final = [_SHORTEST_S * 2 ** (index / _PER_OCTAVE) for index in range(_PER_OCTAVE * _OCTAVES + 1)]
"""Where buckets end: 1 us, then four for each doubling, up to 18 minutes; the last bucket has no end."""

FAILED: Final = len(BOUNDS_S) + 1
"""The function raised."""
TIMED_OUT: Final = FAILED + 1
"""No answer came in time."""
LOST: Final = FAILED + 2
"""The peer, or this node, ended first."""
_SIZE: Final = LOST + 1

MOST_FUNCTIONS: Final = 1000
OTHERS: Final = b"?"
"""Where functions are counted that came after so many others."""

Counters: TypeAlias = list[int]
FunctionCounters: TypeAlias = dict[bytes, Counters]
"""By the function's name as it travels; nothing for one that is pickled with its arguments."""


def counters_of(tallies: FunctionCounters, function: bytes) -> Counters:
    """The counters of ``function``, which may be new."""
    found = tallies.get(function)
    if found is None:
        if len(tallies) >= MOST_FUNCTIONS:
            function = OTHERS
        found = tallies.setdefault(function, [0] * _SIZE)
    return found
