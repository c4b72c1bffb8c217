"""Weights in parts: each of several publishers pushes its own part of one name, and subscribers load slices.

A layer above publications and subscriptions, which knows neither memory nor messages. Each part of a name is published
under a name of its own, with a table of the place of each tensor in the whole tensor (a *box*). Version n of the name
consists of version n of all parts, and exists here once all of them have arrived.

No member needs a whole tensor: a subscriber copies what it loads, box by box, out of the parts that hold it.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from farcall.errors import PublicationClosed, RpcTimeout
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime
from farcall.weights.layout import name_of, take_apart
from farcall.weights.loading import Pairs, Slices, Views, copy_out, why_not_loadable
from farcall.weights.node import Weights
from farcall.weights.publication import Publication
from farcall.weights.subscription import Subscription
from farcall.weights.version import Version

T = TypeVar("T")
Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of the whole tensor."""


class Part(NamedTuple):
    """A part of a tensor, to be published in the place of that tensor. A `DTensor` needs no `Part`."""

    tensor: torch.Tensor
    shape: Sequence[int]
    """The shape of the whole tensor."""
    offset: Sequence[int]
    """The start of the part in each dimension."""


def publish_part(name: str, source: Any, *, part: int, parts: int, keep: int = 2) -> PartPublication:
    """Publish this worker's part of the tensors of ``name``; other workers publish the other parts.

    A version exists when all its parts exist, so all publishers must push equally often. A publisher that takes over a
    part continues its version numbers.

    Args:
        name: the name that subscribers pass to `subscribe_parts`.
        source: as for `publish`. For a `DTensor` its local part is published; for a `Part` its tensor, at an offset in
            the shape of the whole tensor. Any other tensor is whole.
        part: the number of this part, counted from 0.
        parts: the number of parts.
        keep: as for `publish`.
    """
    name_of_part, published = _part_name(name, part, parts), take_part(source)
    publication = current_runtime().part(Weights).publish(name_of_part, published, keep)
    return PartPublication(publication, source, published)


def subscribe_parts(name: str, parts: int) -> PartsSubscription:
    """Subscribe to weights that are published under ``name`` in ``parts`` parts; read whole tensors, or slices."""
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
    """One worker's part of the weights published under a name; see `farcall.publish_part`."""

    def __init__(self, publication: Publication, source: Any, published: dict[str, Any]) -> None:
        """``published`` is the source of ``publication``; each push fills it anew."""
        self._publication = publication
        self._source = source
        self._published = published
        self._pushing = threading.Lock()  # from the update of ``published`` to the end of its copy

    @property
    def version(self) -> Version | None:
        """The version pushed last."""
        return self._publication.version

    def push(self, *, only: Iterable[str] | None = None, dtype: torch.dtype | None = None) -> Version:
        """Publish the current values of this part as its next version; see `Publication.push`."""
        names = None if only is None else [f"tensors.{name}" for name in only]
        self._publication.check()
        with self._pushing:
            self._published.clear()
            self._published.update(take_part(self._source))
            return self._publication.push(only=names, dtype=dtype)

    def close(self) -> None:
        """Stop publishing this part."""
        self._publication.close()

    def __enter__(self) -> PartPublication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PartPublication: {self._publication!r}>"


def take_part(source: Any) -> dict[str, Any]:
    """The dict to publish for a worker's part: its tensors, their places in the whole tensors, and its other values."""
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
    # A program with a DTensor has loaded this module; importing it here would cost all others.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError("a DTensor with a pending sum cannot be published: redistribute it first")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(tensor.shape), tuple(offset)


class _Piece(NamedTuple):
    """The tensor of one part, and its place in the whole tensor."""

    tensor: torch.Tensor
    box: Box


class _Found(NamedTuple):
    """A version: the shapes of its whole tensors, the pieces of each, and its other values."""

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
        """The newest version of which all parts have arrived."""
        numbered = [{version.number: version for version in part.versions} for part in self._parts]
        common = set.intersection(*(set(found) for found in numbered))
        if not common:
            return None
        number = max(common)
        return Version(max(found[number].epoch for found in numbered), number)

    def wait(self, newer_than: Version | None = None, timeout: float | None = UNSET_TIMEOUT) -> Version:
        """Wait for a version that is newer than ``newer_than`` and complete; return the newest such version."""
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
        """The part that is furthest behind, and its newest version.

        Call this before reading `version`: then a part that arrives in between ends the wait that follows at once.
        """
        newest = [(part, part.version) for part in self._parts]
        return min(newest, key=lambda one: -1 if one[1] is None else one[1].number)

    async def __aiter__(self) -> AsyncIterator[Version]:
        """Yield each newest version when it becomes complete."""
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
        """Copy the newest version, all of it or nothing, into the tensors of ``target``, in place; return the version.

        ``slices`` refer to the whole tensors, as in `Subscription.load_into`, with steps of 1. Floating-point dtypes
        are converted.
        """
        wanted = {name_of(path): tensor for path, tensor in take_apart(target).tensors.items()}
        with ExitStack() as stack:
            version, held = self._take(lambda part, version: stack.enter_context(part._reading(version)))

            def match(views: Sequence[Views]) -> Pairs:
                parts = [one.nested(one.tensors(memory)) for one, memory in zip(held, views, strict=True)]
                return _match(_put_together(version, parts), wanted, slices or {})

            copy_out(held, match, self._parts[0]._twins)
            return version

    def get(self) -> dict[str, Any]:
        """The newest version as a dict of whole tensors, copied together from the parts, by their names."""
        found = _put_together(*self._take(lambda part, version: part.get(version)))
        whole: dict[str, Any] = {}
        for name, pieces in found.pieces.items():
            whole[name] = torch.empty(found.shapes[name], dtype=pieces[0].tensor.dtype)
            for to, source in _plan(name, whole[name], _box(name, found.shapes[name], None), pieces):
                to.copy_(source)
        return {**whole, **found.values}

    def close(self) -> None:
        """End the subscription."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> PartsSubscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PartsSubscription to {self.name!r} in {len(self._parts)} parts: version {self.version}>"

    def _take(self, take: Callable[[Subscription, Version], T]) -> tuple[Version, list[T]]:
        """The newest version, and the result of ``take``, which holds the version, for each of its parts."""
        while True:
            version = self.version
            if version is None:
                raise LookupError(f"no version of {self.name!r} has arrived: call wait() first")
            taken = []
            for part in self._parts:
                found = [one for one in part.versions if one.number == version.number]
                try:
                    taken += [take(part, one) for one in found[-1:]]
                except LookupError:
                    break
            if len(taken) == len(self._parts):
                return version, taken
            # A part dropped this version between the two looks, because newer ones arrived: try the newest again.


def _put_together(version: Version, parts: Iterable[Mapping[str, Any]]) -> _Found:
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


def _match(found: _Found, wanted: Mapping[str, torch.Tensor], slices: Slices) -> Pairs:
    """The (target, source) pairs that fill the tensors of ``wanted``; raises if a tensor cannot be filled."""
    copies = []
    for name, tensor in wanted.items():
        if name not in found.shapes:
            raise ValueError(f"version {found.version} does not fit, and nothing was loaded: {name} is not in it")
        copies += _plan(name, tensor, _box(name, found.shapes[name], slices.get(name)), found.pieces[name])
        for why_not in filter(None, (why_not_loadable(tensor, piece.tensor.dtype) for piece in found.pieces[name])):
            raise ValueError(f"version {found.version} does not fit, and nothing was loaded: {name} {why_not}")
    return copies


def _box(name: str, shape: Sequence[int], slices: Sequence[slice | int] | None) -> Box:
    chosen = tuple(slices or ())
    if len(chosen) > len(shape) or not all(isinstance(one, slice) and one.step in (None, 1) for one in chosen):
        raise ValueError(f"{name}, of shape {tuple(shape)}: of weights in parts, slices with a step of 1 can be loaded")
    whole = [slice(None)] * (len(shape) - len(chosen))
    return tuple(one.indices(extent)[:2] for one, extent in zip((*chosen, *whole), shape, strict=True))  # type: ignore[union-attr]


def _plan(
    name: str, target: torch.Tensor, wanted: Box, pieces: Sequence[_Piece]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (target, source) pairs that fill ``target``, the box ``wanted`` of a tensor, from the tensor's pieces."""
    extents = tuple(max(0, stop - start) for start, stop in wanted)
    if tuple(target.shape) != extents:
        raise ValueError(f"{name} has the shape {extents}, the target's has {tuple(target.shape)}: nothing was loaded")
    copies, covered = [], 0
    seen: dict[Box, Box] = {}  # for each piece the box that is wanted of it
    for piece in pieces:
        common = tuple(
            (max(start, begin), min(stop, end)) for (start, stop), (begin, end) in zip(wanted, piece.box, strict=True)
        )
        if any(start >= stop for start, stop in common) or piece.box in seen:
            continue  # disjoint, or a replica of a piece already used
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
