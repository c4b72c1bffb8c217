"""One warning to a user whose workers wait for others: which are missing, long before the wait ends in an error."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

logger: logging.Logger = logging.getLogger("farcall")

SPEAK_AFTER_S = 5.0
_LAUNCHED = ("FARCALL_RESTARTS", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS")
"""Variables of `farcall run --workers`, mpirun, mpiexec and srun."""


def _advice(size: int, launched: bool, environ: Mapping[str, str]) -> str:
    if not launched and not any(name in environ for name in _LAUNCHED):
        return f"On one machine, `farcall run --workers {max(1, size)} PROGRAM` starts them"
    started = environ.get("WORLD_SIZE", "")
    if started.isdecimal() and int(started) < size:
        return f"What started this one has started {started}, and the program asks for {size}: make both the same"
    return "What started this one should have: see what it says of the others"


class MissingNotice:
    """The wait of rank ``rank`` of ``size`` for the others, until ``deadline``; warns once."""

    def __init__(self, place: str, *, rank: int, size: int, deadline: float, launched: bool) -> None:
        """``launched``: torchrun or `farcall run` started this process, and starts the others."""
        self._place = place
        self._rank = rank
        self._deadline = deadline
        self._advice = f"Are all workers started? {_advice(size, launched, os.environ)}"
        self._size = size
        self._speak_at: float | None = time.monotonic() + SPEAK_AFTER_S

    def look(self, absent: Callable[[], Sequence[int]]) -> None:
        """Called repeatedly while waiting: once SPEAK_AFTER_S have passed, log the ranks that ``absent`` returns."""
        if self._speak_at is None or time.monotonic() < self._speak_at:
            return
        self._speak_at = None
        named = ", ".join(f"rank {rank}" for rank in absent()) or "others"
        left_s = self._deadline - time.monotonic()
        logger.warning(
            "rank %d of %d waits at %s for %s, %.0f s more. %s",
            *(self._rank, self._size, self._place, named, max(0.0, left_s), self._advice),
        )
