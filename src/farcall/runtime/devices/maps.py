"""Device maps, from local devices to a peer's devices: each member's wishes at the start, and the rules for them.

Pure functions over names such as "cuda:0"; only `wishes_of` looks at devices, and only if the options name some. The
error texts are those of torch.distributed.rpc, because programs and its tests match them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from farcall.errors import BadDeviceMap
from farcall.options import RpcBackendOptions


class DeviceWishes(msgspec.Struct, frozen=True):
    """The devices and maps that one member asks for, and how many CUDA devices it has."""

    count: int
    maps: dict[str, dict[str, str]]
    devices: tuple[str, ...]


def wishes_of(options: RpcBackendOptions) -> DeviceWishes | None:
    """The wishes in the options; None: they name no device."""
    if not options.names_devices:
        return None
    maps = {peer: dict(pairs) for peer, pairs in options.device_maps.items()}
    return DeviceWishes(torch.cuda.device_count(), maps, tuple(options.devices))


def check_device_maps(members: Mapping[str, DeviceWishes | None]) -> None:
    """Raise ``BadDeviceMap``, the same at every member, for maps that cannot work."""
    for name, wishes in members.items():
        if wishes is None:
            continue
        if len(set(wishes.devices)) != len(wishes.devices):
            raise BadDeviceMap(f"Node {name} has duplicated devices\ndevices = {list(wishes.devices)}")
        if not _are_valid(wishes.devices, wishes.count):
            raise BadDeviceMap(
                f"Node {name} has devices with invalid indices\n"
                f"devices = {list(wishes.devices)}\ndevice count = {wishes.count}"
            )
    for name, wishes in members.items():
        if wishes is None:
            continue
        if not set(wishes.maps) <= set(members):
            raise BadDeviceMap(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {list(wishes.maps)}\nnode names = {list(members)}"
            )
        for target, pairs in wishes.maps.items():
            _check_pairs(name, wishes, target, members.get(target), pairs)


def _check_pairs(
    name: str, wishes: DeviceWishes, target: str, theirs: DeviceWishes | None, pairs: Mapping[str, str]
) -> None:
    if len(set(pairs.values())) != len(pairs):
        raise BadDeviceMap(
            f"Node {name} has duplicated target devices in its device map for {target}\ndevice map = {pairs}"
        )
    sides = (("source", tuple(pairs), wishes), ("target", tuple(pairs.values()), theirs))
    for side, named, said in sides:
        if said is None:
            continue  # unknown: that member refuses later, if it has no device of that name
        if said.devices:
            if not set(named) - {"cpu"} <= set(said.devices):
                raise BadDeviceMap(
                    f"Node {name} has unexpected {side} devices in its device map for {target}\n"
                    f"device map = {pairs}\ndevices = {list(said.devices)}"
                )
        elif not _are_valid(named, said.count):
            raise BadDeviceMap(
                f"Node {name} has {side} devices with invalid indices in its device map for {target}\n"
                f"device map = {pairs}\ndevice count = {said.count}"
            )


def _are_valid(devices: Sequence[str], count: int) -> bool:
    return all(device == "cpu" or int(device.partition(":")[2]) < count for device in devices)


def reversed_map(pairs: Mapping[str, str]) -> dict[str, str]:
    """The map in the opposite direction."""
    return {target: source for source, target in pairs.items()}
