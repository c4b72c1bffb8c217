"""What goes to a peer in shared memory: which block it gets, and what becomes of one whose message is not sent."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.waiting import wait_until

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import segments_work
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import RpcTimeout
from farcall.protocol.frames import YOURS, Ticket
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.shared_memory import SHARED_BYTES, WORTH_WAITING_BYTES, SharedMemorySender

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files on this system")


def test_a_block_that_the_peer_is_owed_carries_the_answer_and_is_owed_again_if_that_is_not_sent() -> None:
    theirs, ours, borrowed = SegmentPool(1 << 26), SegmentPool(1 << 26), SegmentMap()
    block = theirs.allocate(SHARED_BYTES, "us")
    assert block is not None
    offer = theirs.offer(block.segment_id, "us")
    assert offer is not None
    borrowed.attach(offer.segment_id, os.dup(offer.descriptor), offer.size)
    borrowed.view(block.segment_id, block.offset, SHARED_BYTES)  # the argument, which has died
    sender = SharedMemorySender(None, ours, borrowed)  # type: ignore[arg-type]
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
    """A peer to whom the I/O thread sends; keeps the name of the file behind each descriptor that it is sent.

    ``on_wait``: another thread sends, and this happens when it waits.
    """

    def __init__(self, on_wait: Callable[[], object] | None = None) -> None:
        self.offered: list[str] = []
        self.info = SimpleNamespace(name="peer")
        self.transport = SimpleNamespace(carries_descriptors=True)
        self.refuses = False
        self.on_wait = on_wait
        self.link: Any = SimpleNamespace(broken=None, up=True, post=self.post, transport=self.transport)
        self.link.on_io_thread = lambda: on_wait is None

    def post(self, data: bytes, *, descriptor: int) -> None:
        self.offered.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.refuses:
            raise RpcTimeout("this connection carries no descriptors")
        if self.on_wait is not None:
            threading.Thread(target=self.on_wait).start()

    def control(self, message: Any) -> None:
        pass


def test_over_a_link_without_descriptors_buffers_go_inline_until_it_carries_some_again() -> None:
    pool, peer = SegmentPool(4 << 20), FakePeer()
    sender = SharedMemorySender(peer, pool, SegmentMap())  # type: ignore[arg-type]
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


OnWait = Callable[[SharedMemorySender, FakePeer], object]
PASSED = 0.0


def first_large_message(on_wait: OnWait, deadline: float = NEVER) -> list[type]:
    """How two buffers travel for which there is no segment yet; ``on_wait`` is what happens when their sender waits."""
    pool = SegmentPool(4 << 20)
    placed: list[memoryview | Ticket] = []
    peer = FakePeer(lambda: (wait_until(lambda: sender._gates or len(placed) == 2), on_wait(sender, peer)))
    sender = SharedMemorySender(peer, pool, SegmentMap())  # type: ignore[arg-type]
    buffers = [memoryview(bytes([value]) * (WORTH_WAITING_BYTES // 2)) for value in (1, 2)]
    shared_bytes = sender.place(buffers, placed, deadline, may_give_back=False)
    assert len(peer.offered) == 1
    for each, buffer in zip(placed, buffers, strict=True):
        if isinstance(each, Ticket):
            view = pool._segments[1].view[each.offset :][: each.size_bytes]
            assert view == buffer
            shared_bytes -= each.size_bytes
        else:
            assert each is buffer
    assert shared_bytes == 0
    if peer.link.broken is not None:
        sender.close()
    sender.take_back(placed)
    assert pool.live_bytes == 0
    pool.close()
    return [type(each) for each in placed]


@pytest.mark.parametrize(
    ("on_wait", "kind"),
    [
        pytest.param(lambda sender, peer: sender.on_accepted(1), Ticket, id="accepted"),
        pytest.param(lambda sender, peer: sender.on_refused(1, "it has no room"), memoryview, id="refused"),
        pytest.param(lambda sender, peer: sender.on_refused(1, ""), memoryview, id="it came without a descriptor"),
        pytest.param(lambda sender, peer: setattr(peer.link, "broken", "gone"), memoryview, id="the link is closed"),
    ],
)
def test_a_large_message_fills_its_segment_while_the_offer_is_under_way(on_wait: OnWait, kind: type) -> None:
    assert first_large_message(on_wait) == [kind, kind]


def test_a_large_message_goes_inline_where_the_offer_is_not_answered_in_time() -> None:
    assert first_large_message(lambda sender, peer: None, PASSED) == [memoryview, memoryview]


def test_where_fresh_memory_is_not_to_be_had_a_large_message_goes_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", no_memory)
    assert first_large_message(lambda sender, peer: None) == [memoryview, memoryview]
