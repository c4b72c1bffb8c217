"""A version at a member that can read it: its manifest, the blocks that hold its bytes, and tensors over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from farcall.errors import CorruptWeights, SerializationError
from farcall.protocol.frames import RESPONSE, Frame
from farcall.protocol.weights.messages import Key, OnDevice
from farcall.serialize import read_value
from farcall.weights.checksums import checksum
from farcall.weights.manifest import Manifest, Path
from farcall.weights.memory import Block, BorrowedBlock

_NO_VIEW_TRACKING: Callable[[], AbstractContextManager[None]] | None
try:
    _NO_VIEW_TRACKING = partial(
        torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    )
except AttributeError:  # private names of torch, which may change
    _NO_VIEW_TRACKING = None


_FIXED = (type(None), bool, int, float, complex, str, bytes)


def _is_fixed(value: Any) -> bool:
    """Can nobody change this value? Of a subclass, which may have attributes, that is not known."""
    return type(value) in _FIXED or (type(value) is tuple and all(map(_is_fixed, value)))


class Version(NamedTuple):
    """A version of published weights; later versions compare greater.

    The epoch grows with each publisher that takes over the name, the number with each push.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class WeightsMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one name that a worker publishes or subscribes to."""

    name: str
    role: str
    """"publishes" or "subscribes"."""
    state: str
    """As `protocol/weights` calls it: "published", "superseded", "subscribed", "orphaned" ..."""
    epoch: int
    number: int
    """The newest version pushed here, or ready here; 0: none yet."""
    size_bytes: int
    """The size of that version's tensors."""
    versions: int
    """How many versions this worker keeps."""
    total: int
    """How many versions were pushed here, or became the newest here, so far."""


class HeldVersion:
    """A version that is ready or arriving; ``blocks`` are in the order of the manifest's contents.

    Mutable: all fields but the key and the manifest; they are filled in as the version arrives.
    """

    def __init__(self, key: Key, manifest: Manifest) -> None:
        self.key: Key = key
        self.manifest: Manifest = manifest
        self.blocks: Sequence[Block | BorrowedBlock] = ()
        self.own_blocks: list[Block] = []
        """The blocks of this node that its bytes were fetched into."""
        self.on_devices: Sequence[OnDevice] = ()
        """The contents that also lie in device memory of the publisher."""
        self.was_fetched: bool = False
        """Is it a copy, here or at a neighbour, rather than the publisher's own memory?"""
        self.fault: str = ""
        """Why programs cannot read it, although it is complete."""
        self._values: list[Any] | None = None  # kept only if nobody can change them

    @property
    def version(self) -> Version:
        """The version's identity in the public API."""
        return Version(self.key.claim.epoch, self.key.number)

    def verify(self) -> None:
        """Compare all bytes with their checksums; raises `CorruptWeights`."""
        layout = self.manifest.layout
        for index, (storage, wanted) in enumerate(zip(layout.storages, self.manifest.checksums, strict=True)):
            if not storage.size_bytes:
                continue
            view = self.blocks[storage.content].view[storage.offset : storage.offset + storage.size_bytes]
            if checksum(view) != wanted:
                names = ", ".join(place.name for place in layout.tensors if place.storage == index)
                raise CorruptWeights(f"version {self.version}: the bytes of {names} are not those that were pushed")

    def values(self) -> dict[Path, Any]:
        """The values that are not tensors, decoded under the rules of `farcall.allow`.

        Decoded for each caller, unless none of them can be changed: a program may change what it gets.
        """
        manifest, paths = self.manifest, self.manifest.layout.value_paths
        values = self._values
        if values is None:
            frame = Frame(RESPONSE, payload=manifest.values)
            frame.buffers = [memoryview(bytearray(buffer)) for buffer in manifest.value_buffers]
            values = read_value(frame) if paths else []
            if all(map(_is_fixed, values)):
                self._values = values
        return dict(zip(paths, values, strict=True))

    def tensors(self, views: Sequence[memoryview | torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, in the manifest's order, over ``views`` of the contents, without copies."""
        layout = self.manifest.layout
        # One tensor for each block and dtype, so that tied tensors share torch's storage.
        wholes: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        found: list[Any] = [None] * len(layout.tensors)
        for run in layout.runs:
            whole = wholes.get((run.content, run.dtype))
            if whole is None:
                view = views[run.content]
                count = view.nbytes // run.dtype.itemsize
                if isinstance(view, torch.Tensor):
                    whole = view[: count * run.dtype.itemsize].view(run.dtype)
                else:
                    whole = torch.frombuffer(view, dtype=run.dtype, count=count)
                wholes[run.content, run.dtype] = whole
            if len(run.tensors) == 1:
                found[run.tensors[0]] = torch.as_strided(whole, run.shape, run.strides, run.offset)
                continue
            shape, strides = (len(run.tensors), *run.shape), (run.pitch, *run.strides)
            # Make independent tensors: torch forbids in-place changes, with an operand that requires grad, to views
            # that one call returned together. (`detach` of each view would take as long again.)
            with nullcontext() if _NO_VIEW_TRACKING is None else _NO_VIEW_TRACKING():
                tensors = torch.as_strided(whole, shape, strides, run.offset).unbind()
            if _NO_VIEW_TRACKING is None:
                tensors = tuple(tensor.detach() for tensor in tensors)
            if run.is_unbroken:
                found[run.tensors[0] : run.tensors[-1] + 1] = tensors
            else:
                for index, tensor in zip(run.tensors, tensors, strict=True):
                    found[index] = tensor
        for index in layout.empty:
            place = layout.tensors[index]
            found[index] = torch.empty(place.shape, dtype=layout.dtype_of(place))
        return found

    def nested(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tensors and the other values, nested in their containers as they were published."""
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
                # Containers come before leaves, so a list is not filled in order: extend it to each index.
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
