"""One warning to a user whose workers wait for others: which are missing, long before the wait ends in an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

logger: logging.Logger = logging.getLogger("farcall")

SPEAK_AFTER_S = 5.0


class MissingNotice:
    """The wait of rank ``rank`` of ``size`` for the others, until ``deadline``; warns once."""

    def __init__(self, place: str, *, rank: int, size: int, deadline: float, launched: bool) -> None:
        """``launched``: torchrun or `farcall run` started this process, and starts the others."""
        self._place = place
        self._rank = rank
        self._deadline = deadline
        if launched:
            self._advice = "Are all workers started? What started this one should have: see what it says of the others"
        else:
            run = f"`farcall run --workers {max(1, size)} PROGRAM` starts them"
            self._advice = f"Are all workers started? On one machine, {run}"
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
