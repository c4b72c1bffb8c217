"""What goes to a peer in shared memory: which block it gets, and what becomes of one whose message is not sent."""

from __future__ import annotations

import os

import pytest

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import segments_work
from farcall.channel.shared_memory import SegmentPool
from farcall.protocol.frames import YOURS, Ticket
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.shared_memory import SHARED_BYTES, SharedMemorySender

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files on this system")


def test_a_block_that_the_peer_is_owed_carries_the_answer_and_is_owed_again_if_that_is_not_sent() -> None:
    theirs, ours, borrowed = SegmentPool(1 << 26), SegmentPool(1 << 26), SegmentMap()
    block = theirs.allocate(SHARED_BYTES, "us")
    assert block is not None
    offer = theirs.offer(block.segment_id, "us")
    assert offer is not None
    borrowed.attach(offer.segment_id, os.dup(offer.descriptor), offer.size)
    borrowed.view(block.segment_id, block.offset, SHARED_BYTES)  # the argument, which has died
    sender = SharedMemorySender(None, ours, borrowed, lambda write: write())  # type: ignore[arg-type]
    placed: list[memoryview | Ticket] = []
    answer = memoryview(bytearray(b"\x07" * SHARED_BYTES))
    assert sender.place([answer, answer[:8]], placed, NEVER, may_give_back=True) == SHARED_BYTES
    assert placed == [Ticket(SHARED_BYTES, block.segment_id | YOURS, block.offset), answer[:8]]
    assert block.view == answer
    assert borrowed.take_releases() == []
    sender.take_back(placed)
    assert borrowed.take_releases() == [(block.segment_id, block.offset)]
    assert ours.total_bytes == 0
    theirs.close()
    ours.close()
