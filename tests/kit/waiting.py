"""Waiting for a condition, never for a time: what tests do instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

PATIENCE_S = 120.0
"""Long enough for any machine: only a test that fails waits so long."""


def wait_until(condition: Callable[[], object], what: str = "the condition", timeout_s: float = PATIENCE_S) -> None:
    """Return as soon as ``condition()`` is true; fail, naming ``what``, if it never is."""
    give_up_at = monotonic() + timeout_s
    while not condition():
        assert monotonic() < give_up_at, f"{what} did not come true"
        sleep(0.002)
