"""The functions that the benchmark calls remotely. They do next to nothing, so that what is measured is the call."""

from __future__ import annotations

from typing import Any

import torch


def noop() -> None:
    """Take nothing, do nothing, return nothing."""


def discard(tensor: torch.Tensor) -> None:
    """Take a tensor and return nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that came."""
    return tensor


class Layer:
    """A weight on its worker."""

    def __init__(self, width: int) -> None:
        self.weight = torch.nn.Parameter(torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass ``x`` through the weight."""
        return x @ self.weight


def weight_of(layer: Any) -> torch.nn.Parameter:
    """The weight behind a reference to a layer of this worker."""
    weight: torch.nn.Parameter = layer.local_value().weight
    return weight


class Service:
    """An object for references to refer to."""

    def noop(self) -> None:
        """Take nothing, do nothing, return nothing."""


def owned_by_stock() -> int:
    """How many values that others refer to live here."""
    from torch.distributed import rpc

    info: dict[str, str] = rpc._rref_context_get_debug_info()  # type: ignore[attr-defined]
    return int(info["num_owner_rrefs"])


def owned_by_farcall() -> int:
    """The same."""
    import farcall

    return int(farcall._rref_context_get_debug_info()["num_owner_rrefs"])
