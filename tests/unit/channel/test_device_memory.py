"""The pool of device memory and its receiver, with a device that only keeps a record of what it was asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kit.fake_device import FakeApi

from farcall.channel.device_memory import IDLE_S, LARGE_BYTES, REST_S, DevicePool, DeviceSegments, DeviceTicket
from farcall.errors import SerializationError

MEBIBYTE = 1 << 20


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def pool(api: FakeApi) -> Iterator[DevicePool]:
    pool = DevicePool(api, 256 * MEBIBYTE)
    yield pool
    pool.close()


def send(pool: DevicePool, data: bytes, peer: str = "b") -> DeviceTicket:
    ticket = pool.lend(0, torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data), peer)
    assert ticket is not None
    return ticket


def is_full(pool: DevicePool, size: int) -> bool:
    return pool.lend(0, torch.empty(size, dtype=torch.uint8), size, "b") is None


def copied_out(segments: DeviceSegments, ticket: DeviceTicket) -> bytes:
    copy = torch.empty(ticket.size, dtype=torch.uint8)
    segments.copy_out(ticket, copy)
    return bytes(copy.tolist())


def place(ticket: DeviceTicket) -> tuple[int, int]:
    return ticket.segment_id, ticket.offset


def test_what_is_lent_arrives_and_each_side_waits_for_the_other(api: FakeApi, pool: DevicePool) -> None:
    segments = DeviceSegments(api)
    segments.devices[0] = 0
    ticket = send(pool, b"hello")
    event = int(ticket.event_handle)
    assert copied_out(segments, ticket) == b"hello"
    # The writer waits for the reader before it; the reader for the writer.
    assert api.log == [("wait", event), ("record", event), ("wait", event), ("record", event)]
    assert pool.release([place(ticket)], "b") == 0
    again = send(pool, b"world")
    assert place(again) == place(ticket)
    assert api.log[4:] == [("wait", event), ("record", event)]
    assert copied_out(segments, again) == b"world"
    assert (api.opened, api.exports, api.events) == (1, 1, 1), "a segment and its event are opened once"


def test_a_block_is_not_used_again_before_it_is_released(pool: DevicePool) -> None:
    tickets = [send(pool, bytes([number]) * 1000) for number in range(50)]
    assert len({place(ticket) for ticket in tickets}) == 50
    assert pool.stats().lent == 50 * 1024
    pool.release(map(place, tickets), "b")
    assert pool.stats().lent == 0
    assert pool.stats().idle == 50 * 1024


def test_each_peer_gets_an_export_of_its_own(api: FakeApi, pool: DevicePool) -> None:
    first, second = send(pool, b"x", "b"), send(pool, b"x", "c")
    assert first.segment_id == second.segment_id
    assert first.export != second.export
    assert send(pool, b"x", "b").export == first.export


def test_releases_of_others_and_second_ones_change_nothing(pool: DevicePool) -> None:
    ticket = send(pool, b"x")
    assert pool.release([place(ticket)], "c") == 1
    assert pool.release([place(ticket), place(ticket)], "b") == 1
    assert pool.stats().lent == 0


def test_the_limit_is_kept_and_idle_segments_make_room(api: FakeApi) -> None:
    pool = DevicePool(api, 64 * MEBIBYTE)
    small = send(pool, b"x")
    assert is_full(pool, LARGE_BYTES + 1)
    pool.release([place(small)], "b")
    assert not is_full(pool, LARGE_BYTES + 1)
    assert pool.stats().total <= 64 * MEBIBYTE
    assert pool.trim(0.0) == [(small.segment_id, ["b"])], "who has opened the segment that went is to be told"


def test_no_memory_is_no_error() -> None:
    assert is_full(DevicePool(FakeApi(free_bytes=MEBIBYTE), 256 * MEBIBYTE), 1)


def test_a_large_block_is_used_again_for_a_little_less(pool: DevicePool) -> None:
    ticket = send(pool, bytes(40 * MEBIBYTE))
    pool.release([place(ticket)], "b")
    assert place(send(pool, bytes(35 * MEBIBYTE))) == place(ticket)
    assert place(send(pool, bytes(35 * MEBIBYTE))) != place(ticket)


@pytest.mark.parametrize("failing", ["fill", "export"])
def test_what_could_not_be_copied_or_shared_is_free(
    api: FakeApi, pool: DevicePool, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(api, failing, fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            send(pool, b"hello")
    assert pool.stats().lent == 0
    send(pool, b"hello")
    assert pool.stats().idle == 0, "it is the same block"


def test_what_a_dead_peer_held_rests_and_then_gets_a_new_event(api: FakeApi, pool: DevicePool) -> None:
    ticket = send(pool, b"x")
    pool.release_all("b", 100.0)
    assert pool.stats().lent == 0
    assert place(send(pool, b"y", "c")) != place(ticket)
    pool.trim(100.0 + REST_S - 1)
    assert place(send(pool, b"y", "c")) != place(ticket)
    pool.trim(100.0 + REST_S)
    again = send(pool, b"z", "c")
    assert place(again) == place(ticket)
    assert again.event_handle != ticket.event_handle


def test_segments_that_nobody_uses_go(pool: DevicePool) -> None:
    ticket = send(pool, b"x")
    pool.trim(0.0)
    pool.trim(2 * IDLE_S)
    assert pool.stats().total, "it is in use"
    pool.release([place(ticket)], "b")
    assert pool.trim(3 * IDLE_S) == []
    assert pool.trim(4 * IDLE_S) == [(ticket.segment_id, ["b"])]
    assert pool.stats() == (0, 0, 0)


def test_a_retired_segment_is_opened_anew(api: FakeApi, pool: DevicePool) -> None:
    segments = DeviceSegments(api)
    segments.devices[0] = 0
    ticket = send(pool, b"x")
    copied_out(segments, ticket)
    segments.retire(ticket.segment_id)
    copied_out(segments, ticket)
    assert api.opened == 2


@pytest.mark.parametrize("offset", [-1, 60 * MEBIBYTE])
def test_memory_beyond_a_segment_is_not_touched(api: FakeApi, pool: DevicePool, offset: int) -> None:
    segments = DeviceSegments(api)
    segments.devices[0] = 0
    ticket = send(pool, bytes(5 * MEBIBYTE))._replace(offset=offset)
    with pytest.raises(SerializationError, match="does not have"):
        segments.copy_out(ticket, torch.empty(ticket.size, dtype=torch.uint8))
    with pytest.raises(SerializationError, match="does not have"):
        segments.opened(ticket)
