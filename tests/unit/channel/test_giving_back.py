"""A block that goes back to its owner: only its last use may take it along, whatever others do meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import SegmentRefused
from farcall.channel.shared_memory import SegmentPool

SIZE_BYTES = 1 << 20
Received = tuple[SegmentMap, list[memoryview]]


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    made = SegmentPool(1 << 28)
    yield made
    made.close()


@pytest.fixture
def received(pool: SegmentPool) -> tuple[SegmentMap, list[memoryview]]:
    """A map, and the only view of one block lent to it."""
    segments = SegmentMap()
    block = pool.allocate(SIZE_BYTES, "peer")
    assert block is not None
    offer = pool.offer(block.segment_id, "peer")
    assert offer is not None
    segments.attach(offer.segment_id, os.dup(offer.descriptor), offer.size)
    return segments, [segments.view(block.segment_id, block.offset, block.size)]


def test_the_last_use_goes_back_without_a_release(received: Received, pool: SegmentPool) -> None:
    segments, buffers = received
    buffers[0][:3] = b"abc"
    given = segments.give_back(buffers, 0)
    assert given is not None
    assert given.last_use
    given.gone()
    assert segments.take_releases() == []
    view = pool.take_back(given.segment_id, given.offset, SIZE_BYTES, "peer")
    assert bytes(view[:3]) == b"abc"
    assert pool.live_bytes >= SIZE_BYTES
    del view
    assert pool.live_bytes == 0


def test_what_others_use_is_released_only_after_the_copy(received: Received) -> None:
    segments, stored = received
    answer = [memoryview(stored[0])]
    given = segments.give_back(answer, 0)
    assert given is not None
    assert not given.last_use
    stored.clear()  # the other user lets go while the answer is still being copied
    assert segments.take_releases() == []
    given.settled()
    assert segments.take_releases() == [(given.segment_id, given.offset)]


def test_a_second_answer_with_the_same_block_copies_from_its_own_view(
    received: Received,
) -> None:
    segments, stored = received
    first, second = [memoryview(stored[0])], [memoryview(stored[0])]
    given = segments.give_back(first, 0)
    assert given is not None
    assert segments.give_back(second, 0) is None
    given.settled()
    stored.clear()
    assert segments.take_releases() == []  # the second one is still copying
    second.clear()
    assert len(segments.take_releases()) == 1


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, SIZE_BYTES // 2])
def test_a_block_that_is_owed_carries_the_next_message_to_its_owner(
    received: Received, pool: SegmentPool, size_bytes: int
) -> None:
    segments, buffers = received
    assert segments.reuse(size_bytes) is None  # it is in use
    buffers.clear()
    owed = segments.reuse(size_bytes)
    assert owed is not None
    segment_id, offset, view = owed
    assert len(view) == size_bytes
    view[:3] = b"abc"
    assert (segments.take_releases(), segments.owed_bytes, segments.reuse(size_bytes)) == ([], 0, None)
    message = pool.take_back(segment_id, offset, size_bytes, "peer")
    assert (bytes(message[:3]), len(message)) == (b"abc", size_bytes)
    del message
    assert pool.live_bytes == 0


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES + 1, SIZE_BYTES // 2 - 1])
def test_a_block_of_another_size_stays_owed(received: Received, size_bytes: int) -> None:
    segments, buffers = received
    buffers.clear()
    assert segments.reuse(size_bytes) is None
    assert len(segments.take_releases()) == 1


def test_releases_that_were_looked_at_while_others_were_taken_are_announced_again(pool: SegmentPool) -> None:
    announced: list[bool] = []
    segments = SegmentMap(announced.append)
    block = pool.allocate(SIZE_BYTES, "peer")
    assert block is not None
    offer = pool.offer(block.segment_id, "peer")
    assert offer is not None
    segments.attach(offer.segment_id, os.dup(offer.descriptor), offer.size)
    segments.view(block.segment_id, block.offset, SIZE_BYTES)
    assert announced == [False]

    class Meanwhile(deque[tuple[int, int, int]]):
        """Releases that another thread takes while one of them is looked at."""

        def pop(self) -> tuple[int, int, int]:  # type: ignore[override]
            looked_at = super().pop()
            assert segments.take_releases() == []
            return looked_at

    segments.released = Meanwhile(segments.released)
    assert segments.reuse(10) is None
    assert announced == [False, False]
    assert len(segments.take_releases()) == 1


def test_a_block_that_its_owner_uses_as_well_is_never_written_to(received: Received, pool: SegmentPool) -> None:
    segments, buffers = received
    tensor = pool.empty((SIZE_BYTES,), torch.uint8)
    found = pool.find(tensor.data_ptr(), SIZE_BYTES)
    assert found is not None
    assert pool.lend(*found, "peer")
    segments.view(*found, SIZE_BYTES, shared=True)  # and it has died
    assert segments.reuse(SIZE_BYTES) is None
    assert segments.take_releases() == [found]
    del buffers


def test_a_block_is_given_back_with_no_more_than_it_holds(received: Received, pool: SegmentPool) -> None:
    segments, buffers = received
    buffers.clear()
    [(segment_id, offset)] = segments.take_releases()
    for size_bytes in (SIZE_BYTES + 1, 0):
        with pytest.raises(SegmentRefused, match="does not hold"):
            pool.take_back(segment_id, offset, size_bytes, "peer")


def test_a_peer_cannot_give_back_what_it_does_not_hold(pool: SegmentPool) -> None:
    block = pool.allocate(SIZE_BYTES)
    assert block is not None
    with pytest.raises(SegmentRefused, match="does not hold"):
        pool.take_back(block.segment_id, block.offset, SIZE_BYTES, "peer")


class _Slow(dict[int, object]):
    """The first step of the thread that ends the last use is followed by the end of the copy on the other thread."""

    def __init__(self, settled: object) -> None:
        self.settled = [settled]

    def _then(self, found: object) -> object:
        for settled in [self.settled.pop()] if self.settled else []:
            settled()  # type: ignore[operator]
        return found

    def get(self, key: int, default: object = None) -> object:  # type: ignore[override]
        return self._then(super().get(key, default))

    def pop(self, key: int, default: object = None) -> object:  # type: ignore[override]
        return self._then(super().pop(key, default))


def test_the_last_use_that_ends_as_the_copy_does_is_released(received: Received) -> None:
    segments, stored = received
    answer = [memoryview(stored[0])]
    given = segments.give_back(answer, 0)
    assert given is not None
    slow = _Slow(given.settled)
    slow.update(segments._returning)
    segments._returning = slow  # type: ignore[assignment]
    stored.clear()
    assert segments.take_releases() == [(given.segment_id, given.offset)]
