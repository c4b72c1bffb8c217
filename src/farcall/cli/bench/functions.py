"""The functions that the benchmark calls remotely. They do next to nothing, so that what is measured is the call."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import torch

WAIT_S = 0.05


def noop() -> None:
    """Take nothing, do nothing, return nothing."""


def discard(tensor: torch.Tensor) -> None:
    """Take a tensor and return nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that came."""
    return tensor


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    """What `scripted` compiles."""
    return tensor + 1


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """What `scripted_wait` compiles: it takes 50 ms, and nobody's core."""
    result: torch.Tensor = torch.ops.farcall_bench.wait(tensor)
    return result


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(WAIT_S)
    return tensor.clone()


@functools.cache
def scripted() -> tuple[Any, Any]:
    """`add_one` and `wait` as TorchScript functions, compiled where they are first asked for."""
    torch.library.custom_op("farcall_bench::wait", _wait, mutates_args=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so
        return torch.jit.script(add_one), torch.jit.script(wait)


def compile_scripts() -> None:
    """Compile them here: they are called by name."""
    scripted()


class Layer:
    """A weight on its worker."""

    def __init__(self, width: int) -> None:
        self.weight: torch.nn.Parameter = torch.nn.Parameter(torch.eye(width))

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
