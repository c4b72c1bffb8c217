"""Bytes of the flat form, changed at random: both implementations say the same of them, and no process dies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.serialize import flat

pytestmark = pytest.mark.skipif(bool(flat.speedups), reason=f"no compiled codec here: {flat.speedups}")

DTYPES = [flat.DTYPES[code] for code in range(flat._MOST_CODE + 1)]
tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=60)
    | tensors
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)
OUT_OF_BAND_BYTES = 48
"""So small that some of these tensors and bytes are buffers."""

changes = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "cut"]), st.floats(0, 1), st.integers(0, 255)), max_size=4
)


def changed(payload: bytes, steps: list[tuple[str, float, int]]) -> bytes:
    data = bytearray(payload)
    for step, where, byte in steps:
        at = int(where * len(data))
        if step == "insert":
            data.insert(at, byte)
        elif at < len(data):
            if step == "set":
                data[at] = byte
            else:
                del data[at : at + 1 + byte % 8]
    return bytes(data)


def made(code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor on a device that the bytes tell of."""
    return torch.full((2,), float(code + len(shape)))


def outcome(read: Any, payload: bytes, buffers: list[bytes]) -> Any:
    met: list[torch.Tensor] = []
    try:
        value = read(payload, [memoryview(bytearray(buffer)) for buffer in buffers], met, ["a reference"], made)
    except (ValueError, RuntimeError) as error:
        return type(error)
    # As bytes: a NaN is not equal to itself.
    written = flat.write_in_python(value, None, 1 << 40)
    assert written is not None
    return written[0], len(met)


@settings(max_examples=600)
@given(values, changes)
def test_whatever_the_bytes_both_implementations_agree(value: Any, steps: list[tuple[str, float, int]]) -> None:
    written = flat.write_flat(value, None, OUT_OF_BAND_BYTES)
    same = flat.write_in_python(value, None, OUT_OF_BAND_BYTES)
    if written is None or same is None:
        assert written is same
        return
    payload, buffers = written[0], [bytes(view) for view in written[1]]
    assert (payload, buffers) == (same[0], [bytes(view) for view in same[1]])
    payload = changed(payload, steps)
    assert outcome(flat.read_flat, payload, buffers) == outcome(flat.read_in_python, payload, buffers)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 70), st.lists(st.binary(max_size=40), max_size=2))
def test_whatever_anybody_sends(data: bytes, text_bytes: int, buffers: list[bytes]) -> None:
    payload = data + text_bytes.to_bytes(4, "little") + b"F"
    assert outcome(flat.read_flat, payload, buffers) == outcome(flat.read_in_python, payload, buffers)
