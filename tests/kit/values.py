"""Values to bytes and back, as tests of single parts want them: without a peer, a link or a frame of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from farcall.protocol.frames import REQUEST, RESPONSE, Frame
from farcall.serialize import flat, pickler, read_value, write_call, write_value

Encoded = tuple[bytes | memoryview, Sequence[Any]]


class _Tensors:
    """A distributed autograd context that only remembers which tensors it was told of."""

    id = 1

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def record_send(self, peer: Any, tensors: list[torch.Tensor]) -> int:
        self.tensors += tensors
        return 1

    def record_receive(self, peer: Any, message_id: int, tensors: list[torch.Tensor]) -> None:
        self.tensors += tensors


def encode(value: Any, peer: Any = None, tensors: list[torch.Tensor] | None = None) -> Encoded:
    """The payload and buffers of an answer; every tensor met is appended to ``tensors``, if given."""
    frame = Frame(RESPONSE, recording=None if tensors is None else _Tensors(tensors))
    write_value(frame, value, peer)
    return frame.payload, frame.buffers


def encode_call(value: Any, peer: Any = None) -> Encoded:
    """The payload and buffers of a request."""
    frame = Frame(REQUEST)
    write_call(frame, value, peer)
    return frame.payload, frame.buffers


def decode(
    payload: bytes | memoryview,
    buffers: Sequence[Any] = (),
    peer: Any = None,
    tensors: list[torch.Tensor] | None = None,
) -> Any:
    """The value of a payload; every tensor met is appended to ``tensors``, if given."""
    frame = Frame(RESPONSE, payload=payload, buffers=list(buffers))
    if tensors is not None:
        frame.recording, frame.message_id = _Tensors(tensors), 1
    return read_value(frame, peer)


ROADS = ("pickle", "flat", "compiled")
"""The ways of a plain value: pickle has to know all of them, for the sake of those that are not."""


@contextmanager
def on_road(road: str) -> Iterator[None]:
    """Write and read by one of `ROADS`."""
    if road == "compiled" and flat.speedups:
        pytest.skip(f"there is no compiled codec here: {flat.speedups}")
    write, read = {
        "pickle": (lambda *_: None, flat.read_in_python),
        "flat": (flat.write_in_python, flat.read_in_python),
        "compiled": (flat.write_flat, flat.read_flat),
    }[road]
    with patch.object(pickler, "write_flat", write), patch.object(pickler, "read_flat", read):
        yield


def over_the_wire(value: Any, *, tensors: list[torch.Tensor] | None = None) -> Any:
    """Encode, move the bytes somewhere else, decode."""
    payload, buffers = encode(value)
    return decode(bytes(payload), [memoryview(bytearray(buffer)) for buffer in buffers], tensors=tensors)


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(received) is type(sent)
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert received.requires_grad == sent.requires_grad
    assert received.layout == sent.layout
    assert torch.equal(received, sent)
