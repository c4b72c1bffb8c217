"""Tensors bound for devices, without a device: the table beside the pickle, and the tickets in it."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.kit.values import decode, encode, encode_call

from farcall.errors import Delivery, NetworkError, SerializationError
from farcall.protocol.frames import REQUEST, Frame
from farcall.serialize import discard, has_devices, map_cpu_tensors, withdraw, write_call
from farcall.serialize.context import IfUnsent
from farcall.serialize.devices import DEVICES_FORM, Form, before_table, read_device_table
from farcall.serialize.flat import FLAT, Written
from farcall.serialize.pickler import takes_long
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


class Tagged(torch.Tensor):
    """A class of a program's own."""


class TaggedParameter(torch.nn.Parameter):
    """Another one."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Tagged, TaggedParameter])
def test_tensors_of_derived_classes_go_by_the_map_too(mapped: FakePeer, kind: type[torch.Tensor]) -> None:
    x = torch.ones(5).as_subclass(Tagged) if kind is Tagged else kind(torch.ones(5))
    back = round_trip([x], mapped)[0]
    assert type(back) is kind
    assert torch.equal(back, x)
    assert mapped.uploaded == [20]


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


# ---------------------------------------------------------------------- beside a flat payload

SHAPE = (5, 5)


class Lending(FakePeer):
    """A peer whose devices take every tensor; a large one by a ticket, of which there are only so many."""

    def __init__(self, tickets: int = 9) -> None:
        super().__init__()
        self.copies = True
        self.tickets = tickets
        self.withdrawn: list[Any] = []

    def place(
        self, source: torch.Tensor, size: int, target: torch.device, is_request: bool
    ) -> tuple[Any, ...] | bytearray:
        assert not source.requires_grad
        if size < 100:
            return bytearray(source.numpy().tobytes())
        self.tickets -= 1
        if self.tickets < 0:
            raise MemoryError("no more tickets")
        return "t", size

    def take_back(self, ticket: Any) -> None:
        self.withdrawn.append(ticket)


def flat_writer(count: int) -> Callable[..., Written]:
    """A stand-in for `write_flat` where CPU tensors count as tensors on a device: a tuple of ``count`` of them."""

    def write(value: Any, tensors: Any, limit: int, kind: Any, references: Any, on_devices: Any) -> Written:
        on_devices.extend(value)
        text = struct.pack("<cI", b"(", count)
        for tensor in value:
            dims = tensor.dim()
            text += struct.pack(f"<cBBB{dims}q", b"d", 0, tensor.requires_grad, dims, *tensor.shape)
        return text + struct.pack("<IB", len(text), FLAT), ()

    return write


def write_flatly(monkeypatch: pytest.MonkeyPatch, values: tuple[torch.Tensor, ...], peer: FakePeer) -> Frame:
    monkeypatch.setattr("farcall.serialize.pickler.write_flat", flat_writer(len(values)))
    frame = Frame(REQUEST)
    write_call(frame, values, peer)
    return frame


def test_tensors_of_a_flat_payload_come_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Lending()
    small = torch.arange(4.0, requires_grad=True)
    frame = write_flatly(monkeypatch, (small, torch.zeros(SHAPE)), peer)
    assert has_devices(frame.payload)
    assert bytes(before_table(frame.payload))[-1] == FLAT
    assert not takes_long(frame.payload)
    met: list[torch.Tensor] = []
    back, lent = decode(frame.payload, frame.buffers, peer, met)
    assert torch.equal(back, small)
    assert back.requires_grad
    assert (lent.shape, lent.dtype) == (SHAPE, torch.float32)
    assert [id(tensor) for tensor in met] == [id(back), id(lent)]
    assert peer.taken == [("t", 100)]
    assert peer.dropped == []


def test_a_flat_payload_that_nobody_reads_gives_its_tickets_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Lending()
    frame = write_flatly(monkeypatch, (torch.zeros(SHAPE),), peer)
    discard(frame.payload, peer)
    assert peer.dropped == [("t", 100)]
    frame = write_flatly(monkeypatch, (torch.zeros(SHAPE),), peer)
    withdraw(frame)
    assert peer.withdrawn == [("t", 100)]


@pytest.mark.parametrize("refuse", ["no ticket", "no map"])
def test_what_cannot_be_copied_to_a_device_is_left_to_pickle(monkeypatch: pytest.MonkeyPatch, refuse: str) -> None:
    peer = Lending(tickets=1)
    if refuse == "no map":
        targets = iter([CUDA, None])
        monkeypatch.setattr(peer, "target", lambda device, is_request: next(targets))
    values = torch.zeros(SHAPE), torch.ones(SHAPE)
    frame = write_flatly(monkeypatch, values, peer)
    assert peer.withdrawn == [("t", 100)]
    assert frame.undo == ()
    assert not has_devices(frame.payload)
    for value, back in zip(values, decode(frame.payload, frame.buffers, peer), strict=True):
        assert torch.equal(value, back)


@pytest.mark.parametrize(
    "table",
    [
        [],
        [("cuda:0", [])],
        [("cuda:0", [(0, True, 0, ("t", 8))])],
        [("cuda:0", [(0, True, 2, b"short")])],
    ],
)
def test_a_flat_payload_with_another_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, table: list[tuple[str, list[Any]]]
) -> None:
    peer = Lending()
    peer.copies = False
    frame = write_flatly(monkeypatch, (torch.zeros(SHAPE),), peer)
    written = pickle.dumps(table, 5)
    payload = bytes(before_table(frame.payload)) + written + len(written).to_bytes(4, "little") + bytes([DEVICES_FORM])
    with pytest.raises(SerializationError, match=r"on a device|outside the memory"):
        decode(payload, (), peer)
    assert len(peer.taken) == sum(part[2] == 0 for _, parts in table for part in parts)


def test_tickets_behind_one_that_cannot_be_read_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Lending()
    frame = write_flatly(monkeypatch, (torch.zeros(SHAPE), torch.zeros(SHAPE)), peer)
    monkeypatch.setattr(peer, "take", lambda *_: 1 / 0)
    with pytest.raises(SerializationError):
        decode(frame.payload, frame.buffers, peer)
    assert peer.dropped == [("t", 100)]  # the first one is the business of `take`


@pytest.mark.parametrize("payload", [b"D", b"xyzD", b"\xff\xff\xff\xffD", b"F\x00\x00\x00\x00D", b"\x05\x00\x00\x00D"])
def test_a_table_of_impossible_length_is_refused(payload: bytes) -> None:
    takes_long(payload)  # it is asked on the thread that reads the link: it must not raise
    with pytest.raises(SerializationError):
        decode(payload, (), Lending())
