"""The threads that wait to send: one that gives up leaves nothing behind."""

from __future__ import annotations

import pytest

from farcall.runtime.io.loop import Loop
from farcall.runtime.link.send_queue import SendQueue


def test_a_wait_that_ends_leaves_no_gate_behind_however_it_ends() -> None:
    queue = SendQueue("peer", Loop("never started"), 10)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    for _ in range(3):
        queue.wait_while(lambda: True, deadline=0.0)
        queue.wait_while(lambda: False, deadline=0.0)
        with pytest.raises(KeyboardInterrupt):
            queue.wait_while(interrupt, deadline=0.0)
    assert not queue._waiting
