"""Optimizers over parameters that live on many workers."""

from farcall.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
