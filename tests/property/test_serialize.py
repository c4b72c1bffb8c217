"""Any structure of plain values, arrays, tensors and views comes back equal, sharing what it shared."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.values import ROADS, decode, encode, on_road

DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.complex64, torch.bool, torch.int16]


def over_the_wire(value, road):
    met, rebuilt = [], []
    with on_road(road):
        payload, buffers = encode(value, tensors=met)
        received = decode(payload, [memoryview(bytearray(buffer)) for buffer in buffers], tensors=rebuilt)
    assert [(t.shape, t.dtype) for t in met] == [(t.shape, t.dtype) for t in rebuilt]
    return received


@st.composite
def bases(draw):
    """A tensor that owns its memory, small or beyond every threshold."""
    shape = draw(
        st.lists(st.integers(0, 7), max_size=4)
        | st.sampled_from([[2000], [40, 60], [300, 200], [3, 50, 40], [100_000]])
    )
    dtype = draw(st.sampled_from(DTYPES))
    count = int(np.prod(shape, dtype=int))
    tensor = (torch.arange(count) * 7 % 101).to(dtype).reshape(shape)
    if dtype.is_floating_point and draw(st.booleans()):
        tensor.requires_grad_(True)
    return tensor


@st.composite
def views(draw, base):
    """A view made by a few random steps."""
    tensor = base
    for _ in range(draw(st.integers(0, 4))):
        if tensor.dim() == 0:
            step = draw(st.sampled_from(["unsqueeze", "same"]))
        else:
            step = draw(st.sampled_from(["slice", "select", "transpose", "unsqueeze", "expand", "conj", "same"]))
        if step == "unsqueeze":
            tensor = tensor.unsqueeze(0)
        elif step == "conj":
            tensor = tensor.conj()
        elif step == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        elif step == "transpose":
            tensor = tensor.transpose(0, -1)
        elif step in ("slice", "select"):
            dimension = draw(st.integers(0, tensor.dim() - 1))
            size = tensor.shape[dimension]
            if step == "select" and size:
                tensor = tensor.select(dimension, draw(st.integers(0, size - 1)))
            else:
                begin = draw(st.integers(0, size))
                end = draw(st.integers(begin, size))
                index = [slice(None)] * tensor.dim()
                index[dimension] = slice(begin, end, draw(st.integers(1, 3)))
                tensor = tensor[tuple(index)]
    return tensor


@st.composite
def families(draw):
    """Some storages and several views of each, in any order."""
    tensors = []
    for base in draw(st.lists(bases(), min_size=1, max_size=3)):
        tensors.extend(draw(st.lists(views(base), min_size=1, max_size=4)))
    return draw(st.permutations(tensors))


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=100)
    | st.builds(
        lambda n, d: np.arange(n).astype(d),
        st.sampled_from([0, 3, 2000]),
        st.sampled_from(["i2", "f4", "M8[s]"]),
    )
    | bases()
)
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.requires_grad == other.requires_grad
            and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=150)
@given(value=structures)
def test_structures_round_trip(value, road):
    assert same(over_the_wire(value, road), value)


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=150)
@given(tensors=families())
def test_views_round_trip(tensors, road):
    received = over_the_wire(tensors, road)
    assert same(received, tensors)


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=100)
@given(tensors=families(), data=st.data())
def test_writing_to_one_view_shows_in_the_same_others(tensors, data, road):
    """The same write, done here and there, gives the same values in every view."""
    plain = [tensor.detach() for tensor in tensors]
    received = over_the_wire(plain, road)
    chosen = data.draw(st.integers(0, len(plain) - 1))
    for side in (plain, received):
        target = side[chosen]
        # Elements one by one: an expanded view refuses to be written to as a whole.
        if target.numel():
            target[(0,) * target.dim()] = 1
            target[(-1,) * target.dim()] = 0
    assert same(received, plain)


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=80)
@given(tensors=families())
def test_no_more_is_sent_than_the_storages_hold(tensors, road):
    with on_road(road):
        payload, buffers = encode(tensors)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    sent_bytes = len(payload) + sum(buffer.nbytes for buffer in buffers)
    assert sent_bytes <= sum(storages.values()) + 600 * (len(tensors) + 1)
