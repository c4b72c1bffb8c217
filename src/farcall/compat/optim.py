"""``torch.distributed.optim.DistributedOptimizer``, served by farcall."""

from __future__ import annotations

from typing import Any

from farcall.compat.rpc.unserved import find_unserved
from farcall.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
