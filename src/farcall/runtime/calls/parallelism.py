"""How many workers take brief tasks at a time: as many as do not fight for the interpreter, or for processors.

Owns that number and the measurements behind it. No clock and no thread: the executor reports what it sees while tasks
wait. After workers got in each other's way there is *peace*: no worker is added for a while.

    tasks wait, and                                          then
    no task has ended since the last look                    one more: tasks may wait for each other
    no worker is active, or all of them sleep                one more
    all compute, and processors are left for one more        one more, unless there is peace
    they use less than PARALLEL_SHARE of a processor each,   fewer, and peace: each longer than the last, up to
    or more processors than there are                        LONGEST_PEACE_S
    one computes, and uses all processors by itself          peace as well
"""

from __future__ import annotations

import os

PARALLEL_SHARE = 0.75
IDLE_SHARE = 0.5
"""Workers that together use less than this share of one processor count as asleep."""
FIRST_PEACE_S = 0.1
LONGEST_PEACE_S = 3.0


class Parallelism:
    """The number of workers that may take brief tasks, ``most``. The I/O thread alone changes it, at each look."""

    def __init__(self, processors: int = 0) -> None:
        """``processors``: by default those that this process may use."""
        self.most: int = 1
        self.peace_until: float = 0.0
        """Until then no worker is added, and one thread runs brief tasks best."""
        self._processors = processors or _usable_processors()
        self._peace_s = FIRST_PEACE_S
        self._looked_at = 0.0
        self._used_s = 0.0

    def begin(self, now: float, used_s: float) -> None:
        """The first look at waiting tasks; this process has used ``used_s`` of CPU time so far."""
        self._looked_at, self._used_s = now, used_s

    def wants_one_more(self, now: float, used_s: float, active: int, has_progress: bool) -> bool:
        """Tasks still wait. Would another worker, beside the ``active`` ones, help?"""
        elapsed_s, used_meanwhile_s = now - self._looked_at, used_s - self._used_s
        self._looked_at, self._used_s = now, used_s
        if not has_progress:
            self.most = max(self.most, active + 1)
            return True
        processors = used_meanwhile_s / elapsed_s if elapsed_s > 0 else 0.0
        if active == 0 or processors < IDLE_SHARE:
            self.most = active + 1
            return True
        # How many workers the processors could serve if each used as many as now. One operator may use all processors.
        room = int(self._processors * active / max(processors, PARALLEL_SHARE))
        if active > 1 and (processors < PARALLEL_SHARE * active or room < active):
            self.most = max(1, min(int(processors / PARALLEL_SHARE), room))
            self._make_peace(now)
        elif room <= active:
            if active == 1:
                self._make_peace(now)
        elif now >= self.peace_until:
            self.most = active + 1
            if active > 1:
                self._peace_s = FIRST_PEACE_S
            return True
        return False

    def _make_peace(self, now: float) -> None:
        self.peace_until = now + self._peace_s
        self._peace_s = min(2 * self._peace_s, LONGEST_PEACE_S)


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
