"""The functions that the benchmark calls remotely. They do nothing, so that what is measured is the call."""

from __future__ import annotations

import torch


def noop() -> None:
    """Take nothing, do nothing, return nothing."""


def discard(tensor: torch.Tensor) -> None:
    """Take a tensor and return nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that came."""
    return tensor
