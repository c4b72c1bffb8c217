"""Weights in parts: several publishers push each their own part of one name, and subscribers take slices.

A layer above publications and subscriptions, which knows neither memory nor messages: part 1 of 4 of a name is
published under a name of its own, with a table of where each of its tensors lies in the whole one (a *box*). Version n
of the name is version n of all parts, and exists once each of them is here.

Nobody needs the whole of a tensor: what a subscriber loads is copied, box by box, out of the parts that it lies in.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

import torch

from farcall.errors import PublicationClosed, RpcTimeout
from farcall.rpc.call import UNSET_TIMEOUT
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime
from farcall.weights.layout import name_of, take_apart
from farcall.weights.loading import Slices, why_not_loadable
from farcall.weights.node import Weights
from farcall.weights.publication import Publication
from farcall.weights.subscription import Subscription
from farcall.weights.version import Version

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop of each dimension, in the whole tensor."""


class Part(NamedTuple):
    """A part of a tensor, in the place of the tensor where it is published; a `DTensor` needs none."""

    tensor: torch.Tensor
    shape: Sequence[int]
    """Of the whole tensor."""
    offset: Sequence[int]
    """Where the part begins, in each dimension."""


def publish_part(name: str, source: Any, *, part: int, parts: int, keep: int = 2) -> PartPublication:
    """Publish this worker's part of the tensors of ``name``; the other parts are published by other workers.

    A version exists when all parts of it do: each publisher pushes as often as the others. One that takes a part over
    goes on with its numbers.

    Args:
        name: what subscribers ask for, by `subscribe_parts`.
        source: as for `publish`. A `DTensor` stands for the part of it that is here; so does a `Part`, with the shape
            of the whole tensor and an offset. Any other tensor is whole.
        part: which part this is, counted from 0.
        parts: how many there are.
        keep: as for `publish`.
    """
    name_of_part, published = _part_name(name, part, parts), take_part(source)
    publication = current_runtime().part(Weights).publish(name_of_part, published, keep)
    return PartPublication(publication, source, published)


def subscribe_parts(name: str, parts: int) -> PartsSubscription:
    """Read the versions of what is published under ``name`` in so many parts; whole tensors, or slices of them."""
    names = [_part_name(name, part, parts) for part in range(parts)]
    if not names:
        raise ValueError("subscribe to at least one part")
    weights = current_runtime().part(Weights)
    return PartsSubscription(name, [weights.subscribe(one) for one in names])


def _part_name(name: str, part: int, parts: int) -> str:
    if not isinstance(parts, int) or not isinstance(part, int) or not 0 <= part < parts:
        raise ValueError(f"part {part!r} of {parts!r}: parts are counted from 0")
    return f"{name} [{part} of {parts}]"


class PartPublication:
    """One worker's part of what is published under a name; see `farcall.publish_part`."""

    def __init__(self, publication: Publication, source: Any, published: dict[str, Any]) -> None:
        """``published`` is what ``publication`` publishes; it is made anew for each push."""
        self._publication = publication
        self._source = source
        self._published = published
        self._pushing = threading.Lock()  # from the taking of the part to its copy

    @property
    def version(self) -> Version | None:
        """The version pushed last."""
        return self._publication.version

    def push(self, *, only: Iterable[str] | None = None, dtype: torch.dtype | None = None) -> Version:
        """Make the values of this part, as they are now, its next version; see `Publication.push`."""
        names = None if only is None else [f"tensors.{name}" for name in only]
        self._publication.check()
        with self._pushing:
            self._published.clear()
            self._published.update(take_part(self._source))
            return self._publication.push(only=names, dtype=dtype)

    def close(self) -> None:
        """Publish this no more."""
        self._publication.close()

    def __enter__(self) -> PartPublication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PartPublication: {self._publication!r}>"


def take_part(source: Any) -> dict[str, Any]:
    """What is published of a worker's part: its tensors, where they lie in the whole ones, and its other values."""
    leaves = take_apart(source)
    tensors: dict[str, torch.Tensor] = {}
    layout: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    values: dict[str, Any] = {}
    for path, value in [*leaves.tensors.items(), *leaves.values.items()]:
        name = name_of(path)
        if isinstance(value, Part):
            local, shape, offset = value.tensor.detach(), tuple(value.shape), tuple(value.offset)
        elif _is_distributed(value):
            local, shape, offset = _local_part(value)
        elif isinstance(value, torch.Tensor):
            local, shape, offset = value, tuple(value.shape), (0,) * value.ndim
        else:
            values[name] = value
            continue
        ends = [start + extent for start, extent in zip(offset, local.shape, strict=False)]
        if not local.ndim == len(shape) == len(offset) or any(
            start < 0 or end > extent for start, end, extent in zip(offset, ends, shape, strict=True)
        ):
            raise ValueError(f"{name}: {tuple(local.shape)} at {offset} is no part of {shape}")
        tensors[name], layout[name] = local, (shape, offset)
    return {"tensors": tensors, "layout": layout, "values": values}


def _is_distributed(value: Any) -> bool:
    # A program that has one has loaded this.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError("a DTensor with a pending sum cannot be published: redistribute it first")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(tensor.shape), tuple(offset)


class _Piece(NamedTuple):
    """A tensor of one part."""

    tensor: torch.Tensor
    box: Box


class _Found(NamedTuple):
    """A version: the shapes of its tensors, the pieces that there are of each, and its other values."""

    version: Version
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, list[_Piece]]
    values: dict[str, Any]


class PartsSubscription:
    """The versions of a name that is published in parts; see `farcall.subscribe_parts`."""

    def __init__(self, name: str, parts: Sequence[Subscription]) -> None:
        self.name: str = name
        self._parts = parts

    @property
    def version(self) -> Version | None:
        """The newest version of which all parts are here."""
        numbered = [{version.number: version for version in part.versions} for part in self._parts]
        common = set.intersection(*(set(found) for found in numbered))
        if not common:
            return None
        number = max(common)
        return Version(max(found[number].epoch for found in numbered), number)

    def wait(self, newer_than: Version | None = None, timeout: float | None = UNSET_TIMEOUT) -> Version:
        """Return the newest version as soon as all its parts are here and it is newer than ``newer_than``."""
        deadline, _ = self._parts[0]._deadline(timeout)
        while True:
            late, last = self._latest()
            found = self.version
            if found is not None and (newer_than is None or found > newer_than):
                return found
            left_s = max(0.0, deadline - monotonic())
            try:
                late.wait(newer_than=last, timeout=None if deadline == NEVER else max(left_s, 1e-3))
            except RpcTimeout as error:
                raise RpcTimeout(f"a part of a version of {self.name!r} is missing: {error}", error.delivery) from None

    def _latest(self) -> tuple[Subscription, Version | None]:
        """The part that is behind the others, and its newest version.

        To be asked before `version` is: what arrives between the two looks is not waited for.
        """
        newest = [(part, part.version) for part in self._parts]
        return min(newest, key=lambda one: -1 if one[1] is None else one[1].number)

    async def __aiter__(self) -> AsyncIterator[Version]:
        """Each newest version as it becomes complete."""
        last: Version | None = None
        while True:
            late, newest = self._latest()
            found = self.version
            if found is not None and (last is None or found > last):
                last = found
                yield found
                continue
            try:
                await late._next(newest)
            except PublicationClosed:
                return

    def load_into(self, target: Any, *, slices: Slices | None = None) -> Version:
        """Copy the newest version into the tensors of ``target``, in place: all of it, or nothing; return which.

        ``slices`` are of the whole tensors, as in `Subscription.load_into`, with steps of 1. Floating-point dtypes are
        converted.
        """
        found = self._read()
        wanted = {name_of(path): tensor for path, tensor in take_apart(target).tensors.items()}
        copies = []
        for name, tensor in wanted.items():
            if name not in found.shapes:
                raise ValueError(f"version {found.version} does not fit, and nothing was loaded: {name} is not in it")
            copies += _plan(name, tensor, _box(name, found.shapes[name], (slices or {}).get(name)), found.pieces[name])
            for why_not in filter(None, (why_not_loadable(tensor, piece.tensor.dtype) for piece in found.pieces[name])):
                raise ValueError(f"version {found.version} does not fit, and nothing was loaded: {name} {why_not}")
        with torch.inference_mode():  # it may write to both kinds of tensors
            for to, source in copies:
                to.copy_(source)
        return found.version

    def get(self) -> dict[str, Any]:
        """The newest version by the names of its tensors, put together: whole tensors, copied."""
        found = self._read()
        whole: dict[str, Any] = {}
        for name, pieces in found.pieces.items():
            whole[name] = torch.empty(found.shapes[name], dtype=pieces[0].tensor.dtype)
            for to, source in _plan(name, whole[name], _box(name, found.shapes[name], None), pieces):
                to.copy_(source)
        return {**whole, **found.values}

    def close(self) -> None:
        """Want no more versions."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> PartsSubscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PartsSubscription to {self.name!r} in {len(self._parts)} parts: version {self.version}>"

    def _read(self) -> _Found:
        """The newest version. What is returned holds it."""
        while True:
            version = self.version
            if version is None:
                raise LookupError(f"no version of {self.name!r} has arrived: call wait() first")
            try:
                parts = [self._part(part, version.number) for part in self._parts]
            except LookupError:
                continue  # newer ones have come since, and this one is gone
            found = _Found(version, {}, {}, {})
            for part in parts:
                found.values.update(part["values"])
                for name, tensor in part["tensors"].items():
                    shape, offset = (tuple(one) for one in part["layout"][name])
                    if found.shapes.setdefault(name, shape) != shape:
                        raise ValueError(f"{name} has the shape {found.shapes[name]} in one part, {shape} in another")
                    box = tuple((start, start + extent) for start, extent in zip(offset, tensor.shape, strict=True))
                    found.pieces.setdefault(name, []).append(_Piece(tensor, box))
            return found

    def _part(self, part: Subscription, number: int) -> Mapping[str, Any]:
        found = [version for version in part.versions if version.number == number]
        if not found:
            raise LookupError(number)
        held: Mapping[str, Any] = part.get(found[-1])
        return held


def _box(name: str, shape: Sequence[int], slices: Sequence[slice | int] | None) -> Box:
    chosen = tuple(slices or ())
    if len(chosen) > len(shape) or not all(isinstance(one, slice) and one.step in (None, 1) for one in chosen):
        raise ValueError(f"{name}, of shape {tuple(shape)}: of weights in parts, slices with a step of 1 can be loaded")
    whole = [slice(None)] * (len(shape) - len(chosen))
    return tuple(one.indices(extent)[:2] for one, extent in zip((*chosen, *whole), shape, strict=True))  # type: ignore[union-attr]


def _plan(
    name: str, target: torch.Tensor, wanted: Box, pieces: Sequence[_Piece]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies that fill ``target``, the part ``wanted`` of a tensor, from the pieces that there are of it."""
    extents = tuple(max(0, stop - start) for start, stop in wanted)
    if tuple(target.shape) != extents:
        raise ValueError(f"{name} has the shape {extents}, the target's has {tuple(target.shape)}: nothing was loaded")
    copies, covered = [], 0
    seen: dict[Box, Box] = {}  # of each piece, what is wanted of it
    for piece in pieces:
        common = tuple(
            (max(start, begin), min(stop, end)) for (start, stop), (begin, end) in zip(wanted, piece.box, strict=True)
        )
        if any(start >= stop for start, stop in common) or piece.box in seen:
            continue  # apart; or a replica
        seen[piece.box] = common
        source = piece.tensor[_within(common, piece.box)]
        copies.append((target[_within(common, wanted)], source))
        covered += source.numel()
    overlap = any(itertools.starmap(_meet, itertools.combinations(seen.values(), 2)))
    if covered != target.numel() or overlap:
        raise ValueError(
            f"{name}: the parts of this version hold {covered} of the {target.numel()} elements asked for, or some of "
            "them twice; nothing was loaded"
        )
    return copies


def _meet(one: Box, other: Box) -> bool:
    return all(start < end and begin < stop for (start, stop), (begin, end) in zip(one, other, strict=True))


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, outer, strict=True))
