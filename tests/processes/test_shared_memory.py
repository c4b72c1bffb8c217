"""Shared memory between two real processes: the whole way of a segment, its tickets and its releases."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess

import pytest
import torch
from tests.kit.transports import receive_exactly, send_all, wait_for_end

from farcall.channel.host_memory import copy_bytes
from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import segments_work
from farcall.channel.shared_memory import SegmentPool
from farcall.transport.interface import Transport, TransportBroken
from farcall.transport.unix import UnixListener, UnixTransport, dial_unix

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files here")

MEBIBYTE = 1 << 20
PATIENCE_S = 60.0
NUMBER_BYTES = 8


def send_numbers(transport: Transport, *numbers: int) -> None:
    send_all(transport, [b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in numbers)])


def receive_numbers(transport: Transport, count: int) -> list[int]:
    data = receive_exactly(transport, count * NUMBER_BYTES)
    return [int.from_bytes(data[start : start + NUMBER_BYTES], "little") for start in range(0, len(data), NUMBER_BYTES)]


def echo_sums(address: str) -> None:
    """Map the one segment offered, then for each ticket: sum up, multiply by 2 in place, release."""
    transport = dial_unix(address, PATIENCE_S)
    segment_map = SegmentMap()
    segment_id, size = receive_numbers(transport, 2)
    (descriptor,) = transport.take_descriptors()
    segment_map.attach(segment_id, descriptor, size)
    while True:
        offset, size = receive_numbers(transport, 2)
        if size == 0:
            break
        tensor = torch.frombuffer(segment_map.view(segment_id, offset, size), dtype=torch.int64)
        total = int(tensor.sum())
        tensor.mul_(2)
        del tensor
        ((released_id, released_offset),) = segment_map.take_releases()
        send_numbers(transport, total, released_id, released_offset)
    segment_map.close()
    transport.close()


def hold_for_ever(address: str) -> None:
    """Map the segment offered, say so, and never release anything."""
    transport = dial_unix(address, PATIENCE_S)
    segment_map = SegmentMap()
    segment_id, size, offset, length = receive_numbers(transport, 4)
    (descriptor,) = transport.take_descriptors()
    segment_map.attach(segment_id, descriptor, size)
    view = segment_map.view(segment_id, offset, length)
    send_numbers(transport, view[0])
    threading.Event().wait(PATIENCE_S)


def started(target: object, listener: UnixListener) -> tuple[BaseProcess, UnixTransport]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=(listener.address,))  # type: ignore[arg-type]
    process.start()
    accepted = None
    while accepted is None:
        assert process.is_alive(), "the other process ended before it dialled"
        accepted = listener.accept()
        process.join(0.01)
    assert isinstance(accepted, UnixTransport)
    return process, accepted


def test_a_segment_crosses_once_and_its_blocks_many_times() -> None:
    listener = UnixListener()
    process, transport = started(echo_sums, listener)
    pool = SegmentPool(limit_bytes=64 * MEBIBYTE)
    offsets = set()
    for value in range(1, 20):
        block = pool.allocate(4 * MEBIBYTE, "peer")
        assert block is not None
        source = torch.full((MEBIBYTE // 2,), value, dtype=torch.int64)
        copy_bytes(block.view, memoryview(source.numpy()))
        offer = pool.offer(block.segment_id, "peer")
        if offer is not None:
            assert value == 1
            header = offer.segment_id.to_bytes(8, "little") + offer.size.to_bytes(8, "little")
            assert transport.send([header], [offer.descriptor]) == 16
        view = block.view
        send_numbers(transport, block.offset, block.size)
        total, segment_id, offset = receive_numbers(transport, 3)
        assert total == value * MEBIBYTE // 2
        # Both look at the same pages.
        assert int(torch.frombuffer(view, dtype=torch.int64)[-1]) == 2 * value
        pool.release(segment_id, offset, "peer")
        assert pool.live_bytes == 0
        offsets.add(offset)
    assert len(offsets) == 1, "a warm block was there and was not used"
    send_numbers(transport, 0, 0)
    wait_for_end(transport)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    process.close()
    transport.close()
    listener.close()
    pool.close()


def test_a_killed_holder_costs_nothing() -> None:
    listener = UnixListener()
    process, transport = started(hold_for_ever, listener)
    pool = SegmentPool(limit_bytes=64 * MEBIBYTE)
    block = pool.allocate(MEBIBYTE, "peer")
    assert block is not None
    block.view[0] = 77
    offer = pool.offer(block.segment_id, "peer")
    assert offer is not None
    numbers = (offer.segment_id, offer.size, block.offset, block.size)
    header = b"".join(number.to_bytes(8, "little") for number in numbers)
    assert transport.send([header], [offer.descriptor]) == len(header)
    assert receive_numbers(transport, 1) == [77]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    try:
        wait_for_end(transport)
    except TransportBroken:
        pass  # it left something unread: a reset instead of an end
    process.join(PATIENCE_S)
    process.close()
    assert pool.live_bytes == MEBIBYTE
    pool.release_all("peer")
    assert pool.live_bytes == 0
    del block
    transport.close()
    listener.close()
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_no_block_and_reads_its_tensors() -> None:
    pool = SegmentPool(limit_bytes=64 * MEBIBYTE)
    tensor = pool.empty((10,), torch.int64)
    tensor.fill_(5)
    child = os.fork()
    if child == 0:
        # Only os._exit leaves without the parent's clean-up and pytest's.
        refused = pool.allocate(100) is None
        readable = tensor.tolist() == [5] * 10
        pool.close()
        os._exit(0 if refused and readable else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pool.allocate(100) is not None
    del tensor
    pool.close()
