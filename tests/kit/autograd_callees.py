"""Functions that tests of distributed autograd call on workers."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as autograd


class Held:
    """What a worker has of its own."""

    weight = torch.full((3, 3), 0.5, requires_grad=True)
    kept: ClassVar[dict[str, torch.Tensor]] = {}
    in_backward = threading.Event()


def through_weight(x: torch.Tensor) -> torch.Tensor:
    return x @ Held.weight


def onward(route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Through this worker's weight, then on to the next of the route."""
    y = through_weight(x)
    return farcall.rpc_sync(route[0], onward, (route[1:], y)) if route else y


def known(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


def counts() -> dict[str, str]:
    return autograd._get_debug_info()


def released_everywhere(context_id: int, names: list[str]) -> None:
    for name in names:
        wait_until(lambda name=name: not farcall.rpc_sync(name, known, (context_id,)), f"release on {name}")
