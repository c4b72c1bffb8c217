"""Messages of any content: no tensor reaches beyond the bytes that brought it, and no message takes much more memory.

A small multiple is 256: so much memory Python may take for each byte of a message, for instance for an empty set, which
one byte stands for. Tensors and arrays take no more than their message has.
"""

from __future__ import annotations

import collections
import pickle
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.mutations import mutate, rounds
from tests.kit.values import ROADS, decode, encode, on_road

from farcall.errors import SerializationError
from farcall.serialize import restrict
from farcall.serialize.allowance import Allowance
from farcall.serialize.bounds import EXPANSION
from farcall.serialize.devices import rebuild_on_device
from farcall.serialize.rebuild import CODES, rebuild_alias, rebuild_inline, rebuild_storage, rebuild_view

MULTIPLE = 256
ONCE_BYTES = 1 << 20
"""For what Python and torch keep from their first use on."""

lengths = (
    st.integers(0, 5)
    | st.integers(0, 50)
    | st.sampled_from([-1, 16, 17, 1 << 20, 1 << 31, 1 << 40, 1 << 61, (1 << 63) - 1])
)
dtypes = st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128])


class Call:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = draw(st.lists(lengths, max_size=3))
    strides = draw(st.lists(lengths, min_size=len(shape), max_size=len(shape)) | st.lists(lengths, max_size=3))
    return CODES[draw(dtypes)], tuple(shape), tuple(strides), draw(st.sampled_from([0, 0, 1]) | lengths), 0


@st.composite
def calls(draw: st.DrawFn) -> Call:
    layout = draw(layouts())
    function = draw(st.sampled_from([rebuild_inline, rebuild_alias, rebuild_view, rebuild_on_device, rebuild_storage]))
    if function is rebuild_inline:
        return Call(function, (bytearray(draw(st.integers(0, 40))), *layout))
    if function is rebuild_storage:
        return Call(function, (rebuild_inline, (bytearray(draw(st.integers(0, 40))), *layout)))
    return Call(function, (draw(st.integers(-1, 1)), *layout))


@contextmanager
def trusting(trust: Literal["calls", "data"] | None) -> Iterator[None]:
    restrict(None if trust is None else Allowance([], [], trust))
    try:
        yield
    finally:
        restrict(None)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.UntypedStorage):
        yield torch.empty(0, dtype=torch.uint8).set_(value)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for item in value:
            yield from tensors_of(item)


def assert_within(tensor: torch.Tensor, size_bytes: int) -> None:
    if tensor.layout is not torch.strided:
        assert_within(tensor._indices(), size_bytes)
        assert_within(tensor._values(), size_bytes)
        return
    held = tensor.untyped_storage().nbytes()
    assert held <= size_bytes
    assert tensor.nbytes <= EXPANSION * max(held, 4096)
    if tensor.numel():
        steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        assert min((0, tensor.storage_offset(), *tensor.stride())) == 0
        assert (tensor.storage_offset() + steps + 1) * tensor.itemsize <= held


@pytest.mark.parametrize("trust", [None, "calls"])
@given(call=calls(), size=st.integers(1, 40), compact=st.booleans())
def test_no_tensor_exceeds_the_bytes_of_its_message(trust: Any, call: Call, size: int, compact: bool) -> None:
    # Memory of each kind comes first, so that the call may make views of it.
    brought = [
        Call(rebuild_inline, (bytearray(size), CODES[torch.uint8])),
        Call(rebuild_view, (0, CODES[torch.uint8], (size,), (1,), 0, 0)),
    ]
    devices = pickle.dumps([("cpu", [(0, compact, 2, bytearray(size))])], 5)
    payload = pickle.dumps([*brought, call], 5) + b"T" + devices + len(devices).to_bytes(4, "little") + b"D"
    with trusting(trust), suppress(SerializationError):
        found = decode(payload, [memoryview(bytearray(size))], peer=SimpleNamespace(devices=None))
        for tensor in tensors_of(found):
            assert_within(tensor, max(size, 40))  # the call may bring as much of its own


def corpus(trust: str) -> Iterable[Any]:
    x = torch.arange(12.0).view(3, 4)
    yield [1, 2.5, "text", b"bytes" * 20, None, {"a": (1, [2])}, x, torch.zeros(0, 3), torch.tensor(1)]
    yield {"large": torch.zeros(9000), "bytes": b"x" * 70_000}
    if trust != "data":
        yield [x.t(), x[1:], x[:, 1], x[0].expand(5, 4), x.to_sparse(), torch.nn.Parameter(x), x.untyped_storage()]
        yield [{1, 2}, bytearray(b"abc" * 9), np.arange(5), np.array(["a", 1], "O"), np.float32(2), {torch.float32: 1}]
        yield [collections.OrderedDict(a=1), collections.deque([1, 2], 9), collections.Counter("abca"), torch.Size([1])]


@pytest.mark.filterwarnings("ignore")  # whatever torch and numpy say of such values
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("trust", ["calls", "data"])
def test_no_message_takes_much_more_memory_than_it_has(trust: Any, road: str) -> None:
    if road == "pickle" and trust == "data":
        pytest.skip("nothing is pickled")
    with on_road(road), trusting(trust):
        messages = [encode(value) for value in corpus(trust)]
        written = [bytes(payload) for payload, _ in messages]
        for number, chance in rounds(600):
            payload, buffers = chance.choice(messages)
            payload = mutate(chance, bytes(payload), written)
            if not payload:
                continue
            size = len(payload) + sum(len(buffer) for buffer in buffers)
            copies = [memoryview(bytearray(buffer)) for buffer in buffers]
            tracemalloc.start()
            try:
                with suppress(SerializationError):
                    for tensor in tensors_of(decode(payload, copies)):
                        assert_within(tensor, size)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak <= MULTIPLE * size + ONCE_BYTES, f"FARCALL_SEED={number}"
