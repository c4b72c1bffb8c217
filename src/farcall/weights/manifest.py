"""The manifest of a version: everything about it but its bytes.

The publisher writes it, and every subscriber reads it. Subscribers trust it no further than the checks here go: no
tensor lies outside its storage, no storage outside its content. Values that are not tensors are flat or pickled
(`serialize`), and are decoded only when the program asks for them.

The *layout*, that is the list of tensors and their places, rarely changes from one push to the next, and is encoded
separately. A reader recognises a layout that it has checked before by its bytes, and reuses all that it derived then.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from farcall.channel.host_memory import ALIGNMENT_BYTES
from farcall.errors import SerializationError
from farcall.serialize.bounds import check_layout

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, from the outermost container."""


class Content(msgspec.Struct, array_like=True, frozen=True):
    """The bytes that a block holds from one filling to the next. They never change."""

    owner: int  # the incarnation of the block's owner
    block_id: int
    fill: int
    size_bytes: int


class Storage(msgspec.Struct, array_like=True, frozen=True):
    """The range of a content that holds one tensor, or several overlapping ones."""

    content: int  # its index in the manifest's list
    offset: int
    size_bytes: int


class TensorPlace(msgspec.Struct, array_like=True, frozen=True):
    """A tensor: its name, its type, and its place in a storage."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int  # its index in the layout's list
    offset: int  # in elements, inside the storage


class Run(msgspec.Struct):
    """Tensors of one shape at equal distances in one content, such as those of a model's layers.

    Torch makes all tensors of a run in two steps, in a third of the time that it needs for one at a time.
    """

    content: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # of the first tensor, in elements, inside the content
    pitch: int
    tensors: list[int]  # their indices in the layout's list

    def take(self, offset: int, tensor: int) -> bool:
        """Add a tensor, if it continues the run; the second tensor sets the pitch."""
        pitch = self.pitch if len(self.tensors) > 1 else offset - self.offset
        if pitch < 0 or offset != self.offset + pitch * len(self.tensors):
            return False
        self.pitch = pitch
        self.tensors.append(tensor)
        return True

    @property
    def is_unbroken(self) -> bool:
        """Are its tensors consecutive in the layout's list?"""
        return self.tensors[-1] - self.tensors[0] == len(self.tensors) - 1


class Layout(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """The part of the manifest that versions share: the tensors, and their places in contents."""

    storages: list[Storage]
    tensors: list[TensorPlace]
    containers: list[tuple[Path, Literal["dict", "list", "tuple"]]]
    value_paths: list[Path]

    @cached_property
    def size_bytes(self) -> int:
        """The size of all storages."""
        return sum(storage.size_bytes for storage in self.storages)

    @cached_property
    def content_sizes(self) -> dict[int, int]:
        """The minimum size of each content."""
        sizes: dict[int, int] = {}
        for storage in self.storages:
            if storage.size_bytes:  # the storage of an empty tensor has no place
                end = storage.offset + storage.size_bytes
                sizes[storage.content] = max(end, sizes.get(storage.content, 0))
        return sizes

    @cached_property
    def runs(self) -> list[Run]:
        """All tensors that have bytes, grouped into runs."""
        runs: list[Run] = []
        last: dict[tuple[object, ...], Run] = {}
        for index, place in enumerate(self.tensors):
            storage = self.storages[place.storage]
            if not storage.size_bytes:
                continue
            dtype = self.dtype_of(place)
            offset = storage.offset // dtype.itemsize + place.offset
            kind = (storage.content, dtype, place.shape, place.strides)
            run = last.get(kind)
            if run is None or not run.take(offset, index):
                last[kind] = run = Run(*kind, offset, 0, [index])
                runs.append(run)
        return runs

    @cached_property
    def empty(self) -> list[int]:
        """The indices of tensors without bytes."""
        return [index for index, place in enumerate(self.tensors) if not self.storages[place.storage].size_bytes]

    @cached_property
    def keys(self) -> list[str | int] | None:
        """The keys, if the source is one flat dict of tensors, like a state dict; else None."""
        if self.value_paths or self.containers != [((), "dict")]:
            return None
        return [place.path[0] for place in self.tensors]

    def dtype_of(self, place: TensorPlace) -> torch.dtype:
        """The torch dtype of a tensor in this layout."""
        dtype = vars(torch).get(place.dtype)  # not getattr, which may import
        if not isinstance(dtype, torch.dtype):
            raise SerializationError(f"{place.name} has the dtype {place.dtype!r}, which this torch does not know")
        return dtype

    def check(self) -> None:
        """Raise unless each tensor lies inside its storage, and each storage has a valid, aligned place."""
        for storage in self.storages:
            if storage.size_bytes and (
                min(storage.content, storage.offset, storage.size_bytes) < 0 or storage.offset % ALIGNMENT_BYTES
            ):
                raise SerializationError("a storage of a version has an impossible place")
        for place in self.tensors:
            if not 0 <= place.storage < len(self.storages):
                raise SerializationError(f"{place.name} has an impossible place")
            held_bytes = self.storages[place.storage].size_bytes
            try:
                check_layout(place.shape, place.strides, place.offset, self.dtype_of(place).itemsize, held_bytes)
            except ValueError as error:
                raise SerializationError(f"{place.name}: {error}") from None


class Manifest(msgspec.Struct, frozen=True):
    """A version without its bytes; see the module."""

    contents: list[Content]
    layout: Layout
    checksums: list[int]  # one for each storage
    values: bytes  # a list, encoded by `serialize`, in the order of the layout's ``value_paths``
    value_buffers: list[bytes]

    def check(self) -> None:
        """Raise unless the layout, already checked, fits into the contents."""
        if any(content.size_bytes < 0 for content in self.contents):
            raise SerializationError("a block of a version has an impossible size")
        if len(self.checksums) != len(self.layout.storages):
            raise SerializationError(f"{len(self.layout.storages)} storages have {len(self.checksums)} checksums")
        for index, size in self.layout.content_sizes.items():
            if index >= len(self.contents) or size > self.contents[index].size_bytes:
                raise SerializationError("a storage of a version lies outside of its block")


class _Encoded(msgspec.Struct, array_like=True, frozen=True):
    """A manifest on the wire."""

    layout: bytes
    contents: list[Content]
    checksums: list[int]
    values: bytes
    value_buffers: list[bytes]


_encode: Any = msgspec.msgpack.Encoder().encode
_decoder: Any = msgspec.msgpack.Decoder(_Encoded)
_layout_decoder: Any = msgspec.msgpack.Decoder(Layout)


@lru_cache(16)
def _decode_layout(data: bytes) -> Layout:
    layout: Layout = _layout_decoder.decode(data)
    layout.check()
    return layout


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest for the wire."""
    layout = _encode(manifest.layout)
    data: bytes = _encode(
        _Encoded(layout, manifest.contents, manifest.checksums, manifest.values, manifest.value_buffers)
    )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Decode and check the manifest in ``data``; raises ``SerializationError``."""
    try:
        found: _Encoded = _decoder.decode(data)
        layout = _decode_layout(found.layout)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SerializationError(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    manifest = Manifest(found.contents, layout, found.checksums, found.values, found.value_buffers)
    manifest.check()
    return manifest
