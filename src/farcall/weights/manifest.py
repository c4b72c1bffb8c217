"""The manifest of a version: everything about it but its bytes.

Written by the publisher, read by every subscriber, which trusts it no further than `check` goes: no tensor lies outside
its storage, no storage outside its content. Values that are no tensors are flat or pickled (`serialize`), and only read
when the program asks for them.

Most of it is the same from one push to the next: which tensors there are. That part is encoded by itself, so that who
has read it before knows it by its bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from farcall.channel.host_memory import ALIGNMENT_BYTES
from farcall.errors import SerializationError

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, from the outermost container."""


class Content(msgspec.Struct, array_like=True, frozen=True):
    """What a block holds from one filling to the next. Never changes."""

    owner: int  # its incarnation
    block_id: int
    fill: int
    size_bytes: int


class Storage(msgspec.Struct, array_like=True, frozen=True):
    """A range of a content that one tensor lies in, or several that overlap."""

    content: int  # its place in the manifest's list
    offset: int
    size_bytes: int
    checksum: int


class TensorPlace(msgspec.Struct, array_like=True, frozen=True):
    """A tensor."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int  # its place in the manifest's list
    offset: int  # in elements, inside of the storage


class Manifest(msgspec.Struct, frozen=True):
    """A version without its bytes."""

    contents: list[Content]
    storages: list[Storage]
    tensors: list[TensorPlace]
    containers: list[tuple[Path, Literal["dict", "list", "tuple"]]]
    value_paths: list[Path]
    values: bytes  # of `serialize`: a list, in the order of the paths
    value_buffers: list[bytes]

    @property
    def size_bytes(self) -> int:
        """What its tensors take."""
        return sum(storage.size_bytes for storage in self.storages)

    def _sizes(self) -> list[int]:
        return [storage.size_bytes for storage in self.storages]

    def dtype_of(self, place: TensorPlace) -> torch.dtype:
        """The dtype of a tensor in it."""
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise SerializationError(f"{place.name} has the dtype {place.dtype!r}, which this torch does not know")
        return dtype

    def check(self, like: Manifest | None = None) -> None:
        """Raise unless everything lies where it can lie. ``like``: another one, which was checked."""
        if any(content.size_bytes < 0 for content in self.contents):
            raise SerializationError("a block of a version has an impossible size")
        for storage in self.storages:
            if not storage.size_bytes:
                continue  # of an empty tensor: it lies nowhere
            content = self.contents[storage.content] if 0 <= storage.content < len(self.contents) else None
            if content is None or storage.offset < 0 or storage.offset % ALIGNMENT_BYTES or storage.size_bytes < 0:
                raise SerializationError("a storage of a version has an impossible place")
            if storage.offset + storage.size_bytes > content.size_bytes:
                raise SerializationError("a storage of a version lies outside of its block")
        if like is not None and self.tensors is like.tensors and self._sizes() == like._sizes():
            return  # as from one push to the next: this is on the way to every subscriber
        for place in self.tensors:
            if not 0 <= place.storage < len(self.storages) or len(place.shape) != len(place.strides):
                raise SerializationError(f"{place.name} has an impossible place")
            if min((0, place.offset, *place.shape, *place.strides)) < 0:
                raise SerializationError(f"{place.name} has an impossible shape")
            if 0 not in place.shape:
                last = sum((extent - 1) * stride for extent, stride in zip(place.shape, place.strides, strict=True))
                size = (place.offset + last + 1) * self.dtype_of(place).itemsize
                if size > self.storages[place.storage].size_bytes:
                    raise SerializationError(f"{place.name} lies outside of its storage")


class _Layout(msgspec.Struct, array_like=True, frozen=True):
    """What the manifests of one program have in common."""

    tensors: list[TensorPlace]
    containers: list[tuple[Path, Literal["dict", "list", "tuple"]]]
    value_paths: list[Path]


class _Encoded(msgspec.Struct, array_like=True, frozen=True):
    """A manifest as it travels."""

    layout: bytes
    contents: list[Content]
    storages: list[Storage]
    values: bytes
    value_buffers: list[bytes]


_encode: Any = msgspec.msgpack.Encoder().encode
_decoder: Any = msgspec.msgpack.Decoder(_Encoded)
_layout_decoder: Any = msgspec.msgpack.Decoder(_Layout)


@lru_cache(16)
def _decode_layout(data: bytes) -> _Layout:
    layout: _Layout = _layout_decoder.decode(data)
    return layout


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as it travels."""
    layout = _encode(_Layout(manifest.tensors, manifest.containers, manifest.value_paths))
    encoded = _Encoded(layout, manifest.contents, manifest.storages, manifest.values, manifest.value_buffers)
    data: bytes = _encode(encoded)
    return data


def decode_manifest(data: bytes, like: Manifest | None = None) -> Manifest:
    """The manifest in ``data``, checked; or ``SerializationError``. ``like``: the one before, perhaps much the same."""
    try:
        found: _Encoded = _decoder.decode(data)
        layout = _decode_layout(found.layout)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SerializationError(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    manifest = Manifest(
        found.contents,
        found.storages,
        layout.tensors,
        layout.containers,
        layout.value_paths,
        found.values,
        found.value_buffers,
    )
    manifest.check(like)
    return manifest
