"""A word to whoever waits for workers that do not come: who is missing, once, long before the wait ends in an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

logger: logging.Logger = logging.getLogger("farcall")

SPEAK_AFTER_S = 5.0


class Patience:
    """One wait for others, of rank ``rank`` of ``size``, until ``deadline``."""

    def __init__(self, place: str, *, rank: int, size: int, deadline: float) -> None:
        self._place = place
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._speak_at: float | None = time.monotonic() + SPEAK_AFTER_S

    def look(self, absent: Callable[[], Sequence[int]]) -> None:
        """Still waiting: if it is time, say for which ranks."""
        if self._speak_at is None or time.monotonic() < self._speak_at:
            return
        self._speak_at = None
        named = ", ".join(f"rank {rank}" for rank in absent()) or "others"
        left_s = self._deadline - time.monotonic()
        logger.warning(
            "rank %d of %d waits at %s for %s, %.0f s more. Are all workers started? On one machine, "
            "`farcall run --workers %d PROGRAM` starts them",
            *(self._rank, self._size, self._place, named, max(0.0, left_s), max(1, self._size)),
        )
