"""A library owns its randomness: programs that seed Python's, torch's and numpy's generators see their own numbers."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.kit.autograd_callees import through_weight
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as autograd
from farcall.testing.cluster import finish, start_processes, temporary_file_url

SOURCE = Path(farcall.__file__).parent


def states() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest)


def live(rank: int, url: str, world_size: int | None) -> None:
    """A whole life: a start, calls of all kinds, a backward pass, a step, an end."""
    random.seed(7)
    torch.manual_seed(7)
    numpy.random.seed(7)
    x = torch.rand(2, 3, requires_grad=True)
    before = states()
    options = farcall.RpcBackendOptions(init_method=url)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    wait_until(lambda: len(farcall.members()) == 3)
    farcall.barrier(["w0", "w1", "w2"])  # else one may have left before another has looked
    if rank:
        assert farcall.rpc_async("w0", int, retry=farcall.Retry()).wait() == 0
        weight = farcall.remote("w0", torch.ones, (3, 3), {"requires_grad": True})
        optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        with autograd.context() as context_id:
            y = farcall.rpc_sync("w0", through_weight, (x,)) @ weight.to_here()
            autograd.backward(context_id, [y.sum()])
            optimizer.step(context_id)
    elif world_size is None:
        wait_until(lambda: len(farcall.members()) == 1)
    farcall.shutdown()
    assert states() == before


@pytest.mark.parametrize("world_size", [3, None])
def test_a_whole_life_draws_nothing(world_size: int | None) -> None:
    finish(start_processes(3, live, temporary_file_url(), world_size))


def test_no_part_draws_from_the_generators_of_the_process() -> None:
    drawing = re.compile(r"\brandom\.(?!Random\b)\w+\(|jitter=random\b|torch\.rand|np\.random|manual_seed")
    others = ("cli", "testing", "fork_server.py")  # its children seed numpy's anew, before the program begins
    parts = [path for path in SOURCE.rglob("*.py") if not {path.relative_to(SOURCE).parts[0], path.name} & {*others}]
    found = [f"{path}: {line}" for path in parts for line in path.read_text().splitlines() if drawing.search(line)]
    assert [line for line in found if "_random." not in line] == []
