"""Calls whose time is over when a test says so."""

from __future__ import annotations

from typing import Any

import farcall
from farcall.runtime.node import runtime_of


def let_time_run_out(node: farcall.Node, future: farcall.Future[Any]) -> None:
    """Turn the clock of ``node``'s calls to the deadline of ``future``: it fails, as do those with an earlier one."""
    runtime = runtime_of(node)
    runtime.call_soon(lambda: runtime.calls.fail_overdue(future.deadline))
