"""What members say about devices, and what must be so."""

from __future__ import annotations

import pytest

from farcall.errors import BadDeviceMap
from farcall.options import RpcBackendOptions
from farcall.runtime.devices.maps import DeviceWishes, check_device_maps, reversed_map, wishes_of


def wishes(count: int = 2, devices: tuple[str, ...] = (), **maps: dict[str, str]) -> DeviceWishes:
    return DeviceWishes(count, maps, devices)


def test_good_maps() -> None:
    check_device_maps({"a": wishes(b={"cuda:0": "cuda:1", "cpu": "cuda:0"}, a={"cuda:1": "cpu"}), "b": wishes()})
    check_device_maps({"a": wishes(b={"cuda:0": "cuda:9"}), "b": None})
    check_device_maps({"a": None, "b": None})


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"a": wishes(c={"cuda:0": "cuda:0"}), "b": None}, "Node a has invalid target node names in its device maps"),
        ({"a": wishes(b={"cuda:2": "cuda:0"}), "b": None}, "source devices with invalid indices in its device map for"),
        ({"a": wishes(b={"cuda:0": "cuda:2"}), "b": wishes()}, "target devices with invalid indices in its device map"),
        ({"a": wishes(b={"cuda:0": "cpu", "cuda:1": "cpu"}), "b": None}, "Node a has duplicated target devices in its"),
        ({"a": wishes(devices=("cuda:1",), b={"cuda:0": "cuda:0"}), "b": None}, "unexpected source devices in its"),
        ({"a": wishes(b={"cuda:0": "cuda:1"}), "b": wishes(devices=("cuda:0",))}, "unexpected target devices in its"),
        ({"a": wishes(devices=("cuda:0", "cuda:0"))}, "Node a has duplicated devices"),
        ({"a": wishes(devices=("cuda:7",))}, "Node a has devices with invalid indices"),
    ],
)
def test_bad_maps(members: dict[str, DeviceWishes | None], text: str) -> None:
    with pytest.raises(BadDeviceMap, match=text):
        check_device_maps(members)
    assert issubclass(BadDeviceMap, ValueError)


def test_the_way_back() -> None:
    assert reversed_map({"cuda:0": "cuda:1", "cpu": "cuda:0"}) == {"cuda:1": "cuda:0", "cuda:0": "cpu"}


def test_nothing_is_said_where_the_options_say_nothing() -> None:
    assert wishes_of(RpcBackendOptions()) is None
    said = wishes_of(RpcBackendOptions(device_maps={"b": {0: "cuda:1"}}, devices=[0]))
    assert said is not None
    assert said.maps == {"b": {"cuda:0": "cuda:1"}}
    assert said.devices == ("cuda:0",)
