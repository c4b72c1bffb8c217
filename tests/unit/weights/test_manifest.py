"""Manifests: what a subscriber believes, and what it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from farcall.errors import SerializationError
from farcall.protocol.weights.messages import Claim, Key
from farcall.weights import version
from farcall.weights.manifest import (
    Content,
    Layout,
    Manifest,
    Storage,
    TensorPlace,
    decode_manifest,
    encode_manifest,
)
from farcall.weights.version import HeldVersion

CONTENT = Content(2**62 + 1, 1, 1, 4096)
STORAGE = Storage(0, 64, 400)
PLACE = TensorPlace("x", ("x",), "float32", (10, 10), (10, 1), 0, 0)


def manifest(checksums: tuple[int, ...] = (7,), **changes: Any) -> Manifest:
    layout = msgspec.structs.replace(Layout([STORAGE], [PLACE], [((), "dict")], []), **changes)
    return Manifest([CONTENT], layout, list(checksums), b"", [])


def place(**changes: Any) -> list[TensorPlace]:
    return [msgspec.structs.replace(PLACE, **changes)]


def storage(**changes: Any) -> list[Storage]:
    return [msgspec.structs.replace(STORAGE, **changes)]


def test_what_goes_in_comes_out() -> None:
    assert decode_manifest(encode_manifest(manifest())) == manifest()
    first = decode_manifest(encode_manifest(manifest()))
    again = decode_manifest(encode_manifest(manifest(checksums=(8,))))
    assert again == manifest(checksums=(8,))
    assert again.layout is first.layout  # known by its bytes


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
        manifest(checksums=()),
        manifest(checksums=(7, 7)),
        manifest(storages=[STORAGE, Storage(2**60, 0, 64)], checksums=(7, 7)),
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
    ids=lambda wrong: str(wrong.layout.storages if wrong.layout.tensors == [PLACE] else wrong.layout.tensors)[:90],
)
def test_nothing_lies_where_it_cannot(wrong: Manifest) -> None:
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(SerializationError):
            decode_manifest(encode_manifest(wrong))


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


@pytest.mark.parametrize("private_names", [True, False], ids=["this torch", "without names of its own"])
def test_tensors_at_equal_distances_are_made_together(private_names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of a model, of three tensors each; one that is tied, and an empty one."""
    if not private_names:
        monkeypatch.setattr(version, "_NO_VIEW_TRACKING", None)
    rows = [(0, (2, 3)), (64, (4,)), (128, (2, 3)), (192, (2, 3)), (256, (4,)), (320, (2, 3)), (320, (2, 3))]
    storages = [Storage(0, offset, 64) for offset, _ in rows]
    places = [
        TensorPlace(f"t{index}", (f"t{index}",), "float32", shape, (3, 1)[-len(shape) :], index, 0)
        for index, (_, shape) in enumerate(rows)
    ]
    storages.append(Storage(0, 0, 0))
    places.append(TensorPlace("empty", ("empty",), "float32", (0, 3), (3, 1), len(rows), 0))
    layout = Layout(storages, places, [((), "dict")], [])
    layout.check()
    assert [run.tensors for run in layout.runs] == [[0, 2], [1, 4], [3, 5], [6]]
    memory = torch.arange(100.0)
    held = HeldVersion(Key(Claim(1, 7), 1), Manifest([CONTENT], layout, [0] * len(storages), b"", []))
    view = memoryview(memory.numpy()).cast("B")
    made = held.nested(held.tensors([view]))
    assert list(made) == [place.name for place in places]
    for place, (offset, shape) in zip(places, rows, strict=False):
        wanted = torch.as_strided(memory, shape, place.strides, offset // 4)
        assert torch.equal(made[place.name], wanted)
        assert made[place.name].data_ptr() == wanted.data_ptr()
    assert made["empty"].shape == (0, 3)
    made["t0"].mul_(torch.full((2, 3), 2.0, requires_grad=True))
    assert made["t0"].requires_grad


def test_the_name_of_a_dtype_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__getattr__", lambda name: pytest.fail(f"it looked for torch.{name}"))
    place = TensorPlace("x", ("x",), "_inductor", (1,), (1,), 0, 0)
    with pytest.raises(SerializationError, match="_inductor"):
        Layout([Storage(0, 0, 64)], [place], [((), "dict")], []).check()
