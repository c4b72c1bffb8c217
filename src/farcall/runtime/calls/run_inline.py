"""Which functions the I/O thread runs itself.

A hop to a worker thread costs more than most functions that take microseconds. So a function that was quick when it
last ran is run by the thread that reads its request; `runtime/io/reader.py` has another thread read on if it is slow
after all.

    a function's record   the function                            becomes
    none, or slow         took less than QUICK_S                  quick: may run on the I/O thread
    quick                 took longer, once                       doubtful: runs on a worker, is quick again soon
    doubtful              took longer again                       slow
    quick                 was slow on the I/O thread, or waited   banned, for some quick runs on workers
    banned                has been quick often enough             quick

Once is forgiven: the thread may have been off its core, or collecting garbage. Bans grow with their number, and are
forgotten after FORGOTTEN_S. From any thread, without a lock: each entry is written as a whole, and a lost update costs
one hop.
"""

from __future__ import annotations

from time import perf_counter

__all__ = ["InlineFunctions"]

QUICK_S = 100e-6
"""A function that took less than this when it last ran is expected to be quick again."""
PARDON_RUNS = 64
MOST_PARDON_RUNS = 4096
"""How often, times 4 for each ban, a function must be quick on a worker before it may run on the I/O thread again."""
FORGOTTEN_S = 10.0
"""A ban that is older than this counts for nothing: the machine was slow, or that was long ago."""

_DOUBTFUL = 1
_QUICK = 2


class InlineFunctions:
    """How quick the functions of one node have been, by the name that requests give them."""

    def __init__(self) -> None:
        self.trusted: set[bytes] = set()
        """The functions that may run on the I/O thread."""
        self._records: dict[bytes, int] = {}
        self._banned: dict[bytes, int] = {}  # how often each must be quick elsewhere first
        self._bans: dict[bytes, tuple[int, float]] = {}  # how many in a row, and when the last was

    def is_quick(self, function: bytes) -> bool:
        """Is ``function`` expected to be quick, wherever it runs?"""
        return self._records.get(function, 0) > 0

    def ran(self, function: bytes, took_s: float) -> bool:
        """Note that ``function`` took so long; is it expected to be quick the next time?"""
        record = self._records.get(function, 0)
        if took_s < QUICK_S or (record and took_s < 2 * QUICK_S):
            if record != _QUICK:
                self._records[function] = _QUICK
            if function in self._banned:
                left = self._banned.get(function, 1) - 1
                if left > 0:
                    self._banned[function] = left
                    return True
                self._banned.pop(function, None)
            self.trusted.add(function)
            return True
        self._records[function] = record >> 1
        self.trusted.discard(function)
        return record > _DOUBTFUL

    def ban(self, function: bytes) -> None:
        """Keep ``function`` off the I/O thread for a while: it was slow there, or waited for a call."""
        bans, banned_at = self._bans.get(function, (0, 0.0))
        now = perf_counter()
        bans = min(bans + 1, 8) if now - banned_at < FORGOTTEN_S else 1
        self._bans[function] = bans, now
        self._banned[function] = min(PARDON_RUNS << (2 * bans), MOST_PARDON_RUNS)
        self.trusted.discard(function)
