"""What farcall promises to bear: three workers use references and distributed autograd while messages misbehave.

Each case is a fault that may change when things happen and never what comes out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.kit.workload import SIZE, use_everything

from farcall.testing.cluster import run_cluster
from farcall.testing.faults import Faults

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


@pytest.mark.parametrize("fault", FAULTS)
def test_it_makes_no_difference_that(fault):
    faults = Faults(seed=3)
    FAULTS[fault](faults)
    run_cluster(SIZE, use_everything, faults=faults)
