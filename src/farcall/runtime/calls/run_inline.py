"""How long functions take, and which of them the I/O thread runs itself.

A hop to a worker thread costs more than a function that takes microseconds, and is noticeable beside one that takes a
millisecond. So the thread that reads a request also runs its function, wherever that delays no other request;
`runtime/io/reader.py` has another thread read on if the function takes long after all.

    a function    is expected to take   runs
    quick         less than QUICK_S     on the I/O thread, one after the other; answers are sent together
    brief         less than BRIEF_S     on the I/O thread if it is alone, or if such functions were seen to slow each
                                        other down on workers (`executor.py`); else on workers
    long, or new  more                  on workers, side by side
    banned        any time              on workers, until it has been brief there a few times

The expected time is the mean of the previous expectation and the last run: a function whose time varies, or whose
thread lost its core once, moves for a few runs only. A function that was late on the I/O thread, or waited for a call
there, is banned from it; each further ban lasts longer, and bans are forgotten after FORGOTTEN_S.

Used from any thread, without a lock: each entry is written as a whole, and a lost update costs one hop.
"""

from __future__ import annotations

from time import perf_counter

from farcall.runtime.calls.executor import BRIEF_S

QUICK_S = 150e-6
_STILL_QUICK_S = 2 * QUICK_S
"""A quick function stays quick up to here: a cold cache must not move it to a thread whose caches are colder."""
MOST_COUNTED_S = 2 * BRIEF_S
"""Longer runs count as this long, so that one long run is soon forgotten."""
PARDON_RUNS = 4
MOST_PARDON_RUNS = 4096
"""How often, times 4 for each ban, a function must be brief on a worker before it may run on the I/O thread again."""
MOST_FUNCTIONS = 4096
"""How many function names are remembered."""
FORGOTTEN_S = 10.0
"""An older ban does not lengthen the next one: the cause, a slow machine perhaps, is past."""


class InlineFunctions:
    """The timed functions of one node, by the names that requests give them. All fields change with every run."""

    def __init__(self) -> None:
        self.quick: set[bytes] = set()
        """Functions that may run on the I/O thread."""
        self.brief: set[bytes] = set()
        """Functions that may run there while they delay no other request."""
        self.sleepers: set[bytes] = set()
        """Functions that wait more than they compute: on workers they do not slow each other down."""
        self.expected_s: dict[bytes, float] = {}
        """How long each function is expected to take, on whatever thread."""
        self._banned: dict[bytes, int] = {}  # how many brief runs on workers each banned function still needs
        self._bans: dict[bytes, tuple[int, float]] = {}  # bans in a row, and the time of the last one

    def ran(self, function: bytes, took_s: float, own_s: float = -1.0, all_s: float = -1.0) -> float:
        """Note that ``function`` took ``took_s``; returns how long it is expected to take the next time.

        ``own_s``: the CPU time of its thread, for a run that was not expected to be quick. ``all_s``: the CPU time of
        all threads, for a run beside others. The time in which other threads computed does not count: else functions
        that fight for the interpreter would pass for long ones, be run side by side, and fight on. (Passing the
        interpreter on takes time in which no thread computes: a third, if each function calls a device a dozen times.)
        """
        if all_s >= 0:
            took_s = own_s + max(0.0, took_s - all_s)
        elif own_s >= 0:
            if own_s < 0.5 * took_s:
                self.sleepers.add(function)
            else:
                self.sleepers.discard(function)
        counted_s = took_s if took_s < MOST_COUNTED_S else MOST_COUNTED_S
        expected_s = self.expected_s[function] = (self.expected_s.get(function, counted_s) + counted_s) / 2
        if len(self.expected_s) > MOST_FUNCTIONS:
            self._forget_all()
        if expected_s < QUICK_S and function in self.quick:
            return expected_s  # the usual case
        if expected_s >= BRIEF_S or (function in self._banned and not self._is_pardoned(function)):
            self.quick.discard(function)
            self.brief.discard(function)
        elif expected_s < (_STILL_QUICK_S if function in self.quick else QUICK_S):
            self.quick.add(function)
        else:
            self.quick.discard(function)
            self.brief.add(function)
        return expected_s

    def _forget_all(self) -> None:
        """Start over, to bound memory: callers choose the names, and may choose new ones without end."""
        for table in (self.quick, self.brief, self.sleepers, self.expected_s, self._banned, self._bans):
            table.clear()

    def _is_pardoned(self, function: bytes) -> bool:
        """Count one more brief run of a banned function; True: it was the last one needed."""
        left = self._banned.get(function, 1) - 1
        if left > 0:
            self._banned[function] = left
            return False
        self._banned.pop(function, None)
        return True

    def ban(self, function: bytes) -> None:
        """Keep ``function`` off the I/O thread for a while: it was late there, or waited for a call."""
        bans, banned_at = self._bans.get(function, (0, 0.0))
        now = perf_counter()
        bans = min(bans + 1, 8) if now - banned_at < FORGOTTEN_S else 1
        self._bans[function] = bans, now
        self._banned[function] = min(PARDON_RUNS << (2 * bans), MOST_PARDON_RUNS)
        self.quick.discard(function)
        self.brief.discard(function)
