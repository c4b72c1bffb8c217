"""The manifest of a version: everything about it but its bytes.

Written by the publisher, read by every subscriber, which trusts it no further than the checks here go: no tensor lies
outside its storage, no storage outside its content. Values that are no tensors are flat or pickled (`serialize`), and
only read when the program asks for them.

Most of it is the same from one push to the next: which tensors there are, and where they lie. That part, the *layout*,
is encoded by itself. Who has read and checked it before knows it by its bytes, and has what was worked out from it.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
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


class TensorPlace(msgspec.Struct, array_like=True, frozen=True):
    """A tensor."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int  # its place in the layout's list
    offset: int  # in elements, inside of the storage


class Run(msgspec.Struct):
    """Tensors that are alike and lie at equal distances in one content, as those of a model's layers do.

    Torch makes all of them in two steps, in a third of the time that it takes to make them one by one.
    """

    content: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # of the first, in elements, inside of the content
    pitch: int
    tensors: list[int]  # their places in the layout's list

    def take(self, offset: int, tensor: int) -> bool:
        """Add a tensor, if it lies where the next one would."""
        pitch = self.pitch if len(self.tensors) > 1 else offset - self.offset
        if pitch < 0 or offset != self.offset + pitch * len(self.tensors):
            return False
        self.pitch = pitch
        self.tensors.append(tensor)
        return True


class Layout(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """What the versions of one program have in common: its tensors, and where they lie in contents."""

    storages: list[Storage]
    tensors: list[TensorPlace]
    containers: list[tuple[Path, Literal["dict", "list", "tuple"]]]
    value_paths: list[Path]

    @cached_property
    def size_bytes(self) -> int:
        """What its tensors take."""
        return sum(storage.size_bytes for storage in self.storages)

    @cached_property
    def content_sizes(self) -> dict[int, int]:
        """The size that each content must have, at least."""
        sizes: dict[int, int] = {}
        for storage in self.storages:
            if storage.size_bytes:  # else it is of an empty tensor, and lies nowhere
                end = storage.offset + storage.size_bytes
                sizes[storage.content] = max(end, sizes.get(storage.content, 0))
        return sizes

    @cached_property
    def runs(self) -> list[Run]:
        """All tensors that have bytes."""
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
    def keys(self) -> list[str | int] | None:
        """The keys of what is one dict of tensors, as a state dict is; None: it is something else."""
        if self.value_paths or self.containers != [((), "dict")]:
            return None
        return [place.path[0] for place in self.tensors]

    def dtype_of(self, place: TensorPlace) -> torch.dtype:
        """The dtype of a tensor in it."""
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise SerializationError(f"{place.name} has the dtype {place.dtype!r}, which this torch does not know")
        return dtype

    def check(self) -> None:
        """Raise unless each tensor lies in its storage, and each storage where one can lie."""
        for storage in self.storages:
            if storage.size_bytes and (
                min(storage.content, storage.offset, storage.size_bytes) < 0 or storage.offset % ALIGNMENT_BYTES
            ):
                raise SerializationError("a storage of a version has an impossible place")
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


class Manifest(msgspec.Struct, frozen=True):
    """A version without its bytes."""

    contents: list[Content]
    layout: Layout
    checksums: list[int]  # of the storages
    values: bytes  # of `serialize`: a list, in the order of the layout's paths
    value_buffers: list[bytes]

    def check(self) -> None:
        """Raise unless the layout, which was checked, fits into the contents."""
        if any(content.size_bytes < 0 for content in self.contents):
            raise SerializationError("a block of a version has an impossible size")
        if len(self.checksums) != len(self.layout.storages):
            raise SerializationError(f"{len(self.layout.storages)} storages have {len(self.checksums)} checksums")
        for index, size in self.layout.content_sizes.items():
            if index >= len(self.contents) or size > self.contents[index].size_bytes:
                raise SerializationError("a storage of a version lies outside of its block")


class _Encoded(msgspec.Struct, array_like=True, frozen=True):
    """A manifest as it travels."""

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
    """The manifest as it travels."""
    layout = _encode(manifest.layout)
    data: bytes = _encode(
        _Encoded(layout, manifest.contents, manifest.checksums, manifest.values, manifest.value_buffers)
    )
    return data


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``, checked; or ``SerializationError``."""
    try:
        found: _Encoded = _decoder.decode(data)
        layout = _decode_layout(found.layout)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SerializationError(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    manifest = Manifest(found.contents, layout, found.checksums, found.values, found.value_buffers)
    manifest.check()
    return manifest
