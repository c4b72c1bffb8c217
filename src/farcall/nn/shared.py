"""`Shared`: a module that several trainers use at the same time.

A backward pass needs the weights of its forward pass. Where another trainer's step changes them in between, torch
raises "modified by an inplace operation". So each forward pass works on a copy of the weights, taken while no optimizer
steps; gradients go through the copy to the weights themselves.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.func import functional_call

from farcall.api import current_runtime
from farcall.optim.optimizer import steps_of

__all__ = ["Shared"]


class Shared(nn.Module):
    """A module whose steps by one trainer never disturb the backward pass of another.

        model = farcall.nn.Shared(Model())      # where the model lives

    It is used like ``module`` itself, which it keeps as ``.module``. Each forward pass copies the weights; gradients
    are those at the weights that the pass has seen, as with asynchronous gradient descent everywhere. All optimizers of
    the weights must be `farcall.optim.DistributedOptimizer`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the weights of this moment."""
        with steps_of(current_runtime()):  # not between the weights of two steps
            weights = {name: weight.clone() for name, weight in self.module.named_parameters()}
        return functional_call(self.module, weights, args, kwargs)
