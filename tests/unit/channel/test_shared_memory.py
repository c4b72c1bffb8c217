"""The pool of shared blocks, and the map on the other side, both in this process."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from farcall.channel.host_memory import ALIGNMENT_BYTES, copy_bytes
from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import PAGE_BYTES, Block, SegmentRefused, host_token, segments_work
from farcall.channel.shared_memory import SegmentPool

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files here")

MEBIBYTE = 1 << 20


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(limit_bytes=64 * MEBIBYTE, segment_bytes=8 * MEBIBYTE)
    yield pool
    pool.close()


def allocated(pool: SegmentPool, size: int, peer: str | None = None) -> Block:
    block = pool.allocate(size, peer)
    assert block is not None
    return block


def free(pool: SegmentPool, block: Block) -> None:
    """Free a block that this process holds and has not handed over."""
    with pool._lock:
        pool._drop(block)


def shown_to(pool: SegmentPool, segment_map: SegmentMap, segment_id: int, peer: str = "peer") -> None:
    offer = pool.offer(segment_id, peer)
    assert offer is not None
    segment_map.attach(offer.segment_id, os.dup(offer.descriptor), offer.size)


def test_filling_a_fresh_block_touches_its_pages_once_and_its_neighbours_never(pool: SegmentPool) -> None:
    size = 2 * MEBIBYTE + 64  # so the blocks share a page
    before, block, behind = (allocated(pool, size) for _ in range(3))
    for other in (before, behind):
        other.fill(memoryview(b"o" * size))
    numbers, later = torch.arange(size // 4, dtype=torch.int32), memoryview(b"b" * size)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block.fill(memoryview(numbers.numpy()))
    assert block.view == memoryview(numbers.numpy()).cast("B")
    block.fill(later)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 1.5 * size / PAGE_BYTES
    assert (before.view, block.view, behind.view) == (b"o" * size, b"b" * size, b"o" * size)


def test_bytes_cross(pool: SegmentPool) -> None:
    block = allocated(pool, 1000, "peer")
    copy_bytes(block.view, memoryview(b"x" * 1000))
    segment_map = SegmentMap()
    shown_to(pool, segment_map, block.segment_id)
    assert pool.offer(block.segment_id, "peer") is None
    tensor = torch.frombuffer(segment_map.view(block.segment_id, block.offset, block.size), dtype=torch.uint8)
    assert bytes(tensor.tolist()) == b"x" * 1000
    assert segment_map.take_releases() == []
    del tensor
    assert segment_map.owed_bytes == block.size
    released = segment_map.take_releases()
    assert released == [(block.segment_id, block.offset)]
    assert segment_map.owed_bytes == 0
    assert pool.live_bytes > 0
    pool.release_batch(released, "peer")
    assert pool.live_bytes == 0


def test_freed_memory_is_used_first(pool: SegmentPool) -> None:
    first, second = allocated(pool, MEBIBYTE), allocated(pool, MEBIBYTE)
    free(pool, first)
    free(pool, second)
    assert allocated(pool, MEBIBYTE).offset == second.offset
    assert allocated(pool, MEBIBYTE).offset == first.offset


def test_freed_neighbours_are_joined_before_fresh_pages_are_touched(pool: SegmentPool) -> None:
    blocks = [allocated(pool, MEBIBYTE) for _ in range(4)]
    for block in blocks:
        free(pool, block)
    large = allocated(pool, 4 * MEBIBYTE)
    assert large.offset == min(block.offset for block in blocks)
    assert pool.total_bytes == 8 * MEBIBYTE


def test_the_limit_holds(pool: SegmentPool) -> None:
    assert pool.allocate(65 * MEBIBYTE) is None
    blocks = []
    while (block := pool.allocate(3 * MEBIBYTE)) is not None:
        blocks.append(block)
    assert pool.total_bytes <= 64 * MEBIBYTE
    assert len(blocks) >= 16
    free(pool, blocks.pop())
    assert pool.allocate(3 * MEBIBYTE) is not None


def test_larger_than_a_segment(pool: SegmentPool) -> None:
    assert allocated(pool, 20 * MEBIBYTE).size == 20 * MEBIBYTE


def test_wrong_releases_change_nothing(pool: SegmentPool, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = allocated(pool, 1000), allocated(pool, 1000, "peer")
    before = pool.live_bytes
    with caplog.at_level(logging.WARNING):
        pool.release(mine.segment_id, mine.offset, "peer")
        pool.release(theirs.segment_id, theirs.offset, "someone else")
        pool.release(theirs.segment_id, theirs.offset + 1, "peer")
        pool.release(99, -5, "peer")
    assert pool.live_bytes == before
    assert len(caplog.records) == 1
    pool.release(theirs.segment_id, theirs.offset, "peer")
    after = pool.live_bytes
    pool.release(theirs.segment_id, theirs.offset, "peer")
    assert pool.live_bytes == after < before
    assert allocated(pool, 1000).offset == theirs.offset
    assert allocated(pool, 1000).offset not in (theirs.offset, mine.offset)


def test_a_dead_peer_gives_back_everything(pool: SegmentPool) -> None:
    for _ in range(5):
        allocated(pool, MEBIBYTE, "dying")
    kept = allocated(pool, MEBIBYTE, "living")
    assert pool.offer(kept.segment_id, "dying") is not None
    pool.release_all("dying")
    assert pool.live_bytes == MEBIBYTE
    assert pool.offer(kept.segment_id, "dying") is not None


def test_idle_segments_are_retired(pool: SegmentPool) -> None:
    small = allocated(pool, 1000)
    large = allocated(pool, 20 * MEBIBYTE)
    assert pool.offer(large.segment_id, "peer") is not None
    free(pool, large)
    assert pool.trim(now=0.0, idle_s=10.0, keep_bytes=0) == []
    assert pool.trim(now=9.0, idle_s=10.0, keep_bytes=0) == []
    assert pool.trim(now=11.0, idle_s=10.0, keep_bytes=0) == [(large.segment_id, ["peer"])]
    assert pool.total_bytes == 8 * MEBIBYTE
    free(pool, small)
    pool.trim(now=20.0, keep_bytes=8 * MEBIBYTE)
    assert pool.trim(now=40.0, keep_bytes=8 * MEBIBYTE) == []
    again = allocated(pool, 20 * MEBIBYTE)
    assert again.segment_id not in (small.segment_id, large.segment_id)


def test_small_free_segments_make_room_for_a_large_one(pool: SegmentPool) -> None:
    blocks = [allocated(pool, 8 * MEBIBYTE) for _ in range(8)]
    assert pool.offer(blocks[0].segment_id, "peer") is not None
    for block in blocks:
        free(pool, block)
    assert allocated(pool, 40 * MEBIBYTE).size == 40 * MEBIBYTE
    assert (blocks[0].segment_id, ["peer"]) in pool.trim(now=0.0)
    assert pool.trim(now=0.0) == []


def test_a_tensor_made_in_a_segment(pool: SegmentPool) -> None:
    tensor = pool.empty((10, 20), torch.float64)
    assert tensor.shape == (10, 20)
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    found = pool.find(tensor.data_ptr(), 1600)
    part = pool.find(tensor[3].data_ptr(), 160)
    assert found is not None
    assert part == (found[0], found[1] + 3 * 160)
    assert pool.find(tensor.data_ptr(), 1601) is None
    assert pool.find(tensor.data_ptr() - 8, 8) is None
    assert pool.find(torch.ones(10).data_ptr(), 40) is None

    segment_map = SegmentMap()
    shown_to(pool, segment_map, found[0])
    assert pool.lend(*part, "peer")
    assert pool.lend(*part, "peer")
    theirs = [segment_map.view(*part, 160) for _ in range(2)]
    tensor[3, 0] = 42.0
    assert torch.frombuffer(theirs[0], dtype=torch.float64)[0] == 42.0
    del tensor
    assert pool.live_bytes > 0
    theirs.clear()
    assert pool.live_bytes > 0
    released = segment_map.take_releases()
    assert released == [part, part]
    pool.release_batch(released, "peer")
    assert pool.live_bytes == 0
    assert not pool.lend(*part, "peer")


def test_a_tensor_when_there_is_no_room(pool: SegmentPool) -> None:
    tensor = pool.empty((65, MEBIBYTE), torch.uint8)
    assert pool.find(tensor.data_ptr(), 1) is None
    assert pool.empty((0, 5)).shape == (0, 5)


def test_views_outlive_the_map_and_the_pool() -> None:
    pool, segment_map = SegmentPool(8 * MEBIBYTE), SegmentMap()
    block = allocated(pool, MEBIBYTE)
    shown_to(pool, segment_map, block.segment_id)
    copy_bytes(block.view, memoryview(b"a" * MEBIBYTE))
    tensor = torch.frombuffer(segment_map.view(block.segment_id, 0, MEBIBYTE), dtype=torch.uint8)
    ours = pool.empty((10,))
    ours.fill_(2.0)
    segment_map.close()
    pool.close()
    assert pool.allocate(10) is None
    del block
    gc.collect()
    assert int(tensor.sum()) == ord("a") * MEBIBYTE
    assert ours.tolist() == [2.0] * 10
    del tensor, ours
    assert segment_map.take_releases() == []


def test_nothing_is_left_behind() -> None:
    def descriptors() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of this very listing
                found += "memfd:farcall" in os.readlink(f"/proc/self/fd/{name}")
        return found

    def mappings() -> int:
        with open("/proc/self/maps", encoding="utf-8") as file:
            return sum("memfd:farcall" in line for line in file)

    gc.collect()
    before = descriptors(), mappings()
    pool, segment_map = SegmentPool(8 * MEBIBYTE), SegmentMap()
    block = allocated(pool, MEBIBYTE)
    shown_to(pool, segment_map, block.segment_id)
    view = segment_map.view(block.segment_id, 0, 100)
    assert mappings() == before[1] + 2
    segment_map.close()
    pool.close()
    del view, block
    gc.collect()
    assert (descriptors(), mappings()) == before


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, -1), (-64, 64), (0, 8 * MEBIBYTE + 1), (1 << 62, 1 << 62)])
def test_tickets_that_lie(pool: SegmentPool, offset: int, size: int) -> None:
    segment_map = SegmentMap()
    block = allocated(pool, 1000)
    shown_to(pool, segment_map, block.segment_id)
    with pytest.raises(SegmentRefused):
        segment_map.view(block.segment_id, offset, size)
    with pytest.raises(SegmentRefused):
        segment_map.view(block.segment_id + 1, 0, 10)


def test_segments_that_lie(pool: SegmentPool) -> None:
    segment_map = SegmentMap()
    block = allocated(pool, 1000)
    offer = pool.offer(block.segment_id, "peer")
    assert offer is not None
    for size in (offer.size + 1, 0, -1, 1 << 70):
        with pytest.raises(SegmentRefused):
            segment_map.attach(1, os.dup(offer.descriptor), size)
    unsealed = os.memfd_create("could shrink")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(SegmentRefused):
        segment_map.attach(1, unsealed, 4096)
    with tempfile.TemporaryFile() as file, pytest.raises(SegmentRefused):
        segment_map.attach(1, os.dup(file.fileno()), 4096)
    segment_map.attach(1, os.dup(offer.descriptor), offer.size)
    with pytest.raises(SegmentRefused, match="twice"):
        segment_map.attach(1, os.dup(offer.descriptor), offer.size)
    with pytest.raises(OSError):  # and the segment cannot be cut short under us
        os.ftruncate(offer.descriptor, 4096)


def test_releases_are_announced_once_and_when_urgent(pool: SegmentPool) -> None:
    announced: list[bool] = []
    segment_map = SegmentMap(announced.append)
    block = allocated(pool, MEBIBYTE)
    shown_to(pool, segment_map, block.segment_id)

    def view_and_drop(size: int) -> None:
        segment_map.view(block.segment_id, block.offset, size)

    view_and_drop(100)
    view_and_drop(100)
    assert announced == [False]
    for _ in range(8):  # alone none of them is worth it
        view_and_drop(MEBIBYTE)
    assert announced == [False, True]
    assert segment_map.released
    assert len(segment_map.take_releases()) == 10
    assert not segment_map.released
    view_and_drop(100)
    assert announced == [False, True, False]


def test_ctrl_c_in_an_announcement_does_not_silence_all_others(pool: SegmentPool) -> None:
    announced: list[bool] = []

    def announce(urgent: bool) -> None:
        announced.append(urgent)
        if len(announced) == 1:
            raise KeyboardInterrupt

    segment_map = SegmentMap(announce)
    with pytest.raises(KeyboardInterrupt):
        segment_map.owe(1, 0, 100)
    segment_map.owe(1, 0, 100)
    segment_map.owe(1, 0, 100)
    assert announced == [False, False]


def test_a_retired_segment_is_forgotten(pool: SegmentPool) -> None:
    segment_map = SegmentMap()
    block = allocated(pool, 1000)
    shown_to(pool, segment_map, block.segment_id)
    segment_map.detach(block.segment_id)
    segment_map.detach(block.segment_id)
    with pytest.raises(SegmentRefused):
        segment_map.view(block.segment_id, 0, 10)


def test_no_more_descriptors_is_no_error(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no more")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert pool.allocate(1000) is None


def test_the_host_token_is_steady() -> None:
    assert host_token() == host_token() != ""


class Allocator(RuleBasedStateMachine):
    """Random use: live blocks never overlap, and everything freed can be had again."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(limit_bytes=4 * MEBIBYTE, segment_bytes=MEBIBYTE)
        self.live: dict[int, tuple[Block, int]] = {}
        self.lent: set[int] = set()
        self.now = 0.0

    @rule(
        target=blocks,
        size=strategies.integers(1, 700_000),
        stamp=strategies.integers(0, 255),
        peer=strategies.sampled_from([None, "peer"]),
    )
    def allocate(self, size: int, stamp: int, peer: str | None) -> int:
        block = self.pool.allocate(size, peer)
        if block is None:
            return 0
        assert len(block.view) == size
        block.view[0] = block.view[-1] = stamp
        self.live[id(block)] = (block, stamp)
        if peer is not None:
            self.lent.add(id(block))
        return id(block)

    @rule(key=consumes(blocks))
    def free(self, key: int) -> None:
        if key in self.live:
            block, _ = self.live.pop(key)
            if key in self.lent:
                self.lent.remove(key)
                self.pool.release(block.segment_id, block.offset, "peer")
            else:
                free(self.pool, block)

    @rule()
    def trim(self) -> None:
        self.now += 20.0
        self.pool.trim(self.now, idle_s=10.0, keep_bytes=0)

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        ends: dict[int, int] = {}
        for block, stamp in sorted(self.live.values(), key=lambda entry: (entry[0].segment_id, entry[0].offset)):
            assert block.offset >= ends.get(block.segment_id, 0)
            assert block.offset % ALIGNMENT_BYTES == 0
            assert block.view[0] == block.view[-1] == stamp
            ends[block.segment_id] = block.offset + block.capacity
        assert self.pool.total_bytes <= 4 * MEBIBYTE

    def teardown(self) -> None:
        for block, _ in self.live.values():
            free(self.pool, block)
        assert self.pool.live_bytes == 0
        assert self.pool.allocate(MEBIBYTE) is not None
        self.pool.close()


TestAllocator = Allocator.TestCase
