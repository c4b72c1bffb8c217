"""The flat form: what takes it and what does not, the same bytes from both implementations, and bytes from anybody."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.kit.values import decode, encode

from farcall.errors import SerializationError
from farcall.protocol.frames import REQUEST, Frame
from farcall.serialize import flat, read_value, write_value
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.pickler import FLAT_FORM
from farcall.serialize.policy import REDUCERS, REFERENCES, register_reducer

compiled = pytest.mark.skipif(bool(flat.speedups), reason=f"no compiled codec here: {flat.speedups}")
IMPLEMENTATIONS = [
    pytest.param((flat.write_in_python, flat.read_in_python), id="python"),
    pytest.param((flat.write_flat, flat.read_flat), id="compiled", marks=compiled),
]
BASE = torch.arange(24.0).view(4, 6)


def shrunk() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(8)
    return tensor


def shrunk_behind_an_offset() -> torch.Tensor:
    tensor = torch.arange(100.0)[50:]
    tensor.untyped_storage().resize_(240)  # more than the tensor's own 200 bytes, which begin at byte 200
    return tensor


def attributed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.label = "x"  # type: ignore[attr-defined]
    return tensor


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = (value,)
    return value


LARGE = torch.arange(20_000)
TAKEN: dict[str, Any] = {
    "none": None,
    "bools": (True, False),
    "integers": (0, -1, 2**63 - 1, -(2**63)),
    "floats": (0.0, -0.0, 1.5, float("inf"), 1e-310),
    "texts": ("", "é\0\U0001f600", b"", b"\xff\0"),
    "containers": ([], (), {}, [1, [2]], {"a": {1: ()}, -7: "x"}),
    "deep": nested(32),
    "no dimension": torch.tensor(3.5),
    "empty": (torch.empty(0), torch.empty(3, 0, 2)),
    "ones in the shape": torch.ones(1, 5, 1),
    "leaf": torch.ones(3, requires_grad=True),
    "not a leaf": torch.ones(3, requires_grad=True) * 2,
    "row of a matrix": BASE[2],
    "inference": torch.inference_mode()(torch.ones)(3),
    "complex": torch.tensor([1 + 2j]),
    "a hundred": [torch.full((n,), n) for n in range(100)],
    "out of band": (torch.arange(20_000), torch.ones(2), torch.arange(30_000)),
    "bytes out of band": (bytes(65_536), [b"x" * 100_000, torch.arange(20_000)], {"last": b"y" * 65_535}),
    "half": torch.ones(3).bfloat16(),
    "tensor twice": [BASE, torch.ones(2), {"again": BASE}, BASE],
    "large tensor twice": (torch.ones(1), LARGE, LARGE),
    "empty tensor twice": [torch.empty(0)] * 2,
}
LEFT_TO_PICKLE: dict[str, Any] = {
    "large integer": 2**63,
    "long text": "x" * 100_000,
    "lone surrogate": "\ud800",
    "set": {1},
    "subclass of tuple": torch.Size([1]),
    "key": {(1,): 2},
    "too deep": nested(33),
    "cycle": cyclic(),
    "list twice": [[1]] * 2,
    "large bytes twice": [bytes(65_536)] * 2,
    "views of one storage": (BASE[:1], BASE[2:]),
    "detached": (BASE, BASE.detach()),
    "transposed": BASE.t(),
    "columns": BASE[:, 2:],
    "expanded": torch.ones(1).expand(4),
    "odd strides of one": torch.as_strided(torch.ones(5), (1, 5), (99, 1)),
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "attributes": attributed(),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch._neg_view(torch.ones(3)),
    "lazy zeros": torch._efficientzerotensor(3),
    "shrunk": shrunk(),
    "shrunk behind an offset": shrunk_behind_an_offset(),
    "empty, and longer than any memory": torch.empty(0, 1 << 61, 2),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "bits of a byte": torch.zeros(3, dtype=torch.uint8).view(torch.uint4),
    "array": torch.ones(3).numpy(),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", TAKEN)
def test_plain_values_take_it(name: str, implementation: Any) -> None:
    write, read = implementation
    value = TAKEN[name]
    written = write(value, None, 65536)
    assert written is not None
    payload, buffers = written
    received = read(payload, [memoryview(bytearray(buffer)) for buffer in buffers], None)
    again = flat.write_in_python(received, None, 65536)
    assert again is not None
    assert again[0] == payload
    assert repr(received) == repr(value).replace("grad_fn=<MulBackward0>", "requires_grad=True")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LEFT_TO_PICKLE)
def test_everything_else_is_left_to_pickle(name: str, implementation: Any) -> None:
    write, _ = implementation
    assert write(LEFT_TO_PICKLE[name], None, 65536) is None
    assert write([1, {"x": LEFT_TO_PICKLE[name]}], None, 65536) is None


@compiled
@pytest.mark.parametrize("name", TAKEN)
def test_both_implementations_write_the_same_bytes(name: str) -> None:
    for limit in (1, 100, 65536):
        met: tuple[list[Any], list[Any]] = ([], [])
        one = flat.write_in_python(TAKEN[name], met[0], limit)
        other = flat.write_flat(TAKEN[name], met[1], limit)
        assert one is not None
        assert other is not None
        assert one[0] == other[0]
        assert list(map(bytes, one[1])) == list(map(bytes, other[1]))
        assert list(map(id, met[0])) == list(map(id, met[1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tensors_are_recorded_in_order_by_both_ends(implementation: Any) -> None:
    write, read = implementation
    value = [torch.ones(1), {"a": torch.ones(2)}, (torch.ones(20_000),)]
    met: list[torch.Tensor] = []
    rebuilt: list[torch.Tensor] = []
    payload, buffers = write(value, met, 65536)
    read(payload, [memoryview(bytearray(buffer)) for buffer in buffers], rebuilt)
    assert [len(tensor) for tensor in met] == [len(tensor) for tensor in rebuilt] == [1, 2, 20_000]
    assert met[0] is value[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tensor_that_comes_twice_is_one_tensor(implementation: Any) -> None:
    write, read = implementation
    small, large = torch.ones(3), torch.ones(20_000)
    met: list[torch.Tensor] = []
    payload, buffers = write(
        [small, large, {"again": small}, large, *[torch.ones(1) for _ in range(50)], small], met, 65536
    )
    assert len(met) == 52
    assert len(buffers) == 1
    rebuilt: list[torch.Tensor] = []
    found = read(payload, [memoryview(bytearray(buffer)) for buffer in buffers], rebuilt)
    assert found[0] is found[2]["again"] is found[-1]
    assert found[1] is found[3]
    assert len(rebuilt) == 52


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_repetition_of_what_was_not_told_is_refused(implementation: Any) -> None:
    _, read = implementation
    for text in (b"r\0\0\0\0", b"r\0\0", b"(\2\0\0\0r\0\0\0\0N"):
        with pytest.raises(ValueError, match="malformed"):
            read(text + len(text).to_bytes(4, "little") + b"F", (), None)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tensor_under_a_key_that_comes_again_can_be_repeated(implementation: Any) -> None:
    _, read = implementation
    scalar = b"t\0\0\0"
    text = b"(\2\0\0\0{\2\0\0\0s\1\0\0\0a" + scalar + b"s\1\0\0\0aNr\0\0\0\0"
    made, again = read(text + struct.pack("<f", 2.5) + len(text).to_bytes(4, "little") + b"F", (), None)
    assert made == {"a": None}
    assert again.item() == 2.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_received_tensor_is_the_receivers_own(implementation: Any) -> None:
    write, read = implementation
    sent = torch.zeros(3)
    payload, _ = write(sent, None, 65536)
    first, second = read(payload, (), None), read(payload, (), None)
    first += 1
    assert not second.any()
    assert not sent.any()
    assert first.data_ptr() % 16 == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_buffer_keeps_the_storage_and_a_tensor_the_buffer(implementation: Any) -> None:
    write, read = implementation
    tensor = torch.arange(20_000)
    payload, (buffer,) = write(tensor, None, 65536)
    expected = bytes(buffer)
    del tensor
    gc.collect()
    torch.full((20_000,), -1)
    assert bytes(buffer) == expected
    memory = memoryview(bytearray(buffer))
    alive = weakref.ref(memory)
    received = [read(payload, [memory], None)]
    del memory
    assert alive() is not None
    # The last thread to hold a tensor may not be one of Python's.
    dropping = threading.Thread(target=received.clear)
    dropping.start()
    dropping.join()
    assert alive() is None


def test_a_tensor_whose_storage_was_shrunk_is_refused_with_a_reason() -> None:
    with pytest.raises(SerializationError, match="was the storage resized"):
        encode([torch.ones(2), [shrunk_beyond()]])


def shrunk_beyond() -> torch.Tensor:
    tensor = torch.ones(5000)
    tensor.untyped_storage().resize_(8192)
    return tensor


def test_a_reducer_of_the_users_for_tensors_is_asked() -> None:
    before = REDUCERS[torch.Tensor]
    register_reducer(torch.Tensor, lambda tensor, encoding: (str, ("mine",)))
    try:
        assert decode(*encode(torch.ones(2))) == "mine"
    finally:
        REDUCERS[torch.Tensor] = before


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b"", b""),
        (b"x", b""),
        (b"NN", b""),
        (b"N", b"more"),
        (b"i\0\0\0", b""),
        (b"s\5\0\0\0abc", b""),
        (b"s\1\0\0\0\xff", b""),
        (b"(\xff\xff\xff\xffN", b""),
        (b"[\1\0\0\0" * 40 + b"N", b""),
        (b"{\1\0\0\0NN", b""),
        (b"{\1\0\0\0[\0\0\0\0N", b""),
        (b"t", b""),
        (b"t\0\0", b""),
        (b"t\x0c\0\0", b"xxxx"),
        (b"t\0\2\0", b"xxxx"),
        (b"t\0\0\x41" + bytes(8 * 65), b""),
        (b"t\0\0\1\1\0\0\0", b"xxxx"),
        (b"t\0\0\1\2\0\0\0\0\0\0\0", b"xxxx"),
        (b"t\0\0\1" + b"\xff" * 8, b""),
        (b"t\0\0\2" + b"\0\0\0\0\1\0\0\0" * 2, b""),
        (b"t\0\0\2" + b"\0\0\0\0\0\0\0\0" + b"\xff" * 7 + b"\x7f", b""),
        (b"o\0\0\1\2\0\0\0\0\0\0\0", b""),
        (b"o\0\0\1\0\0\0\0\0\0\0\0", b""),
        (b"t\4\1\0", bytes(8)),
        (b"B", b""),
    ],
    ids=repr,
)
def test_malformed_bytes_are_refused(text: bytes, data: bytes, implementation: Any) -> None:
    _, read = implementation
    payload = text + data + len(text).to_bytes(4, "little") + b"F"
    with pytest.raises((ValueError, RuntimeError)):
        read(payload, (), None)
    with pytest.raises(SerializationError):
        decode(payload)
    for cut in (payload[-5:], payload[-3:], b"", b"\xff\xff\xff\xffF"):
        with pytest.raises(ValueError, match="malformed"):
            read(cut, (), None)


class Reference:
    """A class that stands for that of references."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_references_travel_as_notes(implementation: Any) -> None:
    write, read = implementation
    one, two = Reference(), Reference()
    met: list[Any] = []
    payload, buffers = write(("f", [one, torch.ones(2)], {"two": two}), None, 65536, Reference, met)
    assert met == [one, two]
    name, (first, _), rest = read(payload, buffers, None, ["note 1", "note 2"])
    assert (name, first, rest) == ("f", "note 1", {"two": "note 2"})
    for notes in ((), ["note 1"]):
        with pytest.raises(ValueError, match="a reference is missing"):
            read(payload, buffers, None, notes)
    assert write([one], None, 65536) is None
    assert write([one], None, 65536, Reference, None) is None
    assert write([one, one], None, 65536, Reference, []) is None


def flat_payload(text: bytes) -> bytes:
    return text + struct.pack("<IB", len(text), flat.FLAT)


ON_DEVICE = struct.pack("<cBBB2q", b"d", 0, 1, 2, 3, 4)
"""A float32 tensor of 3 x 4 on a device, which requires a gradient."""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tensors_on_devices_are_made_by_their_table(implementation: Any) -> None:
    read = implementation[1]
    asked: list[Any] = []

    def on_device(code: int, shape: tuple[int, ...]) -> torch.Tensor:
        asked.append((code, shape))
        return torch.ones(shape)

    met: list[torch.Tensor] = []
    text = struct.pack("<cI", b"(", 3) + ON_DEVICE + b"N" + struct.pack("<cI", b"r", 0)
    first, nothing, again = read(flat_payload(text), (), met, (), on_device)
    assert asked == [(0, (3, 4))]
    assert nothing is None
    assert again is first
    assert met == [first]
    assert first.requires_grad
    assert (first.shape, first.dtype) == ((3, 4), torch.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tensor_on_a_device_without_a_table_is_refused(implementation: Any) -> None:
    read = implementation[1]
    with pytest.raises(ValueError, match="no table of devices"):
        read(flat_payload(ON_DEVICE), (), None)
    with pytest.raises(ValueError, match="shape makes no sense"):
        read(flat_payload(struct.pack("<cBBB2q", b"d", 0, 0, 2, -3, 4)), (), None, (), lambda *_: torch.ones(1))

    def broken(code: int, shape: tuple[int, ...]) -> torch.Tensor:
        raise LookupError("the device is gone")

    with pytest.raises(LookupError, match="the device is gone"):
        read(flat_payload(ON_DEVICE), (), None, (), broken)


@compiled
@pytest.mark.parametrize("refusal", [None, LookupError("it is gone")])
def test_a_reference_that_cannot_be_forked_is_left_to_pickle(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception | None
) -> None:
    undone: list[Any] = []

    def fork(reference: Reference, peer: object) -> Any:
        if reference is bad:
            if refusal is not None:
                raise refusal
            return None
        return "note", lambda: undone.append(reference)

    good, bad = Reference(), Reference()
    monkeypatch.setattr(REFERENCES, "kind", Reference)
    monkeypatch.setattr(REFERENCES, "fork", fork, raising=False)
    frame = Frame(REQUEST)
    write_value(frame, [good])
    assert frame.forks == ["note"]
    assert frame.payload[-1:] == FLAT_FORM
    frame = Frame(REQUEST)
    write_value(frame, [good, bad])
    assert undone == [good]
    assert not frame.forks
    assert not frame.undo
    assert frame.payload[-1:] != FLAT_FORM


def test_who_takes_no_pickles_takes_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = Frame(REQUEST)
    frame.payload, frame.forks = b"n" + (1).to_bytes(4, "little") + b"F", ["a reference"]
    assert read_value(frame) == "a reference"
    monkeypatch.setattr(INSTALLED, "takes_pickles", False)
    with pytest.raises(SerializationError, match="a reference is missing"):
        read_value(frame)


def test_it_can_be_switched_off() -> None:
    program = "from farcall.serialize import flat; print(flat.speedups)"
    switched_off = {**os.environ, "FARCALL_SPEEDUPS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True, env=switched_off
    )
    assert "switched off" in done.stdout


def test_a_torch_without_the_exchange_api_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARCALL_SPEEDUPS", raising=False)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert "no exchange API" in flat._load_speedups()


@compiled
def test_a_library_built_from_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_VERSION", flat._VERSION + 1)
    assert "another version of farcall" in flat._load_speedups()
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", "no capsule")
    assert "not built, or not for this torch" in flat._load_speedups()
