"""A version into the tensors of a program: all of them or none.

Everything that can go wrong is looked at before the first byte is copied: names, shapes, dtypes, tensors that cannot be
written to. Then the copies run; nothing in them can fail but the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from farcall.weights.layout import Leaves, copy_memory, has_memory, name_of, take_apart
from farcall.weights.manifest import Path
from farcall.weights.version import HeldVersion

Slices: TypeAlias = Mapping[str, tuple[slice | int, ...]]
_MOST_TOLD = 8


def load(version: HeldVersion, target: Any, slices: Slices | None = None) -> None:
    """Copy ``version`` into the tensors of ``target``, a module or nested dicts; see `Subscription.load_into`."""
    leaves = take_apart(target)
    pairs = _match(version, leaves, dict(slices or {}))
    values = version.values() if leaves.values else {}
    with torch.inference_mode():  # it may write to both kinds of tensors, and notes that it has
        for tensor, source in pairs:
            _copy(tensor, source)
    for path in leaves.values:
        if path in values:
            _set(target, path, values[path])


def _match(
    version: HeldVersion, leaves: Leaves, slices: dict[str, tuple[slice | int, ...]]
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of the target, and what is to be copied into it; raises if it cannot be."""
    tensors = version.tensors([block.view for block in version.blocks])
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
    """Why values of a dtype cannot be copied into ``tensor``; empty: they can."""
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
    """May values of one be loaded into the other? Floating-point dtypes into each other, as pushed with ``dtype=``."""
    return source == target or (source.is_floating_point and target.is_floating_point)


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    plain = tensor.device.type == "cpu" and tensor.dtype == source.dtype and tensor.stride() == source.stride()
    if plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        copy_memory(tensor.data_ptr(), source.data_ptr(), tensor.nbytes)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # or a backward pass would not notice
    else:
        tensor.copy_(source)


def _set(target: Any, path: Path, value: Any) -> None:
    """Put a value that is no tensor where it belongs."""
    if isinstance(target, torch.nn.Module):
        # state_dict() has such values only where a module has an "extra state" of its own.
        prefix, _, _ = name_of(path).rpartition(".")
        setter: Callable[[Any], None] = target.get_submodule(prefix).set_extra_state
        setter(value)
        return
    for key in path[:-1]:
        target = target[key]
    if not isinstance(target, tuple):
        target[path[-1]] = value
