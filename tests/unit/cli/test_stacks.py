"""``farcall stacks``: the verdict at the end, from made-up snapshots."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from farcall.cli import stacks
from farcall.observe.observer import Answers
from farcall.observe.snapshot import QUEUED, RUNNING, PoolView, ServedCall, WorkerSnapshot


class Observed:
    """An observer of one worker, with these calls."""

    def __init__(self, *served: ServedCall) -> None:
        pool = PoolView(size=16, threads=1, busy=1, parked=0, queued=0)
        self._snapshot = WorkerSnapshot("w1", 1, 7, "host", "running", pool, [], list(served), [])

    def snapshots(self) -> Answers[WorkerSnapshot]:
        return Answers("c", [self._snapshot], [])


def shown(*served: ServedCall) -> tuple[bool, str]:
    text = io.StringIO()
    observer: Any = Observed(*served)
    return stacks.show(Console(file=text, width=200), observer, 0.0, False), text.getvalue()


@pytest.mark.parametrize(("waited_s", "is_named"), [(0.1, False), (4.0, True)])
def test_a_call_that_waits_long_for_its_turn_is_named(waited_s: float, is_named: bool) -> None:
    holder = ServedCall(1, "w0", "consume", RUNNING, 5.0, 3)
    is_stuck, text = shown(holder, ServedCall(2, "w2", "act", QUEUED, waited_s, 0, holder, waiting=1))
    assert not is_stuck  # it may be a long computation
    assert "serves act() for w2: queued for " in text
    assert ", behind consume()" in text
    named = "w1: 1 call waits for consume() for w0, which has had its serial object for 5.0 s"
    assert (named in text, "Nothing seems stuck." in text) == (is_named, not is_named)
