"""``torch.distributed.optim.DistributedOptimizer``, served by farcall."""

from __future__ import annotations

from farcall.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
