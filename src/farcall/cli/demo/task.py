"""What the demo learns: which of two spirals a point lies on. Owns the points and the model; knows nothing of calls.

The model is one network cut in two, a part for each parameter server.
"""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["PARTS", "held_out", "spirals"]

WIDTH = 48
TURNS = 2.0
NOISE = 0.03
HELD_OUT_POINTS = 2000
_HELD_OUT_SEED = 1_000_000


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the square from -1 to 1, and 0 or 1 for the spiral that each lies on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator).float()
    radius = 0.1 + 0.85 * torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * TURNS * radius + math.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points + NOISE * torch.randn(count, 2, generator=generator), labels


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Points that no trainer sees."""
    return spirals(HELD_OUT_POINTS, _HELD_OUT_SEED)


class SharedLinear(nn.Linear):
    """A layer that several trainers use at once.

    It computes with copies of its weights: another trainer's optimizer may step between a forward pass and its backward
    pass, and autograd rightly refuses to go back through weights that were changed meanwhile.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight.clone(), self.bias.clone())


def _first() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(SharedLinear(2, WIDTH), nn.Tanh(), SharedLinear(WIDTH, WIDTH), nn.Tanh())


def _second() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(SharedLinear(WIDTH, WIDTH), nn.Tanh(), SharedLinear(WIDTH, 1), nn.Flatten(0))


PARTS = {"server0": _first, "server1": _second}
"""Who has which half, in the order in which points pass through them."""
