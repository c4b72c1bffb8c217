"""Processes that stand still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.kit.waiting import wait_until


def stop(process_id: int) -> None:
    """Stop a process, and return when each of its threads stands still: on a busy machine one may run on for a moment.

    ``os.kill(process_id, signal.SIGCONT)`` lets it go on.
    """
    os.kill(process_id, signal.SIGSTOP)
    tasks = Path(f"/proc/{process_id}/task")

    def all_stand_still() -> bool:
        try:
            return all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in tasks.glob("*/stat"))
        except OSError:
            return False  # a thread ended while we looked

    wait_until(all_stand_still, f"process {process_id} stands still")
