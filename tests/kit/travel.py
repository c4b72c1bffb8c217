"""How far an operation travels: the Python functions it enters at both ends, and their files."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import farcall
import farcall.autograd as dist_autograd
from farcall.serialize.code import is_available
from farcall.testing.cluster import finish, start_processes, temporary_file_url

SOURCE = str(Path(farcall.__file__).parent) + os.sep
TIMES = 10
"""How often each operation is done in a batch."""
WARM = 50
"""How often before: functions have to be known as quick."""
BATCHES = 100
"""The fewest functions of a batch count, and the files that all batches enter: on a busy machine threads take turns,
and quick functions are slow."""


PATIENCE_S = 240.0


class Travel(NamedTuple):
    """What one operation enters, on average, at caller and callee together."""

    functions: float
    files: frozenset[str]
    """Of farcall, those in which something is entered at least every second time; relative to the package."""


_entered: Counter[CodeType] = Counter()
_over = threading.Event()


def _count(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        _entered[frame.f_code] += 1


def _begin() -> None:
    _entered.clear()


def _end() -> dict[str, int]:
    found: Counter[str] = Counter()
    for code, times in _entered.copy().items():
        found[f"{code.co_filename}:{code.co_qualname}"] += times
    return dict(found)


def _finish() -> None:
    _over.set()


def nothing() -> None:
    """Does nothing."""


def numel(tensor: torch.Tensor) -> int:
    """Reads a tensor and answers with a number."""
    return tensor.numel()


def layer(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Does what callees do."""
    return torch.tanh(inputs @ weight)


def _operations() -> dict[str, Callable[[], object]]:
    inputs, weight = torch.randn(64, 64), torch.randn(64, 64)
    large = torch.randn(256, 64)
    trained = torch.randn(64, 64, requires_grad=True)
    worker = farcall.worker("w1")

    def step() -> None:
        with dist_autograd.context() as context_id:
            result = farcall.rpc_sync("w1", layer, args=(inputs, trained))
            dist_autograd.backward(context_id, [result.sum()])
            dist_autograd.get_gradients(context_id)

    def own(tensor: torch.Tensor) -> int:
        return tensor.numel()

    scale = 3

    def with_a_value(tensor: torch.Tensor) -> int:
        return tensor.numel() * scale

    by_value: dict[str, Callable[[], object]] = {
        "function by value": lambda: farcall.rpc_sync("w1", own, args=(inputs,)),
        "function by value with a value": lambda: farcall.rpc_sync("w1", with_a_value, args=(inputs,)),
    }
    return {
        "no-op": lambda: farcall.rpc_sync("w1", nothing),
        "handle": lambda: worker.call(numel, inputs),
        "call": lambda: farcall.rpc_sync("w1", numel, args=(inputs,)),
        "operator": lambda: farcall.rpc_sync("w1", torch.add, args=(inputs, weight)),
        "operator in shared memory": lambda: farcall.rpc_sync("w1", torch.add, args=(large, large + 1)),
        "reference": lambda: farcall.remote("w1", numel, args=(inputs,)).to_here(),
        "backward": step,
        **(by_value if is_available() else {}),
    }


def _work(rank: int, url: str) -> dict[str, Travel]:
    torch.set_num_threads(1)
    sys.setprofile(_count)
    threading.setprofile(_count)
    options = farcall.RpcBackendOptions(init_method=url, busy_wait_s=0)  # each look would count
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: dict[str, Travel] = {}
    if rank == 0:
        for name, operation in _operations().items():
            for _ in range(WARM):
                operation()
            found[name] = _all([_batch(operation) for _ in range(BATCHES)])
        farcall.rpc_sync("w1", _finish)
    else:
        assert _over.wait(PATIENCE_S)  # and not in shutdown(), which looks again and again whether the node is idle
    farcall.shutdown()
    sys.setprofile(None)
    threading.setprofile(None)
    return found


def _all(batches: list[Travel]) -> Travel:
    files = frozenset.intersection(*(files for _, files in batches))
    return Travel(min(functions for functions, _ in batches), files)


def _batch(operation: Callable[[], object]) -> Travel:
    farcall.rpc_sync("w1", _begin)
    _begin()
    for _ in range(TIMES):
        operation()
    here = _end()
    sides: list[dict[str, int]] = [here, farcall.rpc_sync("w1", _end)]
    files = {
        place.removeprefix(SOURCE).rpartition(":")[0]
        for side in sides
        for place, times in side.items()
        if place.startswith(SOURCE) and times >= TIMES / 2
    }
    return Travel(sum(sum(side.values()) for side in sides) / TIMES, frozenset(files))


def measure() -> dict[str, Travel]:
    """How far each operation travels, by its name."""
    found: dict[str, Travel] = finish(start_processes(2, _work, temporary_file_url()), PATIENCE_S)[0]
    return found
