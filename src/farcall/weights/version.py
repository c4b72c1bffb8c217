"""A version at a member that can read it: its manifest, the blocks that its bytes lie in, and tensors over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from farcall.errors import CorruptWeights, SerializationError
from farcall.protocol.frames import RESPONSE, Frame
from farcall.protocol.weights.messages import Key
from farcall.serialize import read_value
from farcall.weights.checksums import checksum
from farcall.weights.manifest import Manifest, Path
from farcall.weights.memory import Block, BorrowedBlock


class Version(NamedTuple):
    """A version of published weights; a later one is greater.

    The epoch grows with each publisher that takes the name over, the number with each push.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class WeightsMetrics(msgspec.Struct, frozen=True, array_like=True):
    """One name that a worker publishes, or subscribes to."""

    name: str
    role: str
    """"publishes" or "subscribes"."""
    state: str
    """As `protocol/weights` calls it: "published", "superseded", "subscribed", "orphaned" ..."""
    epoch: int
    number: int
    """The newest version pushed here, or ready here; 0: none yet."""
    size_bytes: int
    """Of the tensors of that version."""
    versions: int
    """How many are kept here."""
    total: int
    """How many were pushed here, or became the newest one here, so far."""


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
        layout = self.manifest.layout
        for index, (storage, wanted) in enumerate(zip(layout.storages, self.manifest.checksums, strict=True)):
            if not storage.size_bytes:
                continue
            view = self.blocks[storage.content].view[storage.offset : storage.offset + storage.size_bytes]
            if checksum(view) != wanted:
                names = ", ".join(place.name for place in layout.tensors if place.storage == index)
                raise CorruptWeights(f"version {self.version}: the bytes of {names} are not those that were pushed")

    def values(self) -> dict[Path, Any]:
        """The values that are no tensors. Read at first use, under the rules of `farcall.allow`."""
        manifest, paths = self.manifest, self.manifest.layout.value_paths
        if self._values is None:
            frame = Frame(RESPONSE, payload=manifest.values)
            frame.buffers = [memoryview(bytearray(buffer)) for buffer in manifest.value_buffers]
            self._values = read_value(frame) if paths else []
        return dict(zip(paths, self._values, strict=True))

    def tensors(self, views: Sequence[memoryview]) -> list[torch.Tensor]:
        """The tensors, in the manifest's order, over ``views`` of the blocks: no copies."""
        layout = self.manifest.layout
        # Of each block and dtype one tensor, so that tied ones share torch's storage.
        wholes: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        found: list[torch.Tensor | None] = [None] * len(layout.tensors)
        for run in layout.runs:
            whole = wholes.get((run.content, run.dtype))
            if whole is None:
                view = views[run.content]
                whole = torch.frombuffer(view, dtype=run.dtype, count=view.nbytes // run.dtype.itemsize)
                wholes[run.content, run.dtype] = whole
            if len(run.tensors) == 1:
                found[run.tensors[0]] = torch.as_strided(whole, run.shape, run.strides, run.offset)
                continue
            shape, strides = (len(run.tensors), *run.shape), (run.pitch, *run.strides)
            for index, tensor in zip(
                run.tensors, torch.as_strided(whole, shape, strides, run.offset).unbind(), strict=True
            ):
                found[index] = tensor
        return [
            torch.empty(place.shape, dtype=layout.dtype_of(place)) if tensor is None else tensor
            for place, tensor in zip(layout.tensors, found, strict=True)
        ]

    def nested(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Tensors and other values in the containers that they were published in."""
        layout = self.manifest.layout
        if layout.keys is not None:
            return dict(zip(layout.keys, tensors, strict=True))
        leaves: dict[Path, Any] = dict(zip((place.path for place in layout.tensors), tensors, strict=True))
        leaves |= self.values()
        made: dict[Path, Any] = {}
        for path, kind in layout.containers:
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
        for path, kind in reversed(layout.containers):
            if kind == "tuple" and path:
                made[path[:-1]][path[-1]] = tuple(made[path])
        return made[()]
