"""Tensors bound for devices, without a device: the table beside the pickle, and the tickets in it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kit.values import decode, encode, encode_call

from farcall.errors import Delivery, NetworkError, SerializationError
from farcall.protocol.frames import REQUEST, Frame
from farcall.serialize import discard, has_devices, map_cpu_tensors, withdraw
from farcall.serialize.context import IfUnsent
from farcall.serialize.devices import DEVICES_FORM, Form, read_device_table
from farcall.serialize.policy import REDUCERS

CUDA = torch.device("cuda", 0)


class FakePeer:
    """A peer with a device that is CPU memory, as far as anybody can see."""

    def __init__(self, maps_calls: bool = True, maps_answers: bool = True) -> None:
        self.devices = self
        self.maps = {True: maps_calls, False: maps_answers}
        self.uploaded: list[int] = []
        self.dropped: list[Any] = []
        self.taken: list[Any] = []
        self.copies = False

    def target(self, device: torch.device, is_request: bool) -> torch.device | None:
        return CUDA if self.maps[is_request] else None

    def to_device(self, source: memoryview, target: torch.device) -> torch.Tensor:
        self.uploaded.append(source.nbytes)
        return torch.frombuffer(bytearray(source), dtype=torch.uint8)

    def take(self, ticket: Any, target: torch.device, form: Form | None = None) -> torch.Tensor:
        self.taken.append(ticket)
        bytes_ = torch.arange(ticket[1], dtype=torch.uint8)
        return bytes_ if form is None or not self.copies else bytes_.view(form[1]).view(form[0])

    def drop(self, ticket: Any) -> None:
        self.dropped.append(ticket)


@pytest.fixture
def mapped() -> Iterator[FakePeer]:
    before = dict(REDUCERS)
    map_cpu_tensors()
    yield FakePeer()
    REDUCERS.update(before)


def round_trip(value: Any, peer: FakePeer) -> Any:
    payload, buffers = encode_call(value, peer)
    return decode(payload, buffers, peer)


@pytest.mark.parametrize("size", [5, 3000, 100_000])
def test_cpu_tensors_go_by_the_map(mapped: FakePeer, size: int) -> None:
    x = torch.arange(size, dtype=torch.float32)
    assert torch.equal(round_trip([x, "y"], mapped)[0], x)
    assert mapped.uploaded == [4 * size]


def test_views_stay_views_and_are_uploaded_once(mapped: FakePeer) -> None:
    base = torch.arange(50_000, dtype=torch.float64).view(250, 200)
    first, second, third = round_trip((base[:100], base[50:60].t(), base[100, 3:9]), mapped)
    assert torch.equal(first, base[:100])
    assert torch.equal(second, base[50:60].t())
    assert torch.equal(third, base[100, 3:9])
    first.zero_()
    assert not second.any()
    assert len(mapped.uploaded) == 1


def test_what_is_far_apart_is_sent_apart(mapped: FakePeer) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    column, row = round_trip((base[:990, 7], base[995]), mapped)
    assert torch.equal(column, base[:990, 7])
    assert torch.equal(row, base[995])
    assert sum(mapped.uploaded) < 100_000


def test_special_ones(mapped: FakePeer) -> None:
    values = [
        torch.tensor(2.5),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.ones(3, 1).expand(3, 400),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.arange(9).to(torch.bfloat16),
    ]
    for value, back in zip(values, round_trip(values, mapped), strict=True):
        assert torch.equal(value, back)
        assert (type(back), back.dtype, back.requires_grad) == (type(value), value.dtype, value.requires_grad)


def test_calls_and_answers_have_maps_of_their_own(mapped: FakePeer) -> None:
    mapped.maps = {True: True, False: False}
    assert has_devices(encode_call(torch.ones(3), mapped)[0])
    assert not has_devices(encode(torch.ones(3), mapped)[0])


def test_beside_other_buffers(mapped: FakePeer) -> None:
    mapped.maps = {True: True, False: True}
    data = pickle.PickleBuffer(bytearray(b"z" * 10_000))
    x, y = torch.arange(20_000), torch.arange(30_000)
    back = round_trip({"x": x, "data": data, "y": y}, mapped)
    assert torch.equal(back["x"], x)
    assert torch.equal(back["y"], y)
    assert bytes(back["data"]) == b"z" * 10_000


def message(ticket: Any, value: Any = None, compact: bool = False) -> bytes:
    """A message with tensors of one storage, lent by ``ticket``; by default one of 100 bytes."""
    peer = FakePeer()
    map_cpu_tensors()
    payload, _ = encode_call(torch.arange(100, dtype=torch.uint8) if value is None else value, peer)
    table, rest = read_device_table(payload)
    (target, ((low, _, _, _),)) = table[0]
    written = pickle.dumps([(target, [(low, compact, 0, ticket)])], 5)
    return bytes(rest) + written + len(written).to_bytes(4, "little") + bytes([DEVICES_FORM])


def test_a_ticket_is_taken_once(mapped: FakePeer) -> None:
    back = decode(message(("t", 100)), (), mapped)
    assert torch.equal(back, torch.arange(100, dtype=torch.uint8))
    assert mapped.taken == [("t", 100)]
    assert mapped.dropped == []


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("shape", [(100,), (5, 20), (25, 1, 4), (1, 100)])
def test_what_is_all_of_its_part_comes_as_a_tensor_or_as_bytes(
    mapped: FakePeer, copies: bool, shape: tuple[int, ...]
) -> None:
    mapped.copies = copies
    value = torch.arange(100, dtype=torch.uint8).view(torch.int32).view(-1)
    shape = (*shape[:-1], shape[-1] // 4)
    first, second = decode(message(("t", 100), [value.view(shape), value.view(shape)], compact=True), (), mapped)
    assert torch.equal(first, value.view(shape))
    assert first.stride() == value.view(shape).stride()
    assert second is not first
    assert second.data_ptr() == first.data_ptr()
    assert mapped.taken == [("t", 100)]


def test_a_message_that_nobody_reads_gives_its_tickets_back(mapped: FakePeer) -> None:
    discard(message(("t", 100)), mapped)
    assert mapped.dropped == [("t", 100)]
    discard(encode([1, 2])[0], mapped)
    discard(b"", mapped)


def test_a_message_that_cannot_be_read_gives_its_tickets_back(mapped: FakePeer) -> None:
    good = message(("t", 100))
    table = good[good.rindex(b"\x80\x05") :]
    with pytest.raises(SerializationError):
        decode(b"\x80\x05\xff.T" + table, (), mapped)
    assert mapped.dropped == [("t", 100)]
    assert mapped.taken == []


@pytest.mark.parametrize(
    ("left", "delivery", "taken_back"),
    [(False, Delivery.UNKNOWN, 1), (True, Delivery.NOT_SENT, 1), (True, Delivery.UNKNOWN, 0)],
)
def test_what_was_lent_is_taken_back_only_if_the_message_cannot_have_arrived(
    left: bool, delivery: Delivery, taken_back: int
) -> None:
    log: list[str] = []
    frame = Frame(REQUEST, undo=[IfUnsent(lambda: log.append("lent")), lambda: log.append("noted")], handed_over=left)
    try:
        raise NetworkError("gone", delivery)
    except NetworkError:
        withdraw(frame)
    assert log == ["lent"] * taken_back + ["noted"]
