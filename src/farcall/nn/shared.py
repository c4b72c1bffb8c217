"""`Shared`: a module that several trainers use at the same time.

A backward pass needs the weights of its forward pass. If another trainer's step changes them in between, torch raises
"modified by an inplace operation". So each forward pass works on a copy of the weights, taken while no optimizer steps;
gradients go through the copy to the weights themselves.

Not by ``torch.func.functional_call``: that puts the copies into the module itself for the time of the call. Other
passes find them there, and they may stay for good, so that nothing is trained any more. Here each pass has modules of
its own, which share everything with the originals but their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from farcall.api import current_runtime
from farcall.optim.optimizer import steps_of


class Shared(nn.Module):
    """A module whose steps by one trainer never disturb the backward pass of another.

        model = farcall.nn.Shared(Model())      # where the model lives

    It is used like ``module`` itself, which it keeps as ``.module``. Each forward pass copies the weights; gradients
    are those at the weights that the pass has seen, as with asynchronous gradient descent everywhere. All optimizers of
    the weights must be `farcall.optim.DistributedOptimizer`. A forward pass may set no attributes of the module: they
    would be those of its copy. Buffers that are changed in place, such as the statistics of batch norm, are shared.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the weights of this moment."""
        with steps_of(current_runtime()):  # not between the weights of two steps
            copied = _copy(self.module)
        return copied(*args, **kwargs)


def _copy(module: nn.Module) -> nn.Module:
    """The same tree of modules with weights of its own, through which gradients flow to the originals."""
    copies = {child: child.__new__(type(child)) for child in module.modules()}
    weights: dict[torch.Tensor, torch.Tensor] = {}  # weights that are tied stay so
    for child, copied in copies.items():
        own: dict[str, torch.Tensor | None] = {}
        for name, weight in child._parameters.items():
            if weight is not None and weight not in weights:
                weights[weight] = weight.clone()
            own[name] = None if weight is None else weights[weight]
        children = {name: None if found is None else copies[found] for name, found in child._modules.items()}
        copied.__dict__ = {**child.__dict__, "_parameters": own, "_modules": children}
        if isinstance(copied, nn.RNNBase):  # which keeps a list of its weights beside them
            copied._flat_weights = [getattr(copied, name, None) for name in copied._flat_weights_names]
    return copies[module]
