"""Messages made by hand, whose tensors and arrays claim more memory than they bring."""

from __future__ import annotations

import collections
import mmap
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit.values import decode, encode, over_the_wire

from farcall.errors import NotAllowed, SerializationError
from farcall.serialize import bounds, restrict
from farcall.serialize.allowance import Allowance, loads
from farcall.serialize.bounds import EXPANSION, check_layout, size_of
from farcall.serialize.devices import DEVICES_FORM, rebuild_on_device
from farcall.serialize.rebuild import (
    CODES,
    rebuild_alias,
    rebuild_as,
    rebuild_inline,
    rebuild_special,
    rebuild_storage,
    rebuild_view,
)

FLOAT = CODES[torch.float32]
MIB = 1 << 20


class Array(np.ndarray):
    pass


class Tensor(torch.Tensor):
    pass


class Reduced:
    """Pickles as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture(params=["without a table", "with a table"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "with a table":
        restrict(Allowance([], [Array, Tensor]))
    yield
    restrict(None)


@pytest.fixture
def table() -> Iterator[None]:
    restrict(Allowance([], [Array, Tensor]))
    yield
    restrict(None)


def message(value: Any, form: bytes = b"T") -> bytes:
    return pickle.dumps(value, 5) + form


LAYOUTS = [
    pytest.param((5,), (1,), 0, id="too long"),
    pytest.param((2, 2), (3, 1), 0, id="strides"),
    pytest.param((1,), (1,), 4, id="offset"),
    pytest.param((4,), (1,), -1, id="before"),
    pytest.param((2,), (-1,), 1, id="backwards"),
    pytest.param((1,), (1,), 1 << 61, id="an offset that wraps around"),
    pytest.param((2,), (1 << 62,), 0, id="strides that wrap around"),
    pytest.param((-1,), (1,), 0, id="negative"),
    pytest.param((1 << 40,), (0,), 0, id="expanded without end"),
    pytest.param((1 << 20, 1 << 20), (0, 0), 0, id="twice"),
    pytest.param((0, 1 << 62, 4), (1, 1, 1), 0, id="empty, with impossible strides"),
    pytest.param((4,), (1, 1), 0, id="one stride too many"),
    pytest.param((4,), (), 0, id="one stride too few"),
    pytest.param([4], [1], 0, id="lists"),
    pytest.param((4.0,), (1,), 0, id="no whole numbers"),
    pytest.param((True,), (1,), 0, id="no numbers"),
]
FOUR = bytearray(16)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("shape", "strides", "offset"), LAYOUTS)
class TestLayouts:
    """Every function that makes a tensor over memory of the message, with or without a table."""

    def test_inline(self, shape: Any, strides: Any, offset: Any) -> None:
        with pytest.raises(SerializationError):
            decode(message(Reduced(rebuild_inline, (FOUR, FLOAT, shape, strides, offset, 0))))

    def test_without_memory(self, shape: Any, strides: Any, offset: Any) -> None:
        with pytest.raises(SerializationError):
            decode(message(Reduced(rebuild_inline, (bytearray(), FLOAT, shape, strides, offset, 0))))

    def test_alias(self, shape: Any, strides: Any, offset: Any) -> None:
        first = Reduced(rebuild_inline, (FOUR, FLOAT))
        with pytest.raises(SerializationError):
            decode(message([first, Reduced(rebuild_alias, (0, FLOAT, shape, strides, offset, 0))]))

    @pytest.mark.parametrize("size", [16, 17])  # with a byte more, it is viewed as bytes first
    def test_buffer(self, shape: Any, strides: Any, offset: Any, size: int) -> None:
        view = (0, FLOAT, shape, strides, offset, 0)
        first = (0, CODES[torch.uint8], (size,), (1,), 0, 0)
        for views in ([view], [first, view]):
            value = [Reduced(rebuild_view, each) for each in views]
            with pytest.raises(SerializationError):
                decode(message(value), [memoryview(bytearray(size))])

    def test_segment(self, shape: Any, strides: Any, offset: Any) -> None:
        written = pickle.dumps([[(0, bytearray(16), False)]], 5)
        form = written + struct.pack("<I", len(written)) + b"S"
        with pytest.raises(SerializationError):
            decode(message(Reduced(rebuild_view, (0, FLOAT, shape, strides, offset, 0)), form))

    def test_device(self, shape: Any, strides: Any, offset: Any) -> None:
        value = Reduced(rebuild_on_device, (0, FLOAT, shape, strides, offset, 0))
        with pytest.raises(SerializationError):
            decode(on_devices(value, [("cpu", [(0, False, 2, bytearray(16))])]), peer=SimpleNamespace(devices=None))

    def test_subclass_and_storage(self, shape: Any, strides: Any, offset: Any) -> None:
        inner = (rebuild_inline, (FOUR, FLOAT, shape, strides, offset, 0))
        for value in (Reduced(rebuild_as, (Tensor, *inner, 0)), Reduced(rebuild_storage, inner)):
            with pytest.raises(SerializationError):
                decode(message(value))


def on_devices(value: Any, devices: Any) -> bytes:
    written = pickle.dumps(devices, 5)
    return message(value) + written + struct.pack("<I", len(written)) + bytes([DEVICES_FORM])


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("layout", [(), ((16,), (1,), 0, 0)], ids=["whole", "with a layout"])
def test_memory_of_a_tensor_is_not_given_back_under_it(layout: Any) -> None:
    """A pickle may hand its bytearray to the program as well, whose functions may change the length."""
    memory = bytearray(16)
    tensor, found = decode(message([Reduced(rebuild_inline, (memory, CODES[torch.uint8], *layout)), memory]))
    with pytest.raises(BufferError):
        found.extend(b"more")
    found[0] = 7
    assert tensor[0] == 7


@pytest.mark.usefixtures("mode")
def test_a_compact_part_has_its_size() -> None:
    value = Reduced(rebuild_on_device, (0, FLOAT, (1000,), (2,), 0, 0))
    with pytest.raises(SerializationError, match="outside the memory"):
        decode(on_devices(value, [("cpu", [(0, True, 2, bytearray(16))])]), peer=SimpleNamespace(devices=None))


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("memory", [b"abcd", memoryview(b"abcd")], ids=["bytes", "memoryview"])
def test_bytes_that_must_not_change_become_no_tensor(memory: Any) -> None:
    memory = pickle.PickleBuffer(memory) if isinstance(memory, memoryview) else memory
    for layout in ((), ((4,), (1,), 0, 0)):
        with pytest.raises(SerializationError, match="must not be written"):
            decode(message(Reduced(rebuild_inline, (memory, CODES[torch.uint8], *layout))))


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*prototype")
@pytest.mark.parametrize("make", [torch.quantize_per_tensor, None], ids=["quantized", "nested"])
def test_tensors_of_torchs_own_reductions_stay_in_their_memory(make: Any) -> None:
    if make is None:
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        function, (memory, shapes, *rest) = tensor.__reduce_ex__(5)[:2]
        found, changed = (memory, shapes, *rest), (memory, shapes + 1000, *rest)
    else:
        function, found = make(torch.ones(4), 0.1, 0, torch.qint8).__reduce_ex__(5)[:2]
        changed = (found[0], found[1], (5000,), *found[3:])
    over_the_wire([Reduced(rebuild_special, (function, found, False, None))])
    with pytest.raises(SerializationError, match="outside the memory"):
        over_the_wire([Reduced(rebuild_special, (function, changed, False, None))])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_has_its_indices_within_it_also_where_members_trust_each_other() -> None:
    bad = torch.sparse_coo_tensor(torch.tensor([[1 << 33]]), torch.ones(1), (10,), check_invariants=False)
    with pytest.raises(SerializationError, match="found index"):
        over_the_wire([bad])


def test_one_part_on_a_device_is_not_copied_many_times() -> None:
    value = [Reduced(rebuild_on_device, (number, FLOAT, (4,), (1,), 0, 0)) for number in (0, 1)]
    content = bytes(range(200)) * 5
    for what in ((0, True, 2, content), (0, True, 1, 0)):
        with pytest.raises(SerializationError, match="the same bytes"):
            decode(
                on_devices(value, [("cpu", [what])] * 9),
                [memoryview(bytes(16))],
                peer=SimpleNamespace(devices=None),
            )


# ---------------------------------------------------------------------- sizes


@pytest.mark.usefixtures("table")
def test_no_memory_is_taken_for_bytes_that_do_not_come() -> None:
    data = b"\x80\x05\x96" + struct.pack("<Q", 64 * MIB) + b"."
    assert peak(data) < MIB


def peak(data: bytes) -> int:
    """The most memory that reading a pickle takes, while it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises((NotAllowed, pickle.UnpicklingError, ValueError)):
            loads(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def repeated(first: bytes, again: bytes) -> bytes:
    """A pickle of a list: 64 KiB as entry 0 of the memo, ``first``, and a thousand times ``again``."""
    return (
        b"\x80\x05B" + struct.pack("<I", MIB // 16) + bytes(MIB // 16) + b"\x940" + first + b"](" + again * 1000 + b"e."
    )


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param(b"", b"cbuiltins\nbytearray\nh\x00\x85R", id="bytearray"),
        pytest.param(b"", b"cbuiltins\nset\nh\x00\x85R", id="set"),
        pytest.param(b"", b"ccollections\ndeque\nh\x00\x85R", id="deque"),
        pytest.param(
            b"cnumpy\ndtype\n\x8c\x02u1\x89\x88\x87R\x940(K\x01M\x00\x00" + b"tr\x02\x00\x00\x000",
            b"c"
            + np.array(0).__reduce__()[0].__module__.encode()
            + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
            b"(K\x01J\x00\x00\x01\x00\x85h\x01\x89h\x00tb",
            id="array",
        ),
        pytest.param(
            b"cnumpy\ndtype\n\x8c\x06V65536\x89\x88\x87R\x940",
            b"c" + np.float64(1).__reduce__()[0].__module__.encode() + b"\nscalar\nh\x01h\x00\x86R",
            id="scalar",
        ),
        pytest.param(
            b"X" + struct.pack("<I", MIB // 16) + b"9" * (MIB // 16) + b"\x940",
            b"cdecimal\nDecimal\nh\x01\x85R",
            id="decimal",
        ),
        pytest.param(
            b"\x8b" + struct.pack("<I", MIB // 16) + b"\x01" * (MIB // 16) + b"\x940",
            b"cbuiltins\nrange\nK\x00h\x01K\x07\x87R",
            id="range",
        ),
        pytest.param(
            b"](" + b"cbuiltins\nKeyError\n)R" * 8192 + b"e\x940",
            b"cbuiltins\nExceptionGroup\n\x8c\x01mh\x01\x86R",
            id="group",
        ),
        pytest.param(
            b"\x96" + struct.pack("<Q", MIB // 16) + bytes(MIB // 16) + b"\x940",
            b"cbuiltins\nUnicodeDecodeError\n(\x8c\x01uh\x01K\x00K\x01\x8c\x01mtR",
            id="undecodable bytes",
        ),
    ],
)
def test_one_part_of_a_message_is_not_copied_many_times(first: bytes, again: bytes) -> None:
    assert peak(repeated(first, again)) < 8 * MIB


def memory_taken(payload: bytes, buffers: Sequence[memoryview] = ()) -> int:
    """The bytes by which this process grows while a message is read and refused; ``tracemalloc`` sees no tensor."""
    before = resident_bytes()
    with pytest.raises((NotAllowed, SerializationError)):
        decode(payload, buffers, peer=SimpleNamespace(devices=None))
    return resident_bytes() - before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the size of this process is in /proc")
@pytest.mark.usefixtures("table")
class TestManyTensorsOfOnePart:
    """Memory that Python does not count: torch's own."""

    @pytest.mark.parametrize("inner", [False, True], ids=["plain", "of a class"])
    def test_shapes(self, inner: bool) -> None:
        ones = (1,) * 5000
        call = (rebuild_inline, (bytearray(1), CODES[torch.uint8], ones, ones, 0, 0))
        function, arguments = (rebuild_as, (Tensor, *call, 0)) if inner else call
        first, second = (pickle.dumps(part, 3)[2:-1] for part in (function, arguments))
        data = b"\x80\x05" + first + b"r\x00\x01\x00\x000" + second + b"r\x01\x01\x00\x000"
        assert memory_taken(data + b"](" + b"j\x00\x01\x00\x00j\x01\x01\x00\x00R" * 3000 + b"e.T") < 64 * MIB

    def test_segments(self) -> None:
        """A part of the table of segments must be its own memory: one that must not be written is copied for each."""
        written = b"\x80\x05\x96" + struct.pack("<Q", MIB) + bytes(MIB) + b"\x98\x940](]K\x00h\x00\x89\x87a"
        table = written + b"q\x01" + b"h\x01" * 199 + b"e."
        form = table + struct.pack("<I", len(table)) + b"S"
        views = [Reduced(rebuild_view, (number, CODES[torch.uint8], (1,), (1,), 0, 0)) for number in range(200)]
        assert memory_taken(message(views, form)) < 64 * MIB


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param((np.ndarray, ((1,), "O", bytearray(8))), id="objects of bytes"),
        pytest.param((Array, ((1,), "O", bytearray(8))), id="the same, by a class of the table"),
        pytest.param((Tensor, (1000,)), id="uninitialised memory"),
        pytest.param((np.dtype, ([("a", "O")],)), id="a dtype with fields"),
        pytest.param((np.dtype, (("V1", (1 << 30,)),)), id="a dtype with a shape"),
        pytest.param((np.float64(1).__reduce__()[0], (np.dtype("V1000000000"),)), id="a scalar without content"),
    ],
)
def test_arrays_and_tensors_are_not_made_otherwise(call: Any) -> None:
    function, arguments = call
    # Both on the stack, without a frame: its length is another now.
    prefix = b"\x80\x05" + b"".join(pickle.dumps(part, 3)[2:-1] for part in (function, arguments))
    opcodes = (b"R", b"\x81") if isinstance(function, type) else (b"R",)
    for opcode in opcodes:
        with pytest.raises(NotAllowed, match="arguments"):
            loads(prefix + opcode + b".")
    if isinstance(function, type):
        with pytest.raises(NotAllowed, match="arguments"):
            loads(prefix + b"}\x92.")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "state",
    [
        pytest.param((1, (1 << 40,), np.dtype("V0"), False, b""), id="elements without bytes"),
        pytest.param((1, (1 << 40,), np.dtype("u1"), False, b""), id="too few bytes"),
        pytest.param((1, (2,), np.dtype("O"), False, [1]), id="too few objects"),
        pytest.param((1, (1,), np.dtype("O"), False, b"AAAAAAAA"), id="objects of bytes"),
    ],
)
def test_the_state_of_an_array_has_its_size(state: Any) -> None:
    empty = np.zeros(0).__reduce__()
    with pytest.raises((NotAllowed, ValueError), match=r"outside the memory|such elements|not plain|arguments"):
        loads(pickle.dumps(Reduced(*empty[:2], state), 3))


# ---------------------------------------------------------------------- what honest members send


def test_what_fits_passes() -> None:
    check_layout((2, 2), (2, 1), 0, 4, 16)
    check_layout((), (), 3, 4, 16)
    check_layout((0, 5), (9, 1), 7, 4, 0)
    check_layout((4096 * EXPANSION,), (0,), 0, 1, 1)
    check_layout((EXPANSION, 8192), (0, 1), 0, 1, 8192)
    assert size_of((3, 4), 2) == 24
    assert size_of((1 << 40, 0), 8) == 0


def test_what_shows_its_memory_too_often_does_not() -> None:
    for shape, strides, held in (((4096 * EXPANSION + 1,), (0,), 1), ((EXPANSION + 1, 8192), (0, 1), 8192)):
        with pytest.raises(ValueError, match="more than"):
            check_layout(shape, strides, 0, 1, held)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([2.5]).expand(1000),
        lambda: torch.arange(5_000.0)[:, None].expand(-1, 1000),
        lambda: torch.arange(200_000.0).view(1000, 200)[:, 3].expand(500, -1),
        lambda: torch.tensor([1 + 2j]).conj().expand(1000),
        lambda: torch.arange(500.0).unfold(0, 250, 1),
        lambda: torch.arange(30_000.0).unfold(0, 250, 1),
    ],
    ids=["of one", "of many", "of a column", "conjugate", "windows", "large windows"],
)
@pytest.mark.parametrize("most", [EXPANSION, 64, 2])
def test_an_expanded_tensor_arrives_written_out_if_it_must(
    make: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "EXPANSION", most)
    monkeypatch.setattr(bounds, "_LEAST_BYTES", 8)
    tensor = make()
    size = sum(len(part) for part in (encode(tensor)[0], *encode(tensor)[1]))
    received = over_the_wire(tensor)
    assert torch.equal(received, tensor)
    assert tensor.nbytes <= most * max(size, 8)
    if most == EXPANSION:
        assert received.stride() == tensor.stride() or 0 in received.stride()
        assert size < tensor.nbytes // 2


@pytest.mark.usefixtures("table")
def test_containers_and_arrays_of_honest_members_are_within_the_limit() -> None:
    value = [
        *(collections.Counter(range(n)) for n in range(50)),
        *(collections.deque(range(n), 9) for n in range(50)),
        *(bytearray(n) for n in range(50)),
        *(np.full(n, n) for n in range(50)),
        *(np.array([object] * n, "O") for n in range(3)),
        *map(np.float64, range(50)),
        *(np.datetime64(n, "s") for n in range(9)),
        *(torch.Size(range(n)) for n in range(5)),
    ]
    for protocol in (3, 4, 5):
        found = loads(pickle.dumps(value, protocol))
        assert str(found) == str(value)
