"""What farcall promises to bear: three workers use references and distributed autograd while messages misbehave.

Each case is a fault that may change when things happen and never what comes out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import farcall
import farcall.autograd as dist_autograd
from farcall.testing.cluster import run_cluster
from farcall.testing.faults import Faults

SIZE = 3
ROUNDS = 6
# Not Register: whoever uses a reference says first, over the same connection, that it holds it.
COUNTING = ("Confirm", "Accept", "Release", "Withdraw", "CallCancelled")
EVERYTHING = ("request", "response", "failure", "control", "letter")

FAULTS: dict[str, Callable[[Faults], object]] = {
    "letters come twice": lambda faults: faults.duplicate(kind="letter"),
    "letters come again later": lambda faults: faults.duplicate(kind="letter", after_s=0.01),
    "letters come late": lambda faults: faults.delay(0.0, kind="letter", jitter_s=0.02),
    "letters overtake": lambda faults: faults.reorder(kind="letter", within_s=0.02, probability=0.5),
    "control messages come twice": lambda faults: faults.duplicate(kind="control"),
    "control messages come again later": lambda faults: faults.duplicate(kind="control", after_s=0.01),
    "control messages come late": lambda faults: faults.delay(0.0, kind="control", jitter_s=0.02, in_order=True),
    "what is counted comes late": lambda faults: faults.delay(0.0, kind=COUNTING, jitter_s=0.02),
    "what is counted overtakes": lambda faults: faults.reorder(kind=COUNTING, within_s=0.02, probability=0.5),
    "control messages are sent again": lambda faults: faults.fail(
        kind=("control", "letter"), attempts=2, retry_s=0.005
    ),
    "answers come again": lambda faults: faults.duplicate(kind=("response", "failure"), after_s=0.005),
    "creations come again": lambda faults: faults.duplicate(kind="create", after_s=0.005),
    "the network is slow": lambda faults: faults.delay(0.0, kind=EVERYTHING, jitter_s=0.01, in_order=True),
    "the network is narrow": lambda faults: faults.throttle(200_000),
    "the network comes and goes": lambda faults: faults.half_open(0.02, kind="request", probability=0.1, count=None),
}


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


@pytest.mark.parametrize("fault", FAULTS)
def test_it_makes_no_difference_that(fault):
    faults = Faults(seed=3)
    FAULTS[fault](faults)
    run_cluster(SIZE, use_everything, faults=faults)
