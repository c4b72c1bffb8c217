"""Manifests: what a subscriber believes, and what it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from farcall.errors import SerializationError
from farcall.protocol.weights.messages import Claim, Key
from farcall.weights.manifest import Content, Manifest, Storage, TensorPlace, decode_manifest, encode_manifest
from farcall.weights.version import HeldVersion

CONTENT = Content(2**62 + 1, 1, 1, 4096)
STORAGE = Storage(0, 64, 400, 7)
PLACE = TensorPlace("x", ("x",), "float32", (10, 10), (10, 1), 0, 0)


def manifest(**changes: Any) -> Manifest:
    whole = Manifest([CONTENT], [STORAGE], [PLACE], [((), "dict")], [], b"", [])
    return msgspec.structs.replace(whole, **changes)


def place(**changes: Any) -> list[TensorPlace]:
    return [msgspec.structs.replace(PLACE, **changes)]


def storage(**changes: Any) -> list[Storage]:
    return [msgspec.structs.replace(STORAGE, **changes)]


def test_what_goes_in_comes_out() -> None:
    assert decode_manifest(encode_manifest(manifest())) == manifest()
    first = decode_manifest(encode_manifest(manifest()))
    again = decode_manifest(encode_manifest(manifest(storages=storage(checksum=8))), first)
    assert again == manifest(storages=storage(checksum=8))
    assert again.tensors is first.tensors  # known by its bytes


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(storages=storage(content=1)),
        manifest(storages=storage(content=-1)),
        manifest(storages=storage(offset=-64)),
        manifest(storages=storage(offset=3)),
        manifest(storages=storage(offset=4032)),
        manifest(storages=storage(size_bytes=2**60)),
        manifest(storages=storage(size_bytes=399)),
        manifest(storages=[]),
        manifest(tensors=place(storage=1)),
        manifest(tensors=place(storage=-1)),
        manifest(tensors=place(offset=1)),
        manifest(tensors=place(offset=-1)),
        manifest(tensors=place(shape=(11, 10))),
        manifest(tensors=place(shape=(-1, 10))),
        manifest(tensors=place(strides=(11, 1))),
        manifest(tensors=place(strides=(10, -1))),
        manifest(tensors=place(strides=(1,))),
        manifest(tensors=place(dtype="float64")),
        manifest(tensors=place(dtype="Tensor")),
        manifest(tensors=place(dtype="nonsense")),
    ],
    ids=lambda wrong: str(wrong.storages[:1] if wrong.tensors == [PLACE] else wrong.tensors[:1])[:90],
)
@pytest.mark.parametrize("like", [None, decode_manifest(encode_manifest(manifest()))], ids=["first", "again"])
def test_nothing_lies_where_it_cannot(wrong: Manifest, like: Manifest | None) -> None:
    with pytest.raises(SerializationError):
        decode_manifest(encode_manifest(wrong), like)


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1", encode_manifest(manifest())[:-3]])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(SerializationError, match="cannot be read"):
        decode_manifest(data)


def test_no_list_is_longer_than_what_is_in_it() -> None:
    made = manifest(
        tensors=place(path=("list", 10**12)),
        containers=[((), "dict"), (("list",), "list")],
    )
    held = HeldVersion(Key(Claim(1, 7), 1), made)
    with pytest.raises(SerializationError, match="no list has a place"):
        held.nested([torch.zeros(1)])
