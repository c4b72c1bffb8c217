"""Which device here goes to which device there: what members say about it at the start, and what must be so.

Pure functions over names such as "cuda:0"; nothing here looks at a device but `wishes_of`, and only where the options
name some. The texts of the errors are those of torch.distributed.rpc, which programs and its tests look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from farcall.errors import BadDeviceMap
from farcall.options import RpcBackendOptions


class DeviceWishes(msgspec.Struct, frozen=True):
    """What one member says about devices."""

    count: int
    maps: dict[str, dict[str, str]]
    devices: tuple[str, ...]


def wishes_of(options: RpcBackendOptions) -> DeviceWishes | None:
    """What the options say; None: nothing."""
    if not options.names_devices:
        return None
    maps = {peer: dict(pairs) for peer, pairs in options.device_maps.items()}
    return DeviceWishes(torch.cuda.device_count(), maps, tuple(options.devices))


def check_device_maps(members: Mapping[str, DeviceWishes | None], is_static: bool = True) -> None:
    """Raise ``BadDeviceMap``, alike at every member, where maps cannot be."""
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
        if is_static and not set(wishes.maps) <= set(members):
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
            continue  # it says nothing about devices: it will say so if it has none of that name
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
    """From there to here."""
    return {target: source for source, target in pairs.items()}
