"""``torch.distributed.rpc._utils``: joining and leaving of members, which farcall does by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farcall.compat.rpc.agent import current_agent

__all__: list[str] = []


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Nothing to hold: members agree among themselves."""
    yield


def _update_group_membership(worker_info: Any, my_devices: Any, reverse_device_map: Any, is_join: bool) -> Any:
    return current_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
