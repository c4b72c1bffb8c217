"""What goes to a peer in shared memory: which block it gets, and what becomes of one whose message is not sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


class FakePeer:
    """A peer to whom the I/O thread sends; keeps the name of the file behind each descriptor that it is sent."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.info = SimpleNamespace(name="peer")
        outgoing = SimpleNamespace(queue=SimpleNamespace(down=False), send_with_descriptor=self.send_with_descriptor)
        self.transport = SimpleNamespace(carries_descriptors=True)
        self.refuses = False
        self.link = SimpleNamespace(on_io_thread=lambda: True, broken=None, outgoing=outgoing, transport=self.transport)

    def send_with_descriptor(self, data: bytes, descriptor: int, *_: object) -> bool:
        self.offered.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return not self.refuses

    def control(self, message: Any) -> None:
        pass


def test_a_segment_whose_offer_a_worker_is_to_send_is_not_given_up_before() -> None:
    pool = SegmentPool(4 << 20, segment_bytes=2 << 20)
    peer, later = FakePeer(), list[Callable[[], None]]()
    sender = SharedMemorySender(peer, pool, SegmentMap(), later.append)  # type: ignore[arg-type]
    placed: list[memoryview | Ticket] = []
    sender.place([memoryview(bytearray(SHARED_BYTES))], placed, NEVER, may_give_back=False)
    [send] = later
    meanwhile = pool.allocate(4 << 20)  # there would be room for it without the segment that is being offered
    send()
    assert [file.split()[0] for file in peer.offered] == ["/memfd:farcall-1"]
    assert meanwhile is None
    assert pool.allocate(4 << 20) is not None
    assert pool.offer(1, sender) is None  # it is gone, as it is where the peer was lost meanwhile
    pool.close()


def test_over_a_link_without_descriptors_buffers_go_inline_until_it_carries_some_again() -> None:
    pool, peer = SegmentPool(4 << 20), FakePeer()
    sender = SharedMemorySender(peer, pool, SegmentMap(), lambda write: write())  # type: ignore[arg-type]
    buffer = memoryview(bytearray(SHARED_BYTES))

    def place() -> memoryview | Ticket:
        placed: list[memoryview | Ticket] = []
        sender.place([buffer], placed, NEVER, may_give_back=False)
        return placed[0]

    peer.transport.carries_descriptors = False
    assert place() is buffer
    assert peer.offered == []
    peer.transport.carries_descriptors = peer.refuses = True  # it came back in between
    assert place() is buffer
    peer.refuses = False
    assert place() is buffer
    assert len(peer.offered) == 2
    sender.on_accepted(1)
    peer.transport.carries_descriptors = False
    assert isinstance(place(), Ticket)  # the peer has this segment, whatever the link carries
    pool.close()
