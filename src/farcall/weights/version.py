"""A version at a member that can read it: its manifest, the blocks that its bytes lie in, and tensors over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farcall.errors import CorruptWeights, SerializationError
from farcall.protocol.frames import RESPONSE, Frame
from farcall.protocol.weights.messages import Key
from farcall.serialize import read_value
from farcall.weights.checksums import checksum
from farcall.weights.manifest import Manifest, Path
from farcall.weights.memory import Block, BorrowedBlock

_FLAT = [((), "dict")]
"""The containers of what is one dict of tensors, as a state dict is."""


class Version(NamedTuple):
    """A version of published weights; a later one is greater.

    The epoch grows with each publisher that takes the name over, the number with each push.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class NameFigures(NamedTuple):
    """One name that a node publishes or subscribes to; ``total`` counts its versions so far."""

    name: str
    role: str
    state: str
    epoch: int
    number: int
    size_bytes: int
    versions: int
    total: int


class HeldVersion:
    """A version that is ready, or arrives; ``blocks`` are in the order of the manifest's contents."""

    def __init__(self, key: Key, manifest: Manifest) -> None:
        self.key: Key = key
        self.manifest: Manifest = manifest
        self.blocks: Sequence[Block | BorrowedBlock] = ()
        self.own_blocks: list[Block] = []
        """Those of this node's own that its bytes were fetched into."""
        self.was_fetched: bool = False
        """Does it lie in copies, here or at a neighbour, and not in the memory of its publisher?"""
        self.fault: str = ""
        """Why it cannot be read, though it is complete."""
        self._values: list[Any] | None = None

    @property
    def version(self) -> Version:
        """What programs call it."""
        return Version(self.key.claim.epoch, self.key.number)

    def verify(self) -> None:
        """Compare all bytes with their checksums."""
        manifest = self.manifest
        for index, storage in enumerate(manifest.storages):
            if not storage.size_bytes:
                continue
            view = self.blocks[storage.content].view[storage.offset : storage.offset + storage.size_bytes]
            if checksum(view) != storage.checksum:
                names = ", ".join(place.name for place in manifest.tensors if place.storage == index)
                raise CorruptWeights(f"version {self.version}: the bytes of {names} are not those that were pushed")

    def values(self) -> dict[Path, Any]:
        """The values that are no tensors. Read at first use, under the rules of `farcall.allow`."""
        manifest = self.manifest
        if self._values is None:
            frame = Frame(RESPONSE, payload=manifest.values)
            frame.buffers = [memoryview(bytearray(buffer)) for buffer in manifest.value_buffers]
            self._values = read_value(frame) if manifest.value_paths else []
        return dict(zip(manifest.value_paths, self._values, strict=True))

    def tensors(self, views: Sequence[memoryview]) -> list[torch.Tensor]:
        """The tensors, in the manifest's order, over ``views`` of the blocks: no copies."""
        storages = self.manifest.storages
        # Of each block and dtype one tensor, so that tied ones share torch's storage; and the size of its elements.
        wholes: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        found = []
        for place in self.manifest.tensors:
            storage = storages[place.storage]
            try:
                whole, itemsize = wholes[storage.content, place.dtype]
            except KeyError:
                dtype = self.manifest.dtype_of(place)
                if not storage.size_bytes:
                    found.append(torch.empty(place.shape, dtype=dtype))
                    continue
                view, itemsize = views[storage.content], dtype.itemsize
                whole = torch.frombuffer(view, dtype=dtype, count=view.nbytes // itemsize)
                wholes[storage.content, place.dtype] = whole, itemsize
            found.append(torch.as_strided(whole, place.shape, place.strides, storage.offset // itemsize + place.offset))
        return found

    def nested(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Tensors and other values in the containers that they were published in."""
        if self.manifest.containers == _FLAT and not self.manifest.value_paths:
            return dict(zip((place.path[0] for place in self.manifest.tensors), tensors, strict=True))
        leaves: dict[Path, Any] = dict(zip((place.path for place in self.manifest.tensors), tensors, strict=True))
        leaves |= self.values()
        made: dict[Path, Any] = {}
        for path, kind in self.manifest.containers:
            made[path] = {} if kind == "dict" else []
        for path, value in [*made.items(), *leaves.items()]:
            if not path:
                continue
            parent = made[path[:-1]]
            if isinstance(parent, list):
                # Containers and leaves come in two rows: put each where it belongs.
                index = int(path[-1])
                if not 0 <= index < len(made) + len(leaves):
                    raise SerializationError(f"version {self.version}: no list has a place {index}")
                parent.extend([None] * (index + 1 - len(parent)))
                parent[index] = value
            else:
                parent[path[-1]] = value
        for path, kind in reversed(self.manifest.containers):
            if kind == "tuple" and path:
                made[path[:-1]][path[-1]] = tuple(made[path])
        return made[()]
