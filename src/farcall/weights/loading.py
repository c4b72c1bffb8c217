"""Loading a version into the tensors of a program: all of them or none.

All checks come before the first copy: names, shapes, dtypes, tensors that cannot be written to. After them only the
machine itself can make a copy fail.

Tensors on devices are filled from the twins of blocks, where this process can open those (`twins.py`), else from host
memory, which is pinned for the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from farcall.channel.device_api import current_stream
from farcall.weights.layout import Leaves, has_memory, name_of, take_apart
from farcall.weights.manifest import Path
from farcall.weights.twins import Twins
from farcall.weights.version import HeldVersion

Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
Views: TypeAlias = Sequence[memoryview | torch.Tensor]
Slices: TypeAlias = Mapping[str, tuple[slice | int, ...]]
_MOST_TOLD = 8


def load(version: HeldVersion, target: Any, slices: Slices | None, twins: Twins) -> None:
    """Copy ``version`` into the tensors of ``target``, a module or nested dicts; see `Subscription.load_into`."""
    leaves = take_apart(target)
    values = version.values() if leaves.values else {}
    copy_out([version], lambda views: _match(version, views[0], leaves, dict(slices or {})), twins)
    for path in leaves.values:
        if path in values:
            _set(target, path, values[path])


def copy_out(versions: Sequence[HeldVersion], match: Callable[[Sequence[Views]], Pairs], twins: Twins) -> None:
    """Copy parts of ``versions`` into tensors: the (target, source) pairs that ``match`` makes from views of contents.

    ``match`` raises if a target does not fit, before anything is copied. Copies to devices run on the current streams.
    """
    on_host = [[block.view for block in version.blocks] for version in versions]
    pairs = match(on_host)
    uploads = [pair for pair in pairs if pair[0].is_cuda]
    # Only in inference mode may a program write to inference tensors; and writes to others still bump their versions.
    with torch.inference_mode():
        for tensor, source in pairs:
            if not tensor.is_cuda:
                _copy(tensor, source)
        opened = [twins.open(version) for version in versions] if uploads else []
        if any(twin is not None for one in opened for twin in one):
            near = [
                [view if twin is None else twin for view, twin in zip(*both, strict=True)]
                for both in zip(on_host, opened, strict=True)
            ]
            _upload(versions, [pair for pair in match(near) if pair[0].is_cuda])
            if all(map(twins.are_there, versions)):
                return
            # An owner died during the copy, and its memory may hold other bytes: copy again, from the host.
        if uploads:
            _upload(versions, uploads)


def _upload(versions: Sequence[HeldVersion], pairs: Pairs) -> None:
    """Copy into tensors on devices, and wait for the streams: the caller may drop the versions afterwards."""
    from_host = [tensor.get_device() for tensor, source in pairs if source.numel() and not source.is_cuda]
    if from_host:
        for block in (block for version in versions for block in version.blocks):
            block.pin(from_host[0])
    try:
        for tensor, source in pairs:
            # For other tensors torch makes a temporary copy on the host, which must outlive its upload: those block.
            is_plain = tensor.dtype == source.dtype and tensor.is_contiguous() and source.is_contiguous()
            tensor.copy_(source, non_blocking=source.is_cuda or is_plain)
    finally:
        for device in {tensor.get_device() for tensor, _ in pairs}:
            current_stream(device).synchronize()


def _match(version: HeldVersion, views: Views, leaves: Leaves, slices: dict[str, tuple[slice | int, ...]]) -> Pairs:
    """Each tensor of the target with its source in ``views``; raises, with all problems, if any does not fit."""
    tensors = version.tensors(views)
    places = {place.name: tensor for place, tensor in zip(version.manifest.layout.tensors, tensors, strict=True)}
    pairs, problems = [], []
    for name in slices.keys() - leaves.names:
        problems.append(f"{name} has slices, but is not in the target")
    for path, tensor in leaves.tensors.items():
        name = name_of(path)
        source = places.get(name)
        if source is None:
            problems.append(f"{name} is not in the version")
            continue
        if name in slices:
            try:
                source = source[slices[name]]
            except (IndexError, TypeError, ValueError) as error:
                problems.append(f"{name}, of shape {tuple(source.shape)}, has no slice {slices[name]}: {error}")
                continue
        if source.shape != tensor.shape:
            problems.append(f"{name} has the shape {tuple(source.shape)}, the target's has {tuple(tensor.shape)}")
        elif why_not := why_not_loadable(tensor, source.dtype):
            problems.append(f"{name} {why_not}")
        else:
            pairs.append((tensor, source))
    if problems:
        told = "; ".join(sorted(problems)[:_MOST_TOLD]) + ("; ..." if len(problems) > _MOST_TOLD else "")
        raise ValueError(f"version {version.version} does not fit, and nothing was loaded: {told}")
    return pairs


def why_not_loadable(tensor: torch.Tensor, source: torch.dtype) -> str:
    """Why values of the dtype ``source`` cannot be copied into ``tensor``; empty: they can."""
    if not _casts(source, tensor.dtype):
        return f"is of {source}, the target's of {tensor.dtype}"
    if not tensor.is_contiguous() and _is_expanded(tensor):
        return "of the target is expanded: several of its elements are one"
    if not has_memory(tensor):
        return "of the target has no memory at the moment"
    return ""


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))


def _casts(source: torch.dtype, target: torch.dtype) -> bool:
    """May ``source`` be loaded into ``target``? Floating-point dtypes convert into each other, as for ``dtype=``."""
    return source == target or (source.is_floating_point and target.is_floating_point)


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    plain = tensor.device.type == "cpu" and tensor.dtype == source.dtype and tensor.stride() == source.stride()
    if plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), tensor.nbytes)  # releases the interpreter lock
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # otherwise a backward pass would miss the change
    else:
        tensor.copy_(source)


def _set(target: Any, path: Path, value: Any) -> None:
    """Store a value that is not a tensor in the target."""
    if isinstance(target, torch.nn.Module):
        # In a state_dict() only the "extra state" of a module is not a tensor.
        prefix, _, _ = name_of(path).rpartition(".")
        setter: Callable[[Any], None] = target.get_submodule(prefix).set_extra_state
        setter(value)
        return
    for key in path[:-1]:
        target = target[key]
    if not isinstance(target, tuple):
        target[path[-1]] = value
