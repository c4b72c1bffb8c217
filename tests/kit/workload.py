"""A program that uses every part of farcall: calls, references, distributed autograd and errors, on three workers."""

from __future__ import annotations

import pytest
import torch

import farcall
import farcall.autograd as dist_autograd

SIZE = 3
ROUNDS = 6


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def triple_and_double(tensor: torch.Tensor, to: str) -> torch.Tensor:
    return farcall.rpc_sync(to, double, (tensor * 3,))


def double_what(rref: farcall.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here() * 2


def use_everything(rank: int) -> None:
    following, preceding = f"w{(rank + 1) % SIZE}", f"w{(rank + 2) % SIZE}"
    for number in range(ROUNDS):
        with dist_autograd.context() as context_id:
            tensor = torch.ones(4, requires_grad=True)
            there_and_on = farcall.rpc_sync(following, triple_and_double, (tensor, preceding))
            there = farcall.rpc_sync(preceding, double, (tensor,))
            farcall.rpc_sync(preceding, double, (tensor,))  # not part of the loss
            dist_autograd.backward(context_id, [(there_and_on + there).sum()])
            assert torch.equal(dist_autograd.get_gradients(context_id)[tensor], torch.full((4,), 8.0))
        made = farcall.remote(following, torch.full, ((3,), float(number)))
        used = farcall.remote(preceding, double_what, (made,))
        assert torch.equal(used.to_here(), torch.full((3,), 2.0 * number))
        with pytest.raises(ZeroDivisionError):
            farcall.rpc_sync(following, divmod, (1, 0))
