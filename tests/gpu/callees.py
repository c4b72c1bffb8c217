"""What the tests on a GPU share: the maps, and functions that workers call on each other."""

from __future__ import annotations

from typing import Any

import torch
from tests.kit.waiting import wait_until

import farcall
from farcall.runtime.node import current_runtime

CUDA = torch.device("cuda", 0)
MAPS = {"device_maps": {"w0": {"cuda:0": "cuda:0"}, "w1": {"cuda:0": "cuda:0"}}}
MEBIBYTE = 1 << 20
SLOW_CYCLES = 200_000_000  # about 0.1 s


def way(to: str) -> Any:
    return current_runtime().peer(to).devices._ways.get(0)


def lent() -> int:
    devices = current_runtime().devices
    return 0 if devices is None else devices.stats().lent


def share(to: str) -> None:
    """Until device memory goes to ``to`` without the host, and back."""

    def is_shared() -> bool:
        back = farcall.rpc_sync(to, send_back, args=(torch.ones(MEBIBYTE, device=CUDA), current_runtime().info.name))
        return way(to) is True and bool(back)

    wait_until(is_shared)


def send_back(x: torch.Tensor, to: str) -> bool:
    farcall.rpc_sync(to, total, args=(x,))
    return way(to) is True


def echo(*values: Any) -> Any:
    return values


def total(x: torch.Tensor) -> float:
    return x.double().sum().item()


def slowly_filled(value: int, size: int) -> torch.Tensor:
    x = torch.zeros(size, device=CUDA)
    torch.cuda._sleep(SLOW_CYCLES)
    return x.fill_(value)
