"""How long functions take, and which of them the I/O thread runs itself.

A hop to a worker thread costs more than most functions that take microseconds, and is felt with one that takes a
millisecond. So the thread that reads a request runs its function as well, wherever nobody else is kept waiting;
`runtime/io/reader.py` has another thread read on if it takes long after all.

    a function    is expected to take   runs
    quick         less than QUICK_S     on the I/O thread, one after the other, and answers travel together
    brief         less than BRIEF_S     on the I/O thread where it is alone, or where such functions were seen to be in
                                        each other's way (`executor.py`); else on workers
    long, or new  more                  on workers, side by side
    banned        any time              on workers, until it has been brief there a few times

What is expected is half what was expected before and half what the last run took: a function whose length varies, or
whose thread was off its core once, changes its place for a few runs and no more. Banned is who was late on the I/O
thread, or waited for a call there; bans grow with their number, and are forgotten after FORGOTTEN_S.

From any thread, without a lock: each entry is written as a whole, and a lost update costs one hop.
"""

from __future__ import annotations

from time import perf_counter

from farcall.runtime.calls.executor import BRIEF_S

QUICK_S = 150e-6
_STILL_QUICK_S = 2 * QUICK_S
"""One that was quick stays so up to here: a cold cache must not move it to a thread where caches are colder."""
MOST_COUNTED_S = 2 * BRIEF_S
"""A run counts as no longer than this, so that one long run is soon forgotten."""
PARDON_RUNS = 4
MOST_PARDON_RUNS = 4096
"""How often, times 4 for each ban, a function must be brief on a worker before it may run on the I/O thread again."""
MOST_FUNCTIONS = 4096
"""So many names are remembered."""
FORGOTTEN_S = 10.0
"""A ban that is older than this counts for nothing: the machine was slow, or that was long ago."""


class InlineFunctions:
    """How long the functions of one node have taken, by the name that requests give them."""

    def __init__(self) -> None:
        self.quick: set[bytes] = set()
        """The functions that may run on the I/O thread."""
        self.brief: set[bytes] = set()
        """Those that may where they keep nobody waiting."""
        self.sleepers: set[bytes] = set()
        """Brief ones that wait more than they compute: these are in nobody's way."""
        self.expected_s: dict[bytes, float] = {}
        """How long each function is expected to take, wherever it runs."""
        self._banned: dict[bytes, int] = {}  # how often each must be brief elsewhere first
        self._bans: dict[bytes, tuple[int, float]] = {}  # how many in a row, and when the last was

    def ran(self, function: bytes, took_s: float, own_s: float = -1.0, all_s: float = -1.0) -> float:
        """Note that ``function`` took so long; how long is it expected to take the next time?

        ``own_s``, of a run that was not expected to be quick: the processor time of its thread meanwhile. ``all_s``, of
        one beside others: that of all threads. The time in which others computed does not count: functions that fight
        for the interpreter would else pass for long ones, be run side by side, and fight on. (Handing it over takes
        time in which nobody computes, a third of it where each function calls a device a dozen times.)
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
            return expected_s  # as nearly always
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
        """Begin anew: callers choose the names, and may choose new ones without end."""
        for table in (self.quick, self.brief, self.sleepers, self.expected_s, self._banned, self._bans):
            table.clear()

    def _is_pardoned(self, function: bytes) -> bool:
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
