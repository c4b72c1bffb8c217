"""A program's source taken apart: its tensors, its other values, and the storages that the tensors lie in.

A storage is the unit of copying. Tensors that overlap in memory (tied tensors, views of one another) share a storage,
laid out as in the program's memory; all other tensors are packed. Two tensors that lie apart in one buffer get two
storages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch

from farcall.channel.host_memory import address_of
from farcall.weights.checksums import WORD_BYTES, checksum, copy_with_checksum
from farcall.weights.manifest import Path


def name_of(path: Path) -> str:
    """The name of the value at ``path``, in torch's manner: the keys, joined by dots."""
    return ".".join(map(str, path))


class Leaves(NamedTuple):
    """A nested value, taken apart: its leaves and its containers, by their paths."""

    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    containers: dict[Path, Literal["dict", "list", "tuple"]]

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return {name_of(path) for path in self.tensors}


def take_apart(source: Any) -> Leaves:
    """The leaves of a module, a state dict, or nested dicts and lists."""
    leaves = Leaves({}, {}, {})
    _walk(source.state_dict() if isinstance(source, torch.nn.Module) else source, (), leaves)
    if len(leaves.names) < len(leaves.tensors):
        raise ValueError(
            "two tensors have the same name, one by nesting and one by a dot in its key: rename one of them"
        )
    return leaves


def _walk(value: Any, path: Path, leaves: Leaves) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise TypeError(f"{name_of(path)} is a {value.layout} tensor on {value.device}: only dense ones can travel")
        if value.is_quantized:
            raise TypeError(f"{name_of(path)} is quantized: publish its int_repr(), scales and zero points")
        leaves.tensors[path] = value.detach()
    elif isinstance(value, Mapping):
        leaves.containers[path] = "dict"
        for key, item in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"the key {key!r} below {name_of(path)!r} is neither a text nor a number")
            _walk(item, (*path, key), leaves)
    elif type(value) in (list, tuple) and _has_tensors(value):
        leaves.containers[path] = "list" if isinstance(value, list) else "tuple"
        for index, item in enumerate(value):
            _walk(item, (*path, index), leaves)
    elif not path:
        raise TypeError(f"publish a module or a dict of tensors, not {type(value).__name__}")
    else:
        leaves.values[path] = value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_tensors, value))


class StoragePlan(NamedTuple):
    """One storage: the tensors in it, and the copy that fills it."""

    members: dict[Path, tuple[tuple[int, ...], int]]
    """The strides and the offset of each tensor, in elements."""
    source: torch.Tensor
    """The tensor to copy; it has one dimension if several views lie in the storage."""
    dtype: torch.dtype
    size_bytes: int

    @property
    def is_plain(self) -> bool:
        """Is a plain copy of bytes enough, without a conversion or other strides?"""
        return self.source.dtype == self.dtype and _is_plain(self.source)

    @property
    def device(self) -> int:
        """The index of the device that holds the program's values; -1: host memory."""
        return self.source.get_device() if self.source.is_cuda else -1

    def fill(self, view: memoryview) -> int:
        """Copy the program's values into ``view``, which has their size; return their checksum."""
        source = self.source
        if self.is_plain and source.device.type == "cpu":
            return copy_with_checksum(address_of(view), source.data_ptr(), self.size_bytes)
        self._copy_to(torch.frombuffer(view, dtype=self.dtype, count=source.numel()))
        return checksum(view)

    def packed(self, room: torch.Tensor | None) -> torch.Tensor:
        """The packed bytes of the storage on its device: in ``room``, or else in place, or else in a new tensor."""
        source = self.source
        if room is None and self.is_plain:
            begin, end = _extent(source)
            if begin % WORD_BYTES == 0 and source.untyped_storage().data_ptr() % WORD_BYTES == 0:
                return _bytes_of(source, begin, end)
        if room is None:
            room = torch.empty(self.size_bytes, dtype=torch.uint8, device=source.device)
        self._copy_to(room.view(self.dtype))
        return room

    def _copy_to(self, flat: torch.Tensor) -> None:
        source = self.source
        flat.as_strided(source.shape, _packed_strides(source)).copy_(source, non_blocking=flat.is_cuda)


def signature_of(tensors: Mapping[Path, torch.Tensor]) -> list[tuple[object, ...]]:
    """The addresses and the layouts of tensors: an equal signature means that an earlier plan is still valid."""
    return [
        (path, one.data_ptr(), one.shape, one.stride(), one.dtype, one.is_conj(), one.is_neg())
        for path, one in tensors.items()
    ]


def has_memory(tensor: torch.Tensor) -> bool:
    """Does ``tensor`` have memory? Libraries that shard models resize storages to nothing and back."""
    return tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize or not tensor.numel()


def plan_storages(tensors: Mapping[Path, torch.Tensor], dtype: torch.dtype | None) -> list[StoragePlan]:
    """The storages of ``tensors``, in their order; ``dtype``, if given, is the dtype of floating-point storages."""
    for path, tensor in tensors.items():
        if not has_memory(tensor):
            raise ValueError(f"{name_of(path)} has no memory at the moment: gather its shards first")
    plans = []
    for group in _groups(tensors):
        paths = list(group)
        first = tensors[paths[0]]
        views = [tensors[path] for path in paths]
        if all(_placement(view) == _placement(first) for view in views):
            wanted = _wanted(first.dtype, dtype)
            size = first.numel() * wanted.itemsize
            members = dict.fromkeys(paths, (_packed_strides(first), 0))
            plans.append(StoragePlan(members, first, wanted, size))
            continue
        if any(view.dtype != first.dtype for view in views):
            # Views of the same memory with several dtypes: copy the bytes, without a conversion.
            unit = max(view.dtype.itemsize for view in views)
            begin = min(_extent(view)[0] for view in views) // unit * unit
            end = max(_extent(view)[1] for view in views)
            source = _bytes_of(first, begin, end)
            placed = {
                path: (view.stride(), (_extent(view)[0] - begin) // view.dtype.itemsize)
                for path, view in zip(paths, views, strict=True)
            }
            plans.append(StoragePlan(placed, source, torch.uint8, end - begin))
            continue
        start = min(_offset(view) for view in views)
        last = max(_extent(view)[1] for view in views) // first.dtype.itemsize
        source = torch.as_strided(first, (last - start,), (1,), start)
        wanted = _wanted(first.dtype, dtype)
        placed = {path: (view.stride(), _offset(view) - start) for path, view in zip(paths, views, strict=True)}
        plans.append(StoragePlan(placed, source, wanted, (last - start) * wanted.itemsize))
    return plans


def _groups(tensors: Mapping[Path, torch.Tensor]) -> Iterator[list[Path]]:
    """The groups of overlapping tensors, ordered by the first tensor of each."""
    order = {path: index for index, path in enumerate(tensors)}
    by_storage: dict[tuple[str, int], list[Path]] = {}
    for path, tensor in tensors.items():
        # Empty tensors have no memory to share.
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else -1 - order[path]
        by_storage.setdefault((str(tensor.device), address), []).append(path)
    groups: list[list[Path]] = []
    for paths in by_storage.values():
        end = -1
        for path in sorted(paths, key=lambda path: _extent(tensors[path])):
            begin, its_end = _extent(tensors[path])
            if begin < end:
                groups[-1].append(path)
            else:
                groups.append([path])
            end = max(end, its_end) if begin < end else its_end
    return iter(sorted(groups, key=lambda group: min(order[path] for path in group)))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of bytes of its storage that a tensor spans: from, to."""
    begin = _offset(tensor) * tensor.dtype.itemsize
    if not tensor.numel():
        return begin, begin
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.dtype.itemsize


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _placement(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _bytes_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), begin, (end - begin,))  # type: ignore[call-overload,no-any-return]


def _wanted(dtype: torch.dtype, cast_to: torch.dtype | None) -> torch.dtype:
    return cast_to if cast_to is not None and dtype.is_floating_point else dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Does its memory equal that of a packed copy?"""
    packed = tensor.is_contiguous() or tensor.stride() == _packed_strides(tensor)
    return packed and not tensor.is_conj() and not tensor.is_neg()


def _packed_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy without gaps that keeps the order of the dimensions."""
    dims = list(range(tensor.ndim - 1, -1, -1))
    if not tensor.is_contiguous():
        dims = sorted(dims, key=tensor.stride)
    strides = [0] * tensor.ndim
    stride = 1
    for dim in dims:
        strides[dim] = stride
        stride *= max(tensor.shape[dim], 1)
    return tuple(strides)
